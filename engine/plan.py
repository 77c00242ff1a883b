"""StepPlan: what one step computes, as plain data. It can be tested, logged and replayed without a model."""

from dataclasses import dataclass, field

from engine.request import Output

# Rows and samples are made anew for each output in each step. They are to be read only, but not frozen: that would
# double what they cost.


@dataclass(slots=True)
class Sample:
    """One token to sample from a row's last logits, into ``output``'s slot.

    ``position`` is the new token's absolute position; ``suppress_stops`` while min_tokens is not reached.
    """

    output: Output
    epoch: int
    slot: int
    position: int
    suppress_stops: bool


@dataclass(slots=True)
class PlanRow:
    """Compute tokens ``[start, start + count)`` of ``output``, KV into ``blocks`` (physical ids).

    ``blocks`` is the cache's own list: it may be longer than this row needs, and later plans change it, so it is read
    when the plan is launched. The same ``blocks_version`` means the same content; no two lists share one.
    ``from_device``: the one input token is the output's last sampled one and is read from its device slot.
    ``samples`` is empty for a chunk that does not reach the last known token; the first row of a request with n
    outputs carries n. ``prompt_logprobs``: logprobs are wanted for prompt positions ``[first, first + number)``.
    """

    output: Output
    epoch: int
    slot: int
    start: int
    count: int
    blocks: list[int]
    blocks_version: int
    from_device: bool
    samples: tuple[Sample, ...] = ()
    prompt_logprobs: tuple[int, int] | None = None
    completes_request: bool = False

    @property
    def is_decode(self) -> bool:
        return self.from_device


@dataclass(slots=True)
class StepPlan:
    """Rows to compute, block copies (physical source, destination) to run before, slots whose state must be set.

    Rows of ``decode`` have one token, read from the device, and one sample each; ``chunks`` are all others.
    ``admitted`` outputs enter the batch in this step: their sampling state is written to their slots before the
    forward pass.
    """

    number: int
    decode: list[PlanRow] = field(default_factory=list)
    chunks: list[PlanRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Output] = field(default_factory=list)
    preempted: list[Output] = field(default_factory=list)

    @property
    def rows(self) -> list[PlanRow]:
        """All of them, in the order in which results are told."""
        return self.decode + self.chunks

    @property
    def samples(self) -> list[Sample]:
        """Of all rows, in their order."""
        return [sample for row in self.rows for sample in row.samples]

    @property
    def num_chunk_tokens(self) -> int:
        return sum(row.count for row in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + self.num_chunk_tokens
