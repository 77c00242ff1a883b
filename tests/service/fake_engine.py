"""FakeEngine: the engine's interface with made-up tokens, for fast tests of everything around it.

Output token i is the prompt's token i (cyclic), so a test writes the text it wants to see generated. EOS, stop ids,
limits, seats, deadlines and cancels are real. Some prompt tokens do harm, see `NAN_TOKEN` and so on. Of prompts that
have ended whole blocks are remembered, without bound, and found again: that is told, but saves nothing.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig
from engine.errors import DuplicateRequest, ModelError, Overloaded
from engine.limits import Limits
from engine.outputs import (
    EngineLoad,
    Event,
    FailReason,
    FinishReason,
    OutputFinished,
    PromptLogprobs,
    RequestDone,
    RequestSummary,
    Started,
    StepOutput,
    Timings,
    TokenLogprob,
    TokenOutput,
    Usage,
)
from engine.prefix_cache import PrefixCacheStats
from engine.sampling_params import SamplingParams
from service.served_model import ServedModel

EOS = 2
NAN_TOKEN = 7  # the request fails with NAN_LOGITS when it is sampled
CRASH_TOKEN = 8  # the engine raises when it is sampled
HANG_TOKEN = 9  # the engine sleeps a second when it is sampled
PREFILL_TOKENS = 512  # per request and step
VOCAB = 49_152


@dataclass(eq=False)
class _Fake:
    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    priority: int
    tenant: str
    arrival: float
    deadline: float
    queue_deadline: float
    stop_time: float
    cache_salt: str
    bypass_prefix_cache: bool
    cached: int = 0
    started: float | None = None
    first_token: float | None = None
    computed: int = 0
    counts: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)


class FakeEngine:
    """``step_time``: how long a step with work takes, in seconds; ``load_time``: how long the model takes to load."""

    def __init__(self, config: EngineConfig, step_time: float = 0.001, load_time: float = 0.0) -> None:
        time.sleep(load_time)
        if config.max_model_len == 666:
            raise ModelError("the fake model refuses this length")
        blocks = config.num_gpu_blocks or 4096
        self._config = config
        self._step_time = step_time
        self._live: dict[str, _Fake] = {}
        self._events: list[Event] = []
        self.num_steps = 0
        self._known: set[int] = set()  # by `_blocks_of`
        self._cache_stats = PrefixCacheStats()
        self._generated = self._computed = 0
        self.info = ServedModel(
            architecture="FakeForCausalLM", fingerprint="fake", dtype="float32", device="cpu",
            limits=Limits(VOCAB, config.max_model_len or 8192, blocks, config.block_size, config.max_num_seqs),
            eos_token_ids=(EOS,), default_sampling=SamplingParams(temperature=0.5, top_p=0.75), pipeline_depth=1,
        )

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, *, priority: int = 0,
        tenant: str = "", arrival: float | None = None, deadline: float | None = None,
        queue_deadline: float | None = None, max_duration: float | None = None,
        cache_salt: str = "", bypass_prefix_cache: bool = False,
    ) -> None:
        limits = self.info.limits
        params.check(limits.vocab_size)
        max_tokens = limits.resolve_max_tokens(len(prompt_token_ids), params)
        if request_id in self._live:
            raise DuplicateRequest(request_id)
        if sum(fake.started is None for fake in self._live.values()) >= self._config.max_queued_requests:
            raise Overloaded("full")
        now = time.monotonic() if arrival is None else arrival
        self._live[request_id] = _Fake(
            request_id, list(prompt_token_ids), params, max_tokens, priority, tenant, now,
            deadline=deadline or math.inf, queue_deadline=queue_deadline or math.inf,
            stop_time=math.inf if max_duration is None else now + max_duration,
            cache_salt=cache_salt, bypass_prefix_cache=bypass_prefix_cache or not self._config.prefix_cache,
            counts=[0] * params.n, ended=[False] * params.n,
        )

    def cancel(self, request_id: str, message: str = "") -> bool:
        if (fake := self._live.get(request_id)) is None:
            return False
        self._done(fake, FailReason.CANCELLED, message)
        return True

    def finish_output(self, request_id: str, output_index: int, token_count: int) -> None:
        fake = self._live.get(request_id)
        if fake is not None and not fake.ended[output_index]:
            fake.counts[output_index] = token_count
            fake.ended[output_index] = True
            self._done_if_all_ended(fake)

    def step(self) -> StepOutput:
        if self._live:
            time.sleep(self._step_time)
            self.num_steps += 1
        self._expire(time.monotonic())
        self._seat()
        for fake in [fake for fake in self._live.values() if fake.started is not None]:
            self._advance(fake)
        events, self._events = self._events, []
        return StepOutput(events)

    def has_work(self) -> bool:
        return bool(self._live or self._events)

    def next_deadline(self) -> float | None:
        return min((min(f.deadline, f.queue_deadline, f.stop_time) for f in self._live.values()), default=None)

    def load(self) -> EngineLoad:
        queued = [fake for fake in self._live.values() if fake.started is None]
        running = [fake for fake in self._live.values() if fake.started is not None]
        prefilling = sum(fake.first_token is None for fake in running)
        limits = self.info.limits
        return EngineLoad(
            queued_requests=len(queued), queued_prompt_tokens=sum(len(fake.prompt) for fake in queued),
            prefilling_requests=prefilling, decoding_requests=len(running) - prefilling,
            kv_blocks_used=sum(
                limits.blocks_for(len(fake.prompt), max(fake.counts), fake.params.n) for fake in running
            ),
            kv_blocks_total=limits.num_blocks,
            oldest_queued_age=max((time.monotonic() - fake.arrival for fake in queued), default=0.0),
            steps=self.num_steps, last_step_time=time.monotonic(), prompt_tokens_computed=self._computed,
            tokens_generated=self._generated, tokens_discarded=0, preemptions=0, kv_blocks_cached=len(self._known),
            prefix_cache=replace(self._cache_stats) if self._config.prefix_cache else None,
        )

    def flush_cache(self) -> int:
        freed = len(self._known)
        self._known.clear()
        return freed

    def list_requests(self) -> list[RequestSummary]:
        return [
            RequestSummary(
                fake.id, "queued" if fake.started is None else "running", len(fake.prompt), sum(fake.counts),
                fake.priority, fake.tenant, fake.arrival,
            )
            for fake in self._live.values()
        ]

    def close(self) -> None:
        self._live.clear()

    def _seat(self) -> None:
        seats = self._config.max_num_seqs - sum(f.params.n for f in self._live.values() if f.started is not None)
        for fake in sorted(self._live.values(), key=lambda fake: -fake.priority):
            if fake.started is None and fake.params.n <= seats:
                seats -= fake.params.n
                fake.started = time.monotonic()
                seed = fake.params.seed or 0
                self._look_up(fake)
                prompt = len(fake.prompt)
                self._events.append(Started(fake.id, fake.started, prompt, fake.cached, seed, fake.max_tokens))

    def _look_up(self, fake: _Fake) -> None:
        if fake.bypass_prefix_cache:
            return
        if fake.params.prompt_logprobs is None and fake.max_tokens:
            found = sum(block in self._known for block in self._blocks_of(fake, len(fake.prompt) - 1))
            fake.cached = found * self.info.limits.block_size
        stats = self._cache_stats
        stats.lookups += 1
        stats.hits += fake.cached > 0
        stats.looked_up_tokens += len(fake.prompt)
        stats.hit_tokens += fake.cached

    def _blocks_of(self, fake: _Fake, num_tokens: int) -> list[int]:
        """A hash for each whole block within the first tokens, of it and all before it and the salt."""
        size, chain = self.info.limits.block_size, [hash(fake.cache_salt)]
        for end in range(size, num_tokens + 1, size):
            chain.append(hash((chain[-1], *fake.prompt[end - size : end])))
        return chain[1:]

    def _expire(self, now: float) -> None:
        for fake in list(self._live.values()):
            if fake.deadline <= now:
                late = FailReason.DEADLINE_DECODE if fake.first_token else FailReason.DEADLINE_PREFILL
                self._done(fake, FailReason.DEADLINE_QUEUED if fake.started is None else late, "late")
            elif fake.started is None and fake.queue_deadline <= now:
                self._done(fake, FailReason.QUEUE_TIMEOUT, "queue_timeout passed")
            elif fake.stop_time <= now:
                for index in range(fake.params.n):
                    self._finish(fake, index, FinishReason.TIME_LIMIT)

    def _advance(self, fake: _Fake) -> None:
        if fake.computed < len(fake.prompt):
            start, fake.computed = fake.computed, min(fake.computed + PREFILL_TOKENS, len(fake.prompt))
            self._computed += fake.computed - start
            if (top := fake.params.prompt_logprobs) is not None:
                entries = tuple(_logprob(token, top) for token in fake.prompt[start : fake.computed])
                self._events.append(PromptLogprobs(fake.id, start, entries))
            if fake.max_tokens == 0 and fake.computed == len(fake.prompt):
                for index in range(fake.params.n):
                    self._finish(fake, index, FinishReason.LENGTH)
            return
        for index in range(fake.params.n):
            if fake.id in self._live and not fake.ended[index]:
                self._sample(fake, index)

    def _sample(self, fake: _Fake, index: int) -> None:
        token = fake.prompt[fake.counts[index] % len(fake.prompt)]
        if token == NAN_TOKEN:
            return self._done(fake, FailReason.NAN_LOGITS, "NaN logits")
        if token == CRASH_TOKEN:
            raise RuntimeError("the fake engine crashes as asked")
        if token == HANG_TOKEN:
            time.sleep(1.0)
        fake.counts[index] += 1
        self._generated += 1
        fake.first_token = fake.first_token or time.monotonic()
        top = fake.params.top_logprobs
        self._events.append(TokenOutput(fake.id, index, token, None if top is None else _logprob(token, top)))
        enough = fake.counts[index] >= fake.params.min_tokens
        if token == EOS and not fake.params.ignore_eos and enough:
            return self._finish(fake, index, FinishReason.STOP, token, is_eos=True)
        if token in fake.params.stop_token_ids and enough:
            return self._finish(fake, index, FinishReason.STOP, token)
        if fake.counts[index] == fake.max_tokens:
            return self._finish(fake, index, FinishReason.LENGTH)
        return None

    def _finish(
        self, fake: _Fake, index: int, reason: FinishReason, stop: int | None = None, is_eos: bool = False
    ) -> None:
        if not fake.ended[index]:
            fake.ended[index] = True
            self._events.append(OutputFinished(fake.id, index, reason, fake.counts[index], stop, is_eos))
            self._done_if_all_ended(fake)

    def _done_if_all_ended(self, fake: _Fake) -> None:
        if all(fake.ended):
            self._done(fake)

    def _done(self, fake: _Fake, error: FailReason | None = None, message: str = "") -> None:
        del self._live[fake.id]
        if not fake.bypass_prefix_cache:
            self._known.update(self._blocks_of(fake, fake.computed))
        usage = Usage(len(fake.prompt), fake.cached, tuple(fake.counts), 0)
        timings = Timings(fake.arrival, fake.started, fake.first_token, time.monotonic())
        self._events.append(RequestDone(fake.id, usage, timings, error, message))


def _logprob(token: int, top: int) -> TokenLogprob:
    others = tuple(TokenLogprob((token + i) % VOCAB, -0.5 - i, i + 1) for i in range(top))
    return TokenLogprob(token, -0.5, 1, others)
