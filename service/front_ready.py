"""What supervisor and front tell each other: the front's options and its announcement. Free of gRPC."""

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
