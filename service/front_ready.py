"""What supervisor and fronts give and tell each other: options, sockets and announcements. Free of gRPC."""

import socket
from dataclasses import dataclass

from service.board import Board
from service.options import ServeOptions
from service.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class FrontProcessOptions:
    """``index`` 0 is the control front, which gets the process ids of the further ones, in their order."""

    serve: ServeOptions
    index: int
    engine_pid: int
    further_pids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"front-{self.index}"


@dataclass(frozen=True, slots=True)
class FrontWiring:
    """A front's socket to the engine; its lines to the other fronts: all further ones, or the control front alone."""

    engine: socket.socket
    links: tuple[socket.socket, ...]
    board: Board


@dataclass(frozen=True, slots=True)
class FrontReady:
    """Requests are served. Addresses with the port in use."""

    inference: str
    admin: str
    model: ServedModel


@dataclass(frozen=True, slots=True)
class FrontDraining:
    """The answer to a signal: the drain that is on its way, begun by it or before it, ends within ``seconds``."""

    seconds: float
