"""A request and its outputs, from submit to finish. Pure Python, no torch.

State is an inequality, not a phase flag: ``num_computed_tokens <= num_tokens``. Prefill, chunked prefill and resuming
after preemption are all "computed < total"; decoding is "one token behind".
"""

from enum import Enum
from functools import cached_property

from engine.block_manager import PagedKVCache
from engine.outputs import FinishReason
from engine.prefix_cache import HeldPrefix
from engine.radix_tree import token_bytes
from engine.sampling_params import SamplingParams
from engine.tenants import TenantAccount


class State(Enum):
    """Where an output stands with the scheduler. FORKED waits, seated, for the first output's prefill."""

    WAITING = "waiting"
    RUNNING = "running"
    FORKED = "forked"
    FINISHED = "finished"


class Request:
    """What the client asked for, and its ``n`` outputs. Owned by the scheduler; everybody else reads.

    ``num_computable``: tokens of an output that are ever fed to the model, which the last sampled one is not.
    ``stops_from``: the position from which on a token may end an output, which those of ``end_ids`` then do.
    ``account``: its tenant's, while it is live.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        number: int,
        arrival: float,
        *,
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        queue_deadline: float | None = None,
        stop_time: float | None = None,
        cache_root: bytes | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.number = number  # order of arrival; unique
        self.arrival = arrival
        self.priority = priority
        self.tenant = tenant
        self.account = TenantAccount()
        self.deadline = deadline  # hard: the request fails
        self.queue_deadline = queue_deadline  # hard while never scheduled
        self.stop_time = stop_time  # soft: finishes with TIME_LIMIT
        self.cache_root = cache_root  # where the prefix cache looks; None = neither reads nor inserts
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.preemptions = 0
        self.cached_prompt_tokens = 0
        self.prompt_logprobs_sent = 0
        self.num_computable = len(prompt) + max(max_tokens - 1, 0)
        self.stops_from = len(prompt) + params.min_tokens
        self.end_ids = frozenset(params.stop_token_ids)
        self.outputs = [Output(self, index) for index in range(params.n)]

    @cached_property
    def prompt_bytes(self) -> bytes:
        """The prompt as the prefix cache's key."""
        return token_bytes(self.prompt)

    @property
    def finished(self) -> bool:
        return all(output.state is State.FINISHED for output in self.outputs)

    @property
    def seats(self) -> int:
        """Places in the batch its outputs take (or will take) together."""
        return self.params.n


class Output:
    """One of the n sequences of a request: prompt, then generated tokens.

    ``token_ids`` are committed. ``num_tokens`` counts the prompt, those, and the tokens that are sampled on the device
    and not yet known here (0 to depth). ``epoch`` grows whenever a launched row must no longer count; commit drops rows
    of an older epoch.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.state = State.WAITING
        self.token_ids: list[int] = []
        self.num_tokens = len(request.prompt)
        self.num_computed_tokens = 0
        self.epoch = 0
        self.slot = -1
        self.cache: PagedKVCache | None = None
        self.prefix: HeldPrefix | None = None
        self.seated_at_flush = 0  # how many flushes the prefix cache had seen when it got its blocks
        self.num_known_blocks = 0  # of its own, from the first, in the prefix cache
        self.num_written_tokens = 0  # whose KV is written and committed; grows no more once it decodes
        self.num_prefill_tokens = 0  # to be written before it decodes, since it was seated
        self.finish_reason: FinishReason | None = None

    @property
    def num_pending(self) -> int:
        """Tokens sampled on the device and not yet known here. Means nothing once the output has ended."""
        return self.num_tokens - len(self.request.prompt) - len(self.token_ids)

    @property
    def num_kept_tokens(self) -> int:
        """Known tokens whose KV is written by committed steps: all but the last, once it has got a token since it was
        seated. Up to then its rows are counted; a last one may have been no chunk, and is counted by its token."""
        known = len(self.request.prompt) + len(self.token_ids)
        if not self.token_ids or known <= self.num_prefill_tokens:
            return min(self.num_written_tokens, known)
        return known - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Committed token ids at positions ``[start, stop)``."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        head = prompt[start:] if start < len(prompt) else []
        return head + self.token_ids[max(start - len(prompt), 0) : stop - len(prompt)]
