"""The fronts of an instance as the engine process sees them, and which request belongs to which front.

Request ids are unique over all fronts: the id that clients gave is held here, from submit until the request ends or
its front cancels it.
"""

import contextlib
import socket
from dataclasses import dataclass, field

from service import wire
from service.outbox import Outbox


@dataclass(slots=True, eq=False)
class FrontPort:
    """One front: what it sends is cut into commands, what it gets goes through its own outbox."""

    index: int
    socket: socket.socket
    outbox: Outbox = field(init=False)
    frames: wire.FrameReader = field(default_factory=wire.FrameReader)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.socket)

    def abandon(self) -> None:
        """The front is gone: what is left for it is dropped."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a write that hangs ends
        self.outbox.close()
        self.socket.close()


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A live request of the engine. ``request_id`` is the client's, ``engine_id`` is never used twice."""

    front: FrontPort
    serial: int
    request_id: str
    engine_id: str


class Routes:
    """Every live request by the names that the engine, the fronts and the clients have for it."""

    def __init__(self) -> None:
        self._by_engine_id: dict[str, Route] = {}
        self._by_serial: dict[int, Route] = {}
        self._holder: dict[str, Route] = {}

    def add(self, front: FrontPort, submit: wire.Submit) -> None:
        """Its request id is held by it from now on, whoever held it before."""
        route = Route(front, submit.serial, submit.request_id, submit.engine_id)
        self._by_engine_id[route.engine_id] = route
        self._by_serial[route.serial] = route
        self._holder[route.request_id] = route

    def of_engine_id(self, engine_id: str) -> Route | None:
        return self._by_engine_id.get(engine_id)

    def of_serial(self, serial: int) -> Route | None:
        return self._by_serial.get(serial)

    def holder(self, request_id: str) -> Route | None:
        return self._holder.get(request_id)

    def of_front(self, front: FrontPort) -> list[Route]:
        return [route for route in self._by_serial.values() if route.front is front]

    def free_id(self, route: Route) -> None:
        """Its request id may be used again; the engine has still to say that it ended."""
        if self._holder.get(route.request_id) is route:
            del self._holder[route.request_id]

    def remove(self, engine_id: str) -> None:
        route = self._by_engine_id.pop(engine_id, None)
        if route is not None:
            del self._by_serial[route.serial]
            self.free_id(route)
