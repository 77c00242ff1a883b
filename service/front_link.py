"""The line between the control front and a further one: what they tell and ask each other.

One socket per further front. Both ends are our own processes, so pickle is safe here. Neither end waits in a write.
"""

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.errors import Reason, ServiceError
from service.live_request import LiveRequest
from service.metrics import Metrics
from service.process import ExitCode

_SIZE = struct.Struct("<I")


# ---- what is told of a front


@dataclass(frozen=True, slots=True)
class LiveRow:
    """A live request. ``arrival`` in monotonic seconds; ``serial`` is None before it was submitted."""

    request_id: str
    arrival: float
    receive_time: float
    serial: int | None

    @classmethod
    def of(cls, call: LiveRequest) -> "LiveRow":
        return cls(call.request_id, call.arrival, call.receive_time, call.serial)


@dataclass(frozen=True, slots=True)
class Figures:
    """``metrics`` since the process began; tasks on its event loop; bytes that wait for slow readers."""

    metrics: Metrics
    tasks: int = 0
    buffer_bytes: int = 0


# ---- control front to further front


@dataclass(frozen=True, slots=True)
class Listen:
    """Serve on this address. Its port is taken already, by the control front and to be shared."""

    address: str


@dataclass(frozen=True, slots=True)
class InstanceChanged:
    """The state on the board has changed, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetLevel:
    logger: str
    level: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop the server and exit."""

    code: ExitCode


@dataclass(frozen=True, slots=True)
class AskRequests:
    """Answered with a list of `LiveRow`."""

    call: int


@dataclass(frozen=True, slots=True)
class AskFigures:
    """Answered with `Figures`."""

    call: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail these requests, None = all; answered with the list of their ids."""

    call: int
    request_ids: tuple[str, ...] | None
    reason: Reason
    message: str

    @property
    def error(self) -> ServiceError:
        return ServiceError(self.reason, self.message)


# ---- further front to control front


@dataclass(frozen=True, slots=True)
class Up:
    """It listens and the engine is ready."""


@dataclass(frozen=True, slots=True)
class RequestsChanged:
    """The number of its live requests has changed. Told while the instance drains."""


@dataclass(frozen=True, slots=True)
class Answer:
    call: int
    value: Any


Message = (
    Listen | InstanceChanged | SetLevel | End | AskRequests | AskFigures | Fail | Up | RequestsChanged | Answer
)  # fmt: skip


class Link:
    """One end of the line, on the event loop. What is sent before `run` goes out when it runs."""

    def __init__(self, sock: socket.socket, on_message: Callable[[Message], None]) -> None:
        self._socket = sock
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[Message] = []

    async def run(self) -> None:
        """Hands over messages until the other end is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        for message in self._early:
            self.send(message)
        try:
            while True:
                (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                self._on_message(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writer.close()

    def send(self, message: Message) -> None:
        if self._writer is None:
            self._early.append(message)
        elif not self._writer.is_closing():
            body = pickle.dumps(message, protocol=5)
            self._writer.write(_SIZE.pack(len(body)) + body)
