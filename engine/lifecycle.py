"""The lives of requests: admission, tokens, the one terminal event, deadlines. Pure Python, no torch.

Every request that `add` takes gets exactly one `RequestDone`, whatever happens to it.
"""

import heapq
import math
from dataclasses import dataclass, field

from engine.outputs import (
    Event,
    FailReason,
    FinishReason,
    OutputFinished,
    PromptLogprobs,
    RequestDone,
    Started,
    Timings,
    TokenLogprob,
    TokenOutput,
    Usage,
)
from engine.plan import PlanRow, StepPlan
from engine.request import Output, Request, State
from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device gave for a plan. ``tokens``, ``is_nan`` and ``logprobs`` go by the plan's samples, in row order;
    ``prompt_logprobs`` by row number, one record per position of the row's range."""

    tokens: list[int]
    is_nan: list[bool]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)


class Lifecycle:
    """Owns the live requests and the events not yet handed out. Times are monotonic seconds."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: tuple[int, ...]) -> None:
        self.live: dict[str, Request] = {}
        self.events: list[Event] = []
        self.tokens_generated = 0
        self.tokens_discarded = 0
        self.prompt_tokens_computed = 0
        self.num_queued = 0
        self.num_queued_tokens = 0
        self._scheduler = scheduler
        self._eos = frozenset(eos_token_ids)
        # (time, request number, id): no references, so that what has ended is gone while its deadline waits.
        self._deadlines: list[tuple[float, int, str]] = []

    def add(self, request: Request) -> None:
        """Take over a new request."""
        params = request.params
        request.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        self.live[request.id] = request
        self.num_queued += 1
        self.num_queued_tokens += len(request.prompt)
        for time in (request.queue_deadline, request.deadline, request.stop_time):
            if time is not None and math.isfinite(time):
                heapq.heappush(self._deadlines, (time, request.number, request.id))
        self._scheduler.add(request)

    def oldest_queued(self) -> Request | None:
        """The first of the live requests that have never been scheduled."""
        return next((request for request in self.live.values() if request.first_scheduled is None), None)

    def _left_queue(self, request: Request) -> None:
        self.num_queued -= 1
        self.num_queued_tokens -= len(request.prompt)

    # -- deadlines ----------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `expire` has to be called next; None without deadlines."""
        while self._deadlines and self._request_of(self._deadlines[0]) is None:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _request_of(self, entry: tuple[float, int, str]) -> Request | None:
        """The live request a deadline is of. Another one may have its id by now."""
        _, number, request_id = entry
        request = self.live.get(request_id)
        return request if request is not None and request.number == number else None

    def expire(self, now: float) -> None:
        """End what is over a deadline: hard ones fail, a passed stop time finishes with TIME_LIMIT."""
        while (time := self.next_deadline()) is not None and time <= now:
            request = self._request_of(heapq.heappop(self._deadlines))
            assert request is not None, "next_deadline left one that has ended"
            if _is_over(request.deadline, now):
                self.fail(request, _deadline_reason(request), "the deadline passed", now)
            elif _is_over(request.queue_deadline, now) and request.first_scheduled is None:
                self.fail(request, FailReason.QUEUE_TIMEOUT, "queue_timeout passed before it was scheduled", now)
            elif _is_over(request.stop_time, now):
                for output in _unfinished(request):
                    self._finish(output, FinishReason.TIME_LIMIT, now)

    # -- ends ---------------------------------------------------------------------------------------------------

    def fail(self, request: Request, reason: FailReason, message: str, now: float) -> None:
        """End the whole request with an error."""
        if reason is FailReason.NAN_LOGITS:
            request.cache_root = None  # nobody else should go on from what gave that
        for output in _unfinished(request):
            self._scheduler.finish(output)
        self._done(request, now, reason, message)

    def finish_output(self, output: Output, token_count: int, now: float) -> None:
        """End an output at a stop string that its first ``token_count`` tokens complete; later ones do not count."""
        output.token_ids = output.token_ids[:token_count]
        output.finish_reason = FinishReason.STOP
        self._scheduler.finish(output)
        if output.request.finished:
            self._done(output.request, now)

    def _finish(
        self, output: Output, reason: FinishReason, now: float, stop_token_id: int | None = None, is_eos: bool = False
    ) -> None:
        output.finish_reason = reason
        self._scheduler.finish(output)
        count = len(output.token_ids)
        self.events.append(OutputFinished(output.request.id, output.index, reason, count, stop_token_id, is_eos))
        if output.request.finished:
            self._done(output.request, now)

    def _done(self, request: Request, now: float, error: FailReason | None = None, message: str = "") -> None:
        del self.live[request.id]
        if request.first_scheduled is None:
            self._left_queue(request)
        usage = Usage(
            prompt_tokens=len(request.prompt),
            cached_prompt_tokens=request.cached_prompt_tokens,
            completion_tokens=tuple(len(output.token_ids) for output in request.outputs),
            preemptions=request.preemptions,
        )
        timings = Timings(request.arrival, request.first_scheduled, request.first_token, now)
        self.events.append(RequestDone(request.id, usage, timings, error, message))

    # -- steps --------------------------------------------------------------------------------------------------

    def launched(self, plan: StepPlan, now: float) -> None:
        """A plan is about to run: requests in it for the first time have started."""
        for output in plan.admitted:
            request = output.request
            if request.first_scheduled is None:
                request.first_scheduled = now
                self._left_queue(request)
                prompt_tokens, cached = len(request.prompt), request.cached_prompt_tokens
                self.events.append(Started(request.id, now, prompt_tokens, cached, request.seed, request.max_tokens))
        self.prompt_tokens_computed += plan.num_chunk_tokens

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Fill the plan's pending tokens and end what they end. Rows of ended outputs or older epochs are dropped."""
        if plan.chunks:
            self._scheduler.committed_chunks(plan)
        for number, row in enumerate(plan.chunks, len(plan.decode)):
            request = row.output.request
            if row.prompt_logprobs is not None and self.live.get(request.id) is request:
                self._commit_prompt(request, row.prompt_logprobs[0], result.prompt_logprobs[number], now)
        self._commit_samples(plan, result, now)
        for row in plan.chunks:
            if row.completes_request:
                self._complete_scoring(row, now)
        if plan.chunks:
            self._scheduler.share_chunks(plan)

    def _commit_prompt(self, request: Request, first: int, entries: tuple[TokenLogprob, ...], now: float) -> None:
        if any(entry.logprob is not None and math.isnan(entry.logprob) for entry in entries):
            message = f"the model gave NaN logits for prompt positions {first} to {first + len(entries) - 1}"
            self.fail(request, FailReason.NAN_LOGITS, message, now)
            return
        self.events.append(PromptLogprobs(request.id, first, entries))

    def _commit_samples(self, plan: StepPlan, result: StepResult, now: float) -> None:
        events, finished = self.events, State.FINISHED
        known = zip(plan.samples, result.tokens, result.is_nan, result.logprobs, strict=True)
        for sample, token_id, is_nan, logprob in known:
            output = sample.output
            if output.state is finished or output.epoch != sample.epoch:
                self.tokens_discarded += 1
                continue
            request, token_ids = output.request, output.token_ids
            if is_nan:
                message = f"the model gave NaN logits at position {sample.position} of output {output.index}"
                self.fail(request, FailReason.NAN_LOGITS, message, now)
                continue
            token_ids.append(token_id)
            self.tokens_generated += 1
            if request.first_token is None:
                request.first_token = now
            events.append(TokenOutput(request.id, output.index, token_id, logprob))
            if token_id in request.end_ids or len(token_ids) == request.max_tokens:
                self._end(output, token_id, now)

    def _end(self, output: Output, token_id: int, now: float) -> None:
        """By its last token, an EOS or stop id, or else by its length."""
        request = output.request
        if token_id not in request.end_ids:
            self._finish(output, FinishReason.LENGTH, now)
        else:
            is_eos = token_id in self._eos and not request.params.ignore_eos
            self._finish(output, FinishReason.STOP, now, token_id, is_eos)

    def _complete_scoring(self, row: PlanRow, now: float) -> None:
        """The prompt of a max_tokens = 0 request is computed: that is all it wanted."""
        if row.output.state is not State.FINISHED and row.output.epoch == row.epoch:
            for output in _unfinished(row.output.request):
                self._finish(output, FinishReason.LENGTH, now)


def _is_over(time: float | None, now: float) -> bool:
    return time is not None and time <= now


def _unfinished(request: Request) -> list[Output]:
    return [output for output in request.outputs if output.state is not State.FINISHED]


def _deadline_reason(request: Request) -> FailReason:
    if request.first_scheduled is None:
        return FailReason.DEADLINE_QUEUED
    return FailReason.DEADLINE_PREFILL if request.first_token is None else FailReason.DEADLINE_DECODE
