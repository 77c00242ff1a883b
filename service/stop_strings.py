"""Stop strings as one automaton over characters (Aho-Corasick): which stop ends here, how much must be held back."""

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """Immutable; shared by all outputs of a request. State 0 is the start.

    ``match(state)`` is the longest stop string that ends at this state, or None. ``hold(state)`` is the length
    of the longest suffix of the text so far that is a proper prefix of a stop string: these characters may
    still become part of a stop and must not be shown yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        self._depth: list[int] = [0]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._children)
        self._hold = [0] * len(self._children)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)

    def match(self, state: int) -> str | None:
        return self._match[state]

    def hold(self, state: int) -> int:
        return self._hold[state]

    def starts_in(self, text: str) -> bool:
        """Whether a stop string could begin anywhere in ``text``."""
        return not self._children[0].keys().isdisjoint(text)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            child = self._children[state].get(character)
            if child is None:
                child = len(self._children)
                self._children[state][character] = child
                self._children.append({})
                self._match.append(None)
                self._depth.append(self._depth[state] + 1)
            state = child
        self._match[state] = stop

    def _link(self) -> None:
        """Failure links breadth first: a node's link is shallower, hence complete when the node is visited."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for character, child in self._children[state].items():
                self._fail[child] = self.step(self._fail[state], character) if state else 0
                queue.append(child)
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]
            self._hold[state] = self._depth[state] if self._children[state] else self._hold[self._fail[state]]
