"""What supervisor and front tell each other: the front's options and its announcements. Free of gRPC."""

from dataclasses import dataclass

from service.options import ServeOptions
from service.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class FrontProcessOptions:
    serve: ServeOptions
    engine_pid: int


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
