"""Instance: the state of this instance, its drain, and everybody who watches either. Lives on the event loop."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from service.board import Board
from service.errors import Reason, ServiceError


class State(Enum):
    STARTING = 0  # what a new board says
    SERVING = 1
    DEGRADED = 2
    LAME_DUCK = 3
    DRAINING = 4
    STOPPED = 5
    FAILED = 6


ENDED = (State.STOPPED, State.FAILED)
_ACCEPTING = (State.SERVING, State.DEGRADED, State.LAME_DUCK)
_IN_SERVICE = (State.SERVING, State.DEGRADED)


@dataclass(slots=True)
class DrainProgress:
    """Times are seconds since the epoch."""

    start_time: float
    deadline_time: float
    requests_at_start: int
    shutdown: bool
    requests_cut: int = 0


class Instance:
    """State and readiness are on the board, the same in every front at once. ``epoch`` counts changes of state, from 1.

    The control front moves it; further fronts `follow`. ``on_move`` is called after each move.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.reason = "starting the engine process"
        self.epoch = 1
        self.start_time = time.time()
        self.drain: DrainProgress | None = None
        self.on_move: Callable[[], None] = lambda: None
        self._stalled = ""
        self._incomplete = ""
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        return State(self._board.state)

    @property
    def ready(self) -> bool:
        return self._board.ready

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def draining(self) -> bool:
        return self.state in (State.LAME_DUCK, State.DRAINING)

    def move(self, state: State, reason: str = "", *, ready: bool = False) -> None:
        """The end is final."""
        if self.ended or (state, reason) == (self.state, self.reason):
            return
        self.epoch += state is not self.state
        self._board.set_state(state.value, ready)
        self.follow(reason)
        self.on_move()

    def serve(self) -> None:
        """Moves to what its health allows: a stalled engine is not ready; a part that is missing is only told."""
        reason = self._stalled or self._incomplete
        self.move(State.DEGRADED if reason else State.SERVING, reason, ready=not self._stalled)

    def note_health(self, *, stalled: str | None = None, incomplete: str | None = None) -> None:
        """What is wrong, in words; empty = nothing any more; None = as it was. A stall keeps its first words."""
        if stalled is not None:
            self._stalled = stalled and (self._stalled or stalled)
        if incomplete is not None:
            self._incomplete = incomplete
        if self.state in _IN_SERVICE:
            self.serve()

    def follow(self, reason: str) -> None:
        """The state on the board has changed, for this reason."""
        self.reason = reason
        self.touch()

    def touch(self) -> None:
        """Wakes the watchers: something they show has changed."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    @property
    def next_change(self) -> asyncio.Event:
        """Set at the next change after now. Take it before looking at the state, so that no change is missed."""
        return self._changed

    def refuse_unless_accepting(self) -> None:
        """Raises `ServiceError` while no request is accepted."""
        state = self.state
        if state in _ACCEPTING:
            return
        if state is State.STARTING:
            raise ServiceError(Reason.STARTING, f"the server is starting: {self.reason}")
        if state is State.FAILED:
            raise ServiceError(Reason.WORKER_LOST, f"the server is stopping: {self.reason}")
        raise ServiceError(Reason.DRAINING, "the server is draining; send the request to another one")
