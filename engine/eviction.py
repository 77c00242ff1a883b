"""Which cached prefix goes first when blocks are short. A policy knows leaves and their use, not how trees work."""

import heapq
from itertools import count
from typing import Protocol

from engine.radix_tree import Node


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
    """A heap by last use. What was used, locked or given children since is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._order = count()

    def offer(self, node: Node) -> None:
        if is_evictable(node):
            heapq.heappush(self._heap, (node.used, next(self._order), node))

    def next(self) -> Node | None:
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            if node.used == used and is_evictable(node):
                return node
        return None
