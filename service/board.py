"""Board: the few numbers that all front processes of an instance share, in memory without a name.

Nothing stays behind whoever is killed: the memory is a file that only open descriptors hold, and the lock is the
kernel's, which takes it from a process that dies.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

log = logging.getLogger(__name__)
_LOCK_WAIT = 0.05  # s; held for microseconds, so beyond it its holder is stopped, and nobody waits for that
_LOCK_PAUSE = 0.0001
_STATE, _READY, _FIRST_FRONT = 0, 1, 2  # cells of 64 bits
_CELLS_PER_FRONT = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests that were admitted and have not ended; those of them that wait; prompt tokens of these."""

    live: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0


class Board:
    """Made by the supervisor, inherited by the fronts: it can be pickled while a process is spawned, and only then.

    ``state`` and ``ready`` are written by the control front, each front's counts by itself. Who reads in order to
    decide does so and writes what follows from it inside `locked`.
    """

    def __init__(self, num_fronts: int, descriptor: int | None = None) -> None:
        size = 8 * (_FIRST_FRONT + _CELLS_PER_FRONT * num_fronts)
        if descriptor is None:
            descriptor = os.memfd_create("picovllm-board")
            os.ftruncate(descriptor, size)
        self.num_fronts = num_fronts
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._cells = memoryview(self._memory).cast("q")

    def __reduce__(self) -> tuple[Callable[[int, Any], "Board"], tuple[int, Any]]:
        return _attach, (self.num_fronts, DupFd(self._descriptor))

    @property
    def state(self) -> int:
        return self._cells[_STATE]

    @property
    def ready(self) -> bool:
        return bool(self._cells[_READY])

    def set_state(self, state: int, ready: bool) -> None:
        """From here on no front admits what this state refuses."""
        with self.locked():
            self._cells[_STATE], self._cells[_READY] = state, ready

    def set_counts(self, front: int, counts: Counts) -> None:
        first = _FIRST_FRONT + _CELLS_PER_FRONT * front
        self._cells[first], self._cells[first + 1] = counts.live, counts.queued_requests
        self._cells[first + 2] = counts.queued_tokens

    def counts(self, front: int) -> Counts:
        first = _FIRST_FRONT + _CELLS_PER_FRONT * front
        return Counts(*self._cells[first : first + _CELLS_PER_FRONT])

    def total(self) -> Counts:
        """Of the whole instance."""
        cells = self._cells[_FIRST_FRONT:]
        return Counts(*(sum(cells[kind::_CELLS_PER_FRONT]) for kind in range(_CELLS_PER_FRONT)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time. Not for threads. After `_LOCK_WAIT` it goes on without: a bound may be passed then."""
        held = self._lock()
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        self._cells.release()
        self._memory.close()
        os.close(self._descriptor)

    def _lock(self) -> bool:
        end = time.monotonic() + _LOCK_WAIT
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > end:
                    log.warning("a front holds the lock of the admission counters for long; going on without it")
                    return False
                time.sleep(_LOCK_PAUSE)


def _attach(num_fronts: int, descriptor: Any) -> Board:
    return Board(num_fronts, descriptor.detach())
