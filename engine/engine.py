"""The engine: requests in, tokens out, one step at a time.

    engine = Engine(EngineConfig(model="models/smollm2"))
    engine.generate([[504, 3575, 282]], SamplingParams(max_tokens=16))

or stepwise: `add`, `cancel`, `step`. Nothing is global: several engines can live in one process.
"""

import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.errors import DuplicateRequest, InvalidRequest, Overloaded
from engine.lifecycle import Lifecycle, StepResult
from engine.limits import Limits
from engine.load import LoadedModel, load_model
from engine.output_prefixes import OutputPrefixes
from engine.outputs import EngineLoad, Event, FailReason, RequestSummary, StepOutput
from engine.plan import StepPlan
from engine.prefix_cache import PrefixCache
from engine.request import Request, State
from engine.results import GenerationResult, collect_results
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_cost import StepCost


class Step(Protocol):
    """A launched step. `wait` blocks until its tokens are on the host."""

    def wait(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. Picklable; ``kv_bytes_per_token`` over all layers."""

    architecture: str
    fingerprint: str
    dtype: str
    device: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_token: int
    pipeline_depth: int


class InFlight(NamedTuple):
    """A launched step; when its launch began and ended, in monotonic seconds."""

    plan: StepPlan
    handle: Step
    begun: float
    launched: float


class Engine:
    """One model on one device. Not thread-safe: one thread calls it.

    Raises `ModelError` or `ConfigError` with a one-line reason when it cannot start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        loaded = load_model(config)
        self._runner = loaded.runner
        self._depth = config.pipeline_depth or (2 if config.device == "cuda" else 1)
        self.info = _model_info(config, loaded, self._depth)
        limits = loaded.limits
        self.block_manager = BlockManager(limits.num_blocks, limits.block_size)
        self.prefix_cache = PrefixCache(self.block_manager) if config.prefix_cache else None
        prefixes = OutputPrefixes(self.prefix_cache, limits.block_size) if self.prefix_cache is not None else None
        self._scheduler = Scheduler(self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, prefixes)
        self._lifecycle = Lifecycle(self._scheduler, loaded.eos_token_ids)
        self._launch_is_all = config.device == "cpu"  # a launch runs the step to its end there
        self._step_cost = StepCost()
        self._bound_chunks()
        self._in_flight: deque[InFlight] = deque()
        self._num_requests = 0
        self.last_step_time = time.monotonic()

    # -- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        arrival: float | None = None,
        deadline: float | None = None,
        queue_deadline: float | None = None,
        max_duration: float | None = None,
        cache_salt: str = "",
        bypass_prefix_cache: bool = False,
    ) -> None:
        """Accept a request; from here on it ends in exactly one `RequestDone`.

        Requests share cached prefixes with those of the same ``cache_salt`` only; one with ``bypass_prefix_cache``
        neither reads nor adds any. Times are `time.monotonic` seconds; ``max_duration`` counts from arrival. Raises
        `InvalidRequest`, `PromptTooLong`, `ExceedsKVCapacity`, `DuplicateRequest` or `Overloaded`, and then nothing was
        accepted.
        """
        limits = self.info.limits
        prompt = list(prompt_token_ids)
        violations = params.violations(limits.vocab_size)
        if bad := [token for token in prompt if not 0 <= token < limits.vocab_size]:
            violations.append(("prompt_token_ids", f"{bad[0]} is outside the vocabulary of {limits.vocab_size}"))
        if violations:
            raise InvalidRequest(violations)
        max_tokens = limits.resolve_max_tokens(len(prompt), params)
        if request_id in self._lifecycle.live:
            raise DuplicateRequest(f"a request with id {request_id!r} is alive; use another id or wait for its end")
        self._check_queue(len(prompt))
        arrival = time.monotonic() if arrival is None else arrival
        self._num_requests += 1
        self._lifecycle.add(
            Request(
                request_id,
                prompt,
                params,
                secrets.randbits(64) if params.seed is None else params.seed,
                max_tokens,
                self._num_requests,
                arrival,
                priority=priority,
                tenant=tenant,
                deadline=deadline,
                queue_deadline=queue_deadline,
                stop_time=None if max_duration is None else arrival + max_duration,
                cache_root=None if bypass_prefix_cache or self.prefix_cache is None else self._cache_root(cache_salt),
            )
        )

    def cancel(self, request_id: str, message: str = "") -> bool:
        """End a request with CANCELLED; False when it is not alive."""
        request = self._lifecycle.live.get(request_id)
        if request is None:
            return False
        self._lifecycle.fail(request, FailReason.CANCELLED, message, time.monotonic())
        return True

    def finish_output(self, request_id: str, output_index: int, token_count: int) -> None:
        """A stop string was found in the text after ``token_count`` tokens: end that output there.

        Does nothing when the output has already ended.
        """
        request = self._lifecycle.live.get(request_id)
        if request is not None and request.outputs[output_index].state is not State.FINISHED:
            self._lifecycle.finish_output(request.outputs[output_index], token_count, time.monotonic())

    # -- stepping -----------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Launch the next step if there is one, commit the oldest one that is due, and return what became known."""
        self._lifecycle.expire(time.monotonic())
        plan = self._scheduler.schedule()
        if plan is not None:
            begun = time.monotonic()
            self._lifecycle.launched(plan, begun)
            self._in_flight.append(InFlight(plan, self._runner.launch(plan), begun, time.monotonic()))
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._commit(self._in_flight.popleft())
        return StepOutput(self._take_events())

    def _commit(self, step: InFlight) -> None:
        result = step.handle.wait()
        now = time.monotonic()
        self._lifecycle.commit(step.plan, result, now)
        if self._config.max_inter_token_ms is not None:
            self._pace(step, now)
        self.last_step_time = now

    def _pace(self, step: InFlight, now: float) -> None:
        """Learn what a step has cost: from when it was launched and the one before it was done to its own end."""
        begun, done = max(step.begun, self.last_step_time), now
        if self._launch_is_all:
            begun, done = step.begun, step.launched
        self._step_cost.observe(len(step.plan.decode), step.plan.num_chunk_tokens, done - begun)
        self._bound_chunks()

    def _bound_chunks(self) -> None:
        if (bound := self._config.max_inter_token_ms) is not None:
            tokens = self._step_cost.chunk_tokens(len(self._scheduler.running), bound / 1e3)
            self._scheduler.max_chunk_tokens_beside_decode = tokens

    def has_work(self) -> bool:
        """Whether `step` has something to compute, to commit or to say. A live request always is."""
        return bool(self._lifecycle.live or self._in_flight or self._lifecycle.events)

    def next_deadline(self) -> float | None:
        """When `step` must be called at the latest, even if nothing else happens."""
        return self._lifecycle.next_deadline()

    @property
    def num_steps(self) -> int:
        return self._scheduler.num_steps

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[GenerationResult]:
        """Run prompts to their end and return the results in their order. Library use; no other request may be alive.

        The waiting queue's bound does not apply: prompts enter as there is room.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest([("params", f"{len(each)} given for {len(prompts)} prompts")])
        todo = deque(enumerate(zip(prompts, each, strict=True)))
        events: list[Event] = []
        while todo or self.has_work():
            while todo and self._has_queue_room(len(todo[0][1][0])):
                number, (prompt, its_params) = todo.popleft()
                self.add(str(number), prompt, its_params)
            events.extend(self.step().events)
        return collect_results(events, len(prompts))

    # -- views --------------------------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Forget all cached prefixes; blocks that outputs hold are freed when those end. Returns blocks freed now."""
        return self.prefix_cache.flush() if self.prefix_cache is not None else 0

    def load(self) -> EngineLoad:
        """A snapshot of queues and pool."""
        life, manager = self._lifecycle, self.block_manager
        cached = self.prefix_cache.num_cached_blocks if self.prefix_cache is not None else 0
        oldest = life.oldest_queued()
        waiting_for_first = sum(request.first_token is None for request in life.live.values())
        prefilling = waiting_for_first - life.num_queued
        return EngineLoad(
            queued_requests=life.num_queued,
            queued_prompt_tokens=life.num_queued_tokens,
            prefilling_requests=prefilling,
            decoding_requests=len(life.live) - waiting_for_first,
            kv_blocks_used=manager.num_blocks - manager.num_free - cached,
            kv_blocks_total=manager.num_blocks,
            oldest_queued_age=time.monotonic() - oldest.arrival if oldest else 0.0,
            steps=self.num_steps,
            last_step_time=self.last_step_time,
            prompt_tokens_computed=life.prompt_tokens_computed,
            tokens_generated=life.tokens_generated,
            tokens_discarded=life.tokens_discarded,
            preemptions=self._scheduler.num_preemptions,
            kv_blocks_cached=cached,
            prefix_cache=None if self.prefix_cache is None else replace(self.prefix_cache.stats),
        )

    def list_requests(self) -> list[RequestSummary]:
        """Every live request, by arrival."""
        return [_summary(request) for request in self._lifecycle.live.values()]

    def check(self) -> None:
        """Assert every invariant of pool, seats and queues. For tests, between steps."""
        self._scheduler.check(list(self._lifecycle.live.values()))

    def close(self) -> None:
        """Drop what is in flight and the device memory. The engine cannot be used afterwards."""
        self._in_flight.clear()
        self._runner.close()
        del self._runner
        if self.info.device == "cuda":
            from engine.cuda.memory import release_cached_memory

            release_cached_memory()

    def _cache_root(self, salt: str) -> bytes:
        """The root of a request's prefixes: everything that KV depends on besides the tokens. Each part is prefixed
        by its length, so no two combinations are spelt alike."""
        parts = (self.info.fingerprint, self.info.dtype, salt)
        return b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)

    def _take_events(self) -> list[Event]:
        events, self._lifecycle.events = self._lifecycle.events, []
        return events

    def _check_queue(self, prompt_tokens: int) -> None:
        if not self._has_queue_room(prompt_tokens):
            raise Overloaded(
                f"the queue is full ({self._config.max_queued_requests} requests or "
                f"{self._config.max_queued_tokens} prompt tokens); retry later"
            )

    def _has_queue_room(self, prompt_tokens: int) -> bool:
        life, config = self._lifecycle, self._config
        within_tokens = not life.num_queued or life.num_queued_tokens + prompt_tokens <= config.max_queued_tokens
        return life.num_queued < config.max_queued_requests and within_tokens


def _summary(request: Request) -> RequestSummary:
    running = any(output.state is State.RUNNING for output in request.outputs)
    state = "queued" if request.first_scheduled is None else "running" if running else "preempted"
    return RequestSummary(
        request_id=request.id,
        state=state,
        prompt_tokens=len(request.prompt),
        completion_tokens=sum(len(output.token_ids) for output in request.outputs),
        priority=request.priority,
        tenant=request.tenant,
        arrival=request.arrival,
    )


def _model_info(config: EngineConfig, loaded: LoadedModel, depth: int) -> ModelInfo:
    model = loaded.model_config
    return ModelInfo(
        architecture=model.architecture,
        fingerprint=loaded.fingerprint,
        dtype=loaded.dtype,
        device=config.device,
        limits=loaded.limits,
        eos_token_ids=loaded.eos_token_ids,
        default_sampling=loaded.default_sampling,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        pipeline_depth=depth,
    )
