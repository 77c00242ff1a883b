"""Which cached prefix goes first when blocks are short. A policy knows leaves and their use, not how trees work."""

import heapq
from itertools import count
from typing import Protocol

from engine.radix_tree import Node

SMALLEST_SWEEP = 1024

_Entry = tuple[int, int, Node]


def is_evictable(node: Node) -> bool:
    """A leaf of the tree that nobody holds."""
    return node.parent is not None and not node.children and node.locks == 0


class EvictionPolicy(Protocol):
    """Is told of every node that may have become a leaf nobody holds; is asked for the next one to go."""

    def offer(self, node: Node) -> None:
        """``node`` may be evictable now."""

    def next(self) -> Node | None:
        """An evictable leaf, to be removed by who asks; None when there is none."""


class LeastRecentlyUsed:
    """A heap by last use. What was used, locked or given children since is skipped when it comes up.

    Such entries pile up while nothing is evicted, so they are swept out when they may be more than half of the heap.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._order = count()
        self._sweep_at = SMALLEST_SWEEP

    def offer(self, node: Node) -> None:
        if not is_evictable(node):
            return
        heapq.heappush(self._heap, (node.used, next(self._order), node))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if _is_due(entry)]
            heapq.heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), SMALLEST_SWEEP)

    def next(self) -> Node | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _is_due(entry):
                return entry[-1]
        return None


def _is_due(entry: _Entry) -> bool:
    used, _, node = entry
    return node.used == used and is_evictable(node)
