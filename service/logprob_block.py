"""LogprobBlock: log probabilities of consecutive tokens as packed arrays.

With 20 alternatives a prompt has 21 records per token: as objects they would hold up the front's event loop just by
being unpickled. Made in the engine process, read in the front. No protobuf here.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.outputs import TokenLogprob

_NO_LOGPROB = math.inf  # not NaN, so that blocks compare equal
_NO_RANK = 0
RECORD_BYTES = 24  # about what one record takes in a message


@dataclass(slots=True)
class LogprobBlock:
    """``counts[i]`` records belong to token i: its own, then its alternatives. The other arrays have all records."""

    counts: "array[int]" = field(default_factory=lambda: array("B"))
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    ranks: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def size(self) -> int:
        """About the bytes of the messages it becomes."""
        return len(self.token_ids) * RECORD_BYTES

    def append(self, entry: TokenLogprob) -> None:
        self.counts.append(1 + len(entry.top))
        for record in (entry, *entry.top):
            self.token_ids.append(record.token_id)
            self.ranks.append(_NO_RANK if record.rank is None else record.rank)
            self.logprobs.append(_NO_LOGPROB if record.logprob is None else record.logprob)

    def entries(self) -> Iterator[list[tuple[int, float | None, int | None]]]:
        """Per token its records (token id, logprob, rank), its own first. Lazy: there may be many."""
        start = 0
        for count in self.counts:
            stop = start + count
            yield [
                (token_id, None if logprob == _NO_LOGPROB else logprob, rank or None)
                for token_id, logprob, rank in zip(
                    self.token_ids[start:stop], self.logprobs[start:stop], self.ranks[start:stop], strict=True
                )
            ]
            start = stop
