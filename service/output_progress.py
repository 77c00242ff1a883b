"""OutputProgress: one of the n outputs of a live request: its text, what was not sent yet, how it ended."""

import time
from collections.abc import Callable, Iterator, Sequence

from engine.outputs import OutputFinished
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.logprob_block import LogprobBlock
from service.messages import FINISH_REASON, TOKEN_ID_BYTES, delta_messages, logprob_messages
from service.stop_strings import StopAutomaton
from service.text import OutputText
from service.token_bytes import TokenTable
from service.validate import Generation


class OutputProgress:
    """``finished`` once it ended. ``pending_bytes``: the size of what a client has not been sent yet."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        table: TokenTable,
        stops: StopAutomaton,
        echo_text: str,
        on_stop_string: Callable[[int, int], None],
    ) -> None:
        """``on_stop_string(index, token_count)`` is called when a stop string ends the output."""
        self.index = index
        self._generation = generation
        self._table = table
        self._on_stop_string = on_stop_string
        self._text = OutputText(
            table,
            stops,
            skip_special_tokens=generation.skip_special_tokens,
            include_stop=generation.include_stop_in_text,
            min_tokens=generation.params.min_tokens,
        )
        self._echo = echo_text
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[pb.TokenLogprob] = []
        self._sent_tokens = 0
        self._finish_sent = False
        self._shown = False  # whether anything was sent: the first that can be shown goes at once
        self._oldest_pending: float | None = None
        self.finished: pb.Finished | None = None
        self.pending_bytes = 0

    @property
    def token_count(self) -> int:
        """Tokens up to its end; those after a stop string never count."""
        return self._text.token_count

    def on_tokens(self, tokens: Sequence[int], logprobs: LogprobBlock | None, ends_with_stop_token: bool) -> None:
        """New tokens, with their logprobs or none."""
        last = len(tokens) - 1
        messages = None if logprobs is None else logprob_messages(logprobs, self._table)
        for position, token_id in enumerate(tokens):
            if self.finished is not None:
                return
            is_stop_token = ends_with_stop_token and position == last
            text = self._text.push_stop_token(token_id) if is_stop_token else self._text.push(token_id)
            self._keep(text, token_id, None if messages is None else next(messages))
            if self._text.stop_text is not None:
                self._finish(pb.FINISH_REASON_STOP, pb.StopMatch(stop_text=self._text.stop_text))
                self._on_stop_string(self.index, self.token_count)

    def on_finished(self, event: OutputFinished) -> None:
        """The engine ended it; nothing changes when a stop string did so before."""
        if self.finished is not None:
            return
        self._keep_text(self._text.settle())
        if self._text.stop_text is not None:
            self._finish(pb.FINISH_REASON_STOP, pb.StopMatch(stop_text=self._text.stop_text))
            return
        match = None
        if event.stop_token_id is not None:
            token_id = event.stop_token_id
            match = pb.StopMatch(eos_token_id=token_id) if event.is_eos else pb.StopMatch(stop_token_id=token_id)
        self._finish(FINISH_REASON[event.reason], match)

    def due(self, now: float) -> bool:
        """Whether something must be sent now."""
        if self.finished is not None:
            return not self._finish_sent
        waiting = self.token_count - self._sent_tokens
        if waiting == 0:
            return False
        options = self._generation
        return not self._shown or waiting >= options.flush_tokens or now >= self.flush_time

    @property
    def told(self) -> bool:
        """Whether it ended and all of it was taken."""
        return self._finish_sent

    @property
    def flush_time(self) -> float:
        """When what is pending must go, whatever there is; infinity when there is no such time."""
        interval = self._generation.max_flush_interval
        if self._oldest_pending is None or interval is None:
            return float("inf")
        return self._oldest_pending + interval

    def take(self) -> Iterator[pb.StreamResponse]:
        """Messages with all that is pending; the end, too, when it has ended.

        What is taken is settled at once: more may arrive while the first message is being written.
        """
        finished = None if self._finish_sent else self.finished
        self._finish_sent = self.finished is not None
        count = self.token_count - self._sent_tokens
        deltas = delta_messages(
            self.index, self._sent_tokens, count,
            text="".join(self._texts), token_ids=self._token_ids, logprobs=self._logprobs,
        )
        self._shown = self._shown or bool(self._texts or self._token_ids or self._logprobs)
        self._texts, self._token_ids, self._logprobs = [], [], []
        self._sent_tokens += count
        self._oldest_pending = None
        self.pending_bytes = 0
        yield from deltas
        if finished is not None:
            yield pb.StreamResponse(finished=finished)

    def whole(self) -> pb.Output:
        """All of it, for a unary result. Needs an output that has finished and of which nothing was taken."""
        assert self.finished is not None
        return pb.Output(
            index=self.index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=self.finished.finish_reason,
            stop_match=self.finished.stop_match if self.finished.HasField("stop_match") else None,
            visible_token_count=self.finished.visible_token_count,
        )

    def _keep(self, text: str, token_id: int, logprob: pb.TokenLogprob | None) -> None:
        if self._oldest_pending is None:
            self._oldest_pending = time.monotonic()
        self._keep_text(text)
        if self._generation.token_ids:
            self._token_ids.append(token_id)
            self.pending_bytes += TOKEN_ID_BYTES
        if logprob is not None:
            self._logprobs.append(logprob)
            self.pending_bytes += logprob.ByteSize()

    def _keep_text(self, text: str) -> None:
        text, self._echo = self._echo + text, ""
        if text and self._generation.text:
            self._texts.append(text)
            self.pending_bytes += len(text.encode())

    def _finish(self, reason: pb.FinishReason, match: pb.StopMatch | None) -> None:
        self._text.settle()
        visible = self._text.visible_token_count if self._generation.text else 0
        self.finished = pb.Finished(
            output_index=self.index,
            finish_reason=reason,
            stop_match=match,
            token_count=self.token_count,
            visible_token_count=visible,
        )
