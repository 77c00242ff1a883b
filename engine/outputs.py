"""What the engine says: the events of a step. Plain data, no torch.

A request's events come in this order: `Started`, `PromptLogprobs`*, then per output `TokenOutput`*
and `OutputFinished`, and exactly one `RequestDone` at the very end (alone, with ``error`` set, when
the request failed or was cancelled).
"""

from dataclasses import dataclass, field
from enum import Enum

from engine.prefix_cache import PrefixCacheStats


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"


class FailReason(Enum):
    """Why a request ended without finishing; names as in the contract's error table."""

    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    DEADLINE_QUEUED = "DEADLINE_QUEUED"
    DEADLINE_PREFILL = "DEADLINE_PREFILL"
    DEADLINE_DECODE = "DEADLINE_DECODE"
    CANCELLED = "CANCELLED"
    NAN_LOGITS = "NAN_LOGITS"
    BUG = "BUG"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``logprob`` is None where the token cannot be sampled (minus infinity); ``rank`` counts from 1."""

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was scheduled for the first time. ``time`` is on the monotonic clock, in seconds."""

    request_id: str
    time: float
    prompt_tokens: int
    cached_prompt_tokens: int
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Records for prompt positions ``token_offset``...; position 0 has logprob None (nothing precedes it)."""

    request_id: str
    token_offset: int
    entries: tuple[TokenLogprob, ...]


@dataclass(slots=True)  # not frozen, which would double its cost: there is one for each token
class TokenOutput:
    request_id: str
    output_index: int
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """``stop_token_id`` is the EOS or stop id that ended it (the last token), else None; ``is_eos`` tells which.

    ``token_count`` includes that token. Not sent for an output ended by `Engine.finish_output`.
    """

    request_id: str
    output_index: int
    reason: FinishReason
    token_count: int
    stop_token_id: int | None = None
    is_eos: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; ``completion_tokens[i]`` belongs to output i and includes its last token."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Monotonic seconds; None for what was never reached."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class RequestDone:
    request_id: str
    usage: Usage
    timings: Timings
    error: FailReason | None = None
    message: str = ""


Event = Started | PromptLogprobs | TokenOutput | OutputFinished | RequestDone


@dataclass(slots=True)
class StepOutput:
    """Everything that became known in one step, in order."""

    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for GetLoad. KV counts are blocks; cached ones are held by nobody and are not in use."""

    queued_requests: int
    queued_prompt_tokens: int
    prefilling_requests: int
    decoding_requests: int
    kv_blocks_used: int
    kv_blocks_total: int
    oldest_queued_age: float
    steps: int
    last_step_time: float
    prompt_tokens_computed: int
    tokens_generated: int
    tokens_discarded: int
    preemptions: int
    kv_blocks_cached: int = 0
    prefix_cache: PrefixCacheStats | None = None


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One live request, for ListRequests. No prompt content."""

    request_id: str
    state: str
    prompt_tokens: int
    completion_tokens: int
    priority: int
    tenant: str
    arrival: float
