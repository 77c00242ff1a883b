"""LiveRequest: one accepted call, from admission to its end. The only thing that a servicer's handler waits on."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice

from engine.errors import EngineError
from engine.outputs import FailReason, RequestDone, Started
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.engine_client import EngineClient
from service.errors import Reason, ServiceError, from_engine
from service.logprob_block import LogprobBlock
from service.messages import logprob_messages, prompt_messages, usage_message
from service.output_budget import OutputBudget
from service.output_progress import OutputProgress
from service.prepare import Prepared
from service.stop_strings import StopAutomaton
from service.token_bytes import TokenTable
from service.wire import Update

log = logging.getLogger(__name__)
_PROMPT_SLICE = 128  # tokens of a prompt chunk: bounds what is made between two turns of the event loop
_PHASE_OF_DEADLINE = {
    Reason.DEADLINE_QUEUED: "before the request was scheduled",
    Reason.DEADLINE_PREFILL: "before the first token",
    Reason.DEADLINE_DECODE: "while generating",
}


class LiveRequest:
    """Owned by its handler, which calls `close` in ``finally`` whatever happens.

    `fail` may be called by anybody: it frees the engine's request first, then wakes the handler, also out of a
    blocked write. ``error`` then says why; the first reason stays. ``takeover``: a live one with its id gives way.
    """

    def __init__(
        self, request_id: str, arrival: float, engine: EngineClient, table: TokenTable, budget: OutputBudget, *,
        takeover: bool = False, on_started: Callable[["LiveRequest"], None] = lambda call: None,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival
        self.takeover = takeover
        self._on_started = on_started
        self.receive_time = time.time() - (time.monotonic() - arrival)
        self._engine = engine
        self._table = table
        self._budget = budget
        self._serial: int | None = None
        self._prepared: Prepared | None = None
        self._outputs: list[OutputProgress] = []
        self._prompt_blocks: list[LogprobBlock] = []  # made into messages as they are sent: there may be many
        self._prompt_sent = 0
        self._prompt_over = False
        self._buffered = 0
        self._wake = asyncio.Event()
        self._write_scope: asyncio.Timeout | None = None
        self.started: Started | None = None
        self.done: RequestDone | None = None
        self.error: ServiceError | None = None
        self.closed = asyncio.Event()

    # ---- the handler's side

    def submit(self, prepared: Prepared, deadline: float) -> None:
        """Hands the request to the engine. ``deadline`` in monotonic seconds."""
        generation = prepared.generation
        self._prepared = prepared
        stops = StopAutomaton(generation.stop_strings)
        self._outputs = [
            OutputProgress(
                index, generation, self._table, stops, prepared.echo_text if index == 0 else "", self._stop_string_found
            )
            for index in range(generation.params.n)
        ]
        wait = generation.queue_timeout
        self._serial = self._engine.submit(
            self,
            self.request_id,
            prepared.prompt,
            generation.params,
            priority=generation.priority,
            arrival=self.arrival,
            deadline=deadline,
            queue_deadline=None if wait is None else self.arrival + wait,
            max_duration=generation.max_duration,
            cache_salt=generation.cache_salt,
            bypass_prefix_cache=generation.bypass_prefix_cache,
            takeover=self.takeover,
        )

    async def changed(self, until: float = float("inf")) -> None:
        """Waits for news, at most until a monotonic time. Raises the error when the request failed."""
        if self.error is None and not self._wake.is_set():
            if until == float("inf"):
                await self._wake.wait()
            else:
                try:
                    async with asyncio.timeout_at(until):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        self._wake.clear()
        self.check()

    def check(self) -> None:
        """Raises the error when the request failed."""
        if self.error is not None:
            raise self.error

    def write_scope(self, scope: asyncio.Timeout | None) -> None:
        """The scope that `fail` ends; the handler sets it around each write."""
        self._write_scope = scope

    def take(self) -> Iterator[pb.StreamResponse]:
        """Stream messages that are due, after `started` and before completed."""
        yield from self._take_prompt()
        if self._prompt_left():
            return
        now = time.monotonic()
        for output in self._outputs:
            if output.due(now):
                yield from output.take()
        self._account()

    def has_more(self) -> bool:
        """Whether `take` has something that was not taken yet, due or not."""
        return self._prompt_left() or any(not output.told for output in self._outputs)

    @property
    def prompt(self) -> list[int]:
        assert self._prepared is not None
        return self._prepared.prompt

    @property
    def serial(self) -> int | None:
        """Its number on the wire; None before `submit`."""
        return self._serial

    @property
    def flush_time(self) -> float:
        """The next monotonic time at which `take` may have more without news from the engine."""
        return min((output.flush_time for output in self._outputs), default=float("inf"))

    def usage(self) -> pb.Usage:
        assert self.done is not None
        told = self.done.usage.completion_tokens
        counted = sum(min(count, output.token_count) for count, output in zip(told, self._outputs, strict=True))
        return usage_message(self.done, counted)

    def outputs(self) -> list[pb.Output]:
        """The whole result."""
        return [output.whole() for output in self._outputs]

    def prompt_logprobs(self) -> Iterator[pb.TokenLogprob]:
        return self._prompt_messages(self._prompt_blocks)

    def deadline_error(self) -> ServiceError:
        if self.started is None:
            reason = Reason.DEADLINE_QUEUED
        else:
            reason = Reason.DEADLINE_DECODE if self._tokens else Reason.DEADLINE_PREFILL
        return ServiceError(reason, f"the deadline passed {_PHASE_OF_DEADLINE[reason]}")

    def close(self) -> None:
        """Frees everything it holds, here and in the engine. May be called twice."""
        self._release("the call ended")
        self._budget.change(self, -self._buffered)
        self._buffered = 0
        self.closed.set()

    # ---- everybody's side

    def fail(self, error: ServiceError) -> None:
        if self.error is not None or self.closed.is_set():
            return
        self.error = error
        self._release(error.message)
        self._wake.set()
        if self._write_scope is not None and not self._write_scope.expired():
            self._write_scope.reschedule(asyncio.get_running_loop().time())

    # ---- the engine's side

    def on_update(self, update: Update) -> None:
        if update.started is not None:
            self._start(update.started)
        if update.prompt_logprobs is not None:
            self._prompt_blocks.append(update.prompt_logprobs)
        stop_tokens = {event.output_index for event in update.finished if event.stop_token_id is not None}
        for index, tokens in update.tokens.items():
            self._outputs[index].on_tokens(tokens, update.logprobs.get(index), index in stop_tokens)
        for event in update.finished:
            self._outputs[event.output_index].on_finished(event)
        if update.done is not None:
            self._end(update.done)
        self._account()
        self._wake.set()

    def on_refused(self, error: EngineError) -> None:
        self.fail(from_engine(error, self._prepared.generation.path_of if self._prepared else {}))

    def on_engine_lost(self) -> None:
        self.fail(ServiceError(Reason.WORKER_LOST, "the engine process ended; the request is lost"))

    def on_bug(self) -> None:
        self.fail(ServiceError(Reason.BUG, "internal error; the server's log has it under this request id"))

    # ---- inside

    @property
    def _tokens(self) -> int:
        return sum(output.token_count for output in self._outputs)

    def _end(self, done: RequestDone) -> None:
        if done.error is None:
            if any(output.finished is None for output in self._outputs):
                log.error("request %s: the engine ended it with an output unfinished", self.request_id)
                self.on_bug()
            self.done = done
            if self.started is None:
                self._start(self._never_scheduled(done))
            return
        reason = Reason.CLIENT_CANCELLED if done.error is FailReason.CANCELLED else Reason(done.error.value)
        self.fail(ServiceError(reason, done.message or f"the request ended: {reason.value}"))

    def _start(self, started: Started) -> None:
        self.started = started
        self._on_started(self)

    def _never_scheduled(self, done: RequestDone) -> Started:
        """max_duration passed in the queue: the result is empty, but complete."""
        prepared = self._prepared
        assert prepared is not None
        seed = prepared.generation.params.seed or 0
        return Started(self.request_id, done.timings.finished, len(prepared.prompt), 0, seed, prepared.max_tokens)

    def _stop_string_found(self, index: int, token_count: int) -> None:
        if self._serial is not None:
            self._engine.finish_output(self._serial, index, token_count)

    def _release(self, message: str) -> None:
        if self._serial is not None:
            self._engine.release(self._serial, cancel=message)

    def _account(self) -> None:
        """Tells the budget what is buffered now; it may fail the request."""
        size = sum(output.pending_bytes for output in self._outputs)
        size += sum(block.size for block in self._prompt_blocks)
        change, self._buffered = size - self._buffered, size
        self._budget.change(self, change)

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    def _prompt_left(self) -> bool:
        """Whether prompt chunks must still be sent before any delta."""
        assert self._prepared is not None
        generation = self._prepared.generation
        wanted = generation.echo or generation.params.prompt_logprobs is not None
        return wanted and not self._prompt_over and self._prompt_sent < len(self._prepared.prompt)

    def _take_prompt(self) -> Iterator[pb.StreamResponse]:
        if not self._prompt_left() or self._prepared is None:
            return
        generation, start = self._prepared.generation, self._prompt_sent
        self._prompt_over = self.done is not None  # max_duration may pass before all of the prompt is scored
        whole = generation.params.prompt_logprobs is None or (self._prompt_over and generation.echo)
        blocks, self._prompt_blocks = self._prompt_blocks, []
        end = len(self._prepared.prompt) if whole else start + sum(map(len, blocks))
        self._prompt_sent = end
        messages = self._prompt_messages(blocks)
        for first in range(start, end, _PROMPT_SLICE):
            token_ids = self._prepared.prompt[first : min(first + _PROMPT_SLICE, end)] if generation.echo else []
            yield from prompt_messages(first, token_ids, list(islice(messages, _PROMPT_SLICE)))

    def _prompt_messages(self, blocks: list[LogprobBlock]) -> Iterator[pb.TokenLogprob]:
        return chain.from_iterable(logprob_messages(block, self._table) for block in blocks)
