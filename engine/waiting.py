"""The waiting queue: priority first, then fair between tenants, then first come first served. Pure Python."""

import heapq
from collections import defaultdict

from engine.request import Output, State

# So many pushes between two sweeps: what ended below the heads does not pile up.
SWEEP_EVERY = 1024


class WaitingQueue:
    """Outputs waiting for a seat. An output that left WAITING is skipped when it comes up, or swept out later."""

    def __init__(self) -> None:
        self._heaps: dict[int, dict[str, list[tuple[int, int, int, Output]]]] = defaultdict(dict)
        self._pushes = 0

    def push(self, output: Output) -> None:
        """Add an output; among its tenant and priority it stands by its request's arrival."""
        self._pushes += 1
        if self._pushes % SWEEP_EVERY == 0:
            self._sweep()
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

    def _sweep(self) -> None:
        for priority in list(self._heaps):
            for tenant, heap in self._heaps[priority].items():
                self._heaps[priority][tenant] = [entry for entry in heap if entry[-1].state is State.WAITING]
                heapq.heapify(self._heaps[priority][tenant])
            self._live_heaps(priority)

    @staticmethod
    def _rank(entry: tuple[int, int, int, Output]) -> tuple[int, int, int]:
        number, index, _, output = entry
        return output.request.account.counter, number, index

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
