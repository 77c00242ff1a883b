"""Instance: the state of this instance, its drain, and everybody who watches either. Lives on the event loop."""

import asyncio
import time
from dataclasses import dataclass
from enum import Enum

from service.errors import Reason, ServiceError


class State(Enum):
    STARTING = 1
    SERVING = 2
    DEGRADED = 3
    LAME_DUCK = 4
    DRAINING = 5
    STOPPED = 6
    FAILED = 7


ENDED = (State.STOPPED, State.FAILED)
_ACCEPTING = (State.SERVING, State.DEGRADED, State.LAME_DUCK)


@dataclass(slots=True)
class DrainProgress:
    """Times are seconds since the epoch."""

    start_time: float
    deadline_time: float
    requests_at_start: int
    shutdown: bool
    requests_cut: int = 0


class Instance:
    """``epoch`` counts changes of state, from 1."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = "starting the engine process"
        self.epoch = 1
        self.start_time = time.time()
        self.drain: DrainProgress | None = None
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.state is State.SERVING

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def move(self, state: State, reason: str = "") -> None:
        """The end is final."""
        if self.ended or (state, reason) == (self.state, self.reason):
            return
        self.epoch += state is not self.state
        self.state, self.reason = state, reason
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
        if self.state in _ACCEPTING:
            return
        if self.state is State.STARTING:
            raise ServiceError(Reason.STARTING, f"the server is starting: {self.reason}")
        if self.state is State.FAILED:
            raise ServiceError(Reason.WORKER_LOST, f"the server is stopping: {self.reason}")
        raise ServiceError(Reason.DRAINING, "the server is draining; send the request to another one")
