"""Tokens to text: incremental UTF-8, stop strings, and what may be shown when (the text law).

Text is valid UTF-8 and never taken back. Only an unfinished character and the longest suffix that is a
proper prefix of a stop string are held back; both are settled at the end. So the text depends on the
tokens alone, not on how they were grouped into deltas.
"""

import codecs
from collections import deque
from collections.abc import Iterable

from service.stop_strings import StopAutomaton
from service.token_bytes import TokenTable

_PER_BYTE = "picovllm-per-byte"
_NO_STOPS = StopAutomaton(())


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_PER_BYTE, _replace_each_byte)
_new_decoder = codecs.getincrementaldecoder("utf-8")


class OutputText:
    """The text of one output, built token by token.

    `push` takes a sampled token, `push_stop_token` the EOS or stop token that ended the output; both return the
    text that may be shown now. When a stop string is complete, ``stop_text`` and ``token_count`` (up to the
    token that completes it) are final and further tokens are ignored. `settle` ends the output.
    A stop string that is complete before ``min_tokens`` tokens does not stop.
    """

    def __init__(
        self,
        table: TokenTable,
        stops: StopAutomaton = _NO_STOPS,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._table = table
        self._stops = stops
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = _new_decoder(_PER_BYTE if table.per_byte else "replace")
        self._state = 0
        self._held = ""
        self._released = 0
        self._decoded = 0
        self._unseen: deque[tuple[int, int]] = deque()
        self.token_count = 0
        self.visible_token_count = 0
        self.stop_text: str | None = None
        self._settled = False

    @property
    def ended(self) -> bool:
        """Whether a stop string ended it or it was settled."""
        return self._settled or self.stop_text is not None

    def push(self, token_id: int) -> str:
        """One more token; the text that may be shown now."""
        if self.ended:
            return ""
        self.token_count += 1
        if self._skip_special and token_id in self._table.special:
            return ""
        return self._scan(self._decode(self._table.bytes_of(token_id)))

    def push_stop_token(self, token_id: int) -> str:
        """The EOS or stop token that ended the output: part of the text only with include_stop."""
        if self.ended:
            return ""
        self.token_count += 1
        if not self._include_stop:
            return ""
        return self._release(self._held + self._decode(self._table.bytes_of(token_id)))

    def settle(self) -> str:
        """The end: a half character becomes U+FFFD, which may complete a stop string; else what was held is shown."""
        if self.ended:
            return ""
        shown = self._scan(self._utf8.decode(b"", final=True))
        self._settled = True
        return shown if self.stop_text is not None else shown + self._release(self._held)

    def _decode(self, raw: bytes) -> str:
        """New whole characters; remembers at which character this token's first byte lies."""
        if not raw:
            return ""
        head = ""
        first = self._decoded
        if self._utf8.getstate()[0]:
            head = self._utf8.decode(raw[:1])
            still_open = bool(self._utf8.getstate()[0])
            first += len(head) - (0 if still_open else 1)
            raw = raw[1:]
        self._unseen.append((self.token_count, first))
        text = head + self._utf8.decode(raw)
        self._decoded += len(text)
        return text

    def _scan(self, text: str) -> str:
        stops = self._stops
        if self._state == 0 and not stops.starts_in(text):
            return self._release(text)
        for position, character in enumerate(text, start=1):
            self._state = stops.step(self._state, character)
            stop = stops.match(self._state)
            if stop is not None and self.token_count >= self._min_tokens:
                return self._stop_at(self._held + text[:position], stop)
        whole = self._held + text
        return self._release(whole, hold=stops.hold(self._state))

    def _stop_at(self, text: str, stop: str) -> str:
        self.stop_text = stop
        return self._release(text if self._include_stop else text[: -len(stop)])

    def _release(self, text: str, hold: int = 0) -> str:
        """Everything but the last ``hold`` characters of ``text``, which holds all that is not yet shown."""
        shown, self._held = (text[:-hold], text[-hold:]) if hold else (text, "")
        self._released += len(shown)
        while self._unseen and self._unseen[0][1] < self._released:
            self.visible_token_count = self._unseen.popleft()[0]
        return shown


def decode_tokens(table: TokenTable, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole token sequence from its start."""
    special = table.special if skip_special_tokens else frozenset()
    raw = b"".join(table.bytes_of(token_id) for token_id in token_ids if token_id not in special)
    text = raw.decode("utf-8", _PER_BYTE if table.per_byte else "replace")
    return text[1:] if table.strips_leading_space and text.startswith(" ") else text
