"""What a step costs, learned from the steps that were taken, and so how long prompt chunks may be. Pure Python.

    seconds = what the decode rows cost alone + fixed + per_token x chunk tokens

All figures are medians over the last steps of a kind, so one step that was disturbed counts for nothing, and they
follow what changes: longer contexts, another batch.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

MIN_CHUNK_TOKENS = 16  # however slow a step is: prompts must move on
_FIRST_CHUNK_TOKENS = 64  # before anything is known
_GROWTH = 4  # a chunk is at most so many times the longest one seen of late
_HEADROOM = 0.9  # medians: half of the steps take longer
_DECODE_STEPS, _CHUNK_STEPS = 9, 16  # that are remembered


class StepCost:
    """Learns by `observe`. Its figures start at nothing, and chunks start short."""

    def __init__(self) -> None:
        self._decode: dict[int, deque[float]] = {}  # seconds, by the binary length of the number of rows
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_CHUNK_STEPS)  # tokens, seconds without decode rows
        self.fixed = self.per_token = 0.0

    def observe(self, num_decode: int, chunk_tokens: int, seconds: float) -> None:
        """A step of ``num_decode`` rows and ``chunk_tokens`` tokens of chunks kept the device for ``seconds``."""
        if chunk_tokens:
            self._chunks.append((chunk_tokens, max(seconds - self.decode_seconds(num_decode), 0.0)))
            self._fit()
        else:
            self._decode.setdefault(num_decode.bit_length(), deque(maxlen=_DECODE_STEPS)).append(seconds)

    def decode_seconds(self, num_decode: int) -> float:
        """Of a step of nothing but so many decode rows; where none was seen, that of the nearest batch size."""
        if not num_decode or not self._decode:
            return 0.0
        size = num_decode.bit_length()
        return median(self._decode[min(self._decode, key=lambda seen: (abs(seen - size), -seen))])

    def chunk_tokens(self, num_decode: int, seconds: float) -> int:
        """With how many tokens of chunks a step takes about ``seconds``; a multiple of `MIN_CHUNK_TOKENS`, not 0."""
        if not self._chunks:
            return _FIRST_CHUNK_TOKENS
        longest = _GROWTH * max(tokens for tokens, _ in self._chunks)
        room = _HEADROOM * seconds - self.decode_seconds(num_decode) - self.fixed
        tokens = min(longest, int(room / self.per_token)) if self.per_token else longest
        return max(tokens // MIN_CHUNK_TOKENS, 1) * MIN_CHUNK_TOKENS

    def _fit(self) -> None:
        """The line through the medians of the shorter and of the longer half of the chunks (Tukey's resistant line).

        Where they are of about one length, that says nothing of ``fixed``, which stays.
        """
        ordered = sorted(self._chunks)
        half = len(ordered) // 2
        high_tokens, high_seconds = _middle(ordered[half:])
        if half:
            low_tokens, low_seconds = _middle(ordered[:half])
            if high_tokens >= 2 * low_tokens:
                slope = (high_seconds - low_seconds) / (high_tokens - low_tokens)
                self.fixed = min(max(low_seconds - slope * low_tokens, 0.0), low_seconds)
        self.per_token = max(high_seconds - self.fixed, 0.0) / high_tokens


def _middle(chunks: Iterable[tuple[int, float]]) -> tuple[float, float]:
    tokens, seconds = zip(*chunks, strict=True)
    return median(tokens), median(seconds)
