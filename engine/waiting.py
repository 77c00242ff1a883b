"""The waiting queue: priority first, then fair between tenants, then first come first served. Pure Python."""

import heapq
from collections import defaultdict

from engine.request import Output, State

OUTPUT_TOKEN_WEIGHT = 4


class TenantCounters:
    """A virtual counter per tenant: prompt tokens computed plus 4 x tokens generated.

    The tenant with the lowest counter goes first. A tenant that comes back from idleness is lifted to the lowest
    counter of the active ones, so that idleness earns no credit (Sheng et al. 2023, arXiv 2401.00588).
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._active: dict[str, int] = {}

    def __getitem__(self, tenant: str) -> int:
        return self._counters.get(tenant, 0)

    def enter(self, tenant: str) -> None:
        """A request of ``tenant`` is now live."""
        if tenant not in self._active:
            floor = min((self[other] for other in self._active), default=0)
            self._counters[tenant] = max(self[tenant], floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request of ``tenant`` has ended. The counters of idle tenants are dropped once nobody is active."""
        self._active[tenant] -= 1
        if self._active[tenant] == 0:
            del self._active[tenant]
        if not self._active:
            self._counters.clear()

    def charge(self, tenant: str, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self._counters[tenant] = self[tenant] + prompt_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens


class WaitingQueue:
    """Outputs waiting for a seat. An output that left WAITING is skipped when it comes up (lazy deletion)."""

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._heaps: dict[int, dict[str, list[tuple[int, int, int, Output]]]] = defaultdict(dict)
        self._pushes = 0

    def push(self, output: Output) -> None:
        """Add an output; among its tenant and priority it stands by its request's arrival."""
        self._pushes += 1
        request = output.request
        heap = self._heaps[request.priority].setdefault(request.tenant, [])
        heapq.heappush(heap, (request.number, output.index, self._pushes, output))

    def peek(self) -> Output | None:
        """The output that goes next, or None."""
        for priority in sorted(self._heaps, reverse=True):
            heads = [heap[0] for heap in self._live_heaps(priority)]
            if heads:
                return min(heads, key=self._rank)[-1]
        return None

    def pop(self) -> Output:
        """Remove what `peek` returns."""
        output = self.peek()
        assert output is not None, "pop from an empty queue"
        heapq.heappop(self._heaps[output.request.priority][output.request.tenant])
        return output

    def _rank(self, entry: tuple[int, int, int, Output]) -> tuple[int, int, int]:
        number, index, _, output = entry
        return self._counters[output.request.tenant], number, index

    def _live_heaps(self, priority: int) -> list[list[tuple[int, int, int, Output]]]:
        """This priority's non-empty heaps, with ended outputs dropped from their tops."""
        heaps = self._heaps[priority]
        for tenant, heap in list(heaps.items()):
            while heap and heap[0][-1].state is not State.WAITING:
                heapq.heappop(heap)
            if not heap:
                del heaps[tenant]
        if not heaps:
            del self._heaps[priority]
        return list(heaps.values())
