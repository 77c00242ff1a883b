"""The messages between a front and the engine process, and their framing on a stream socket.

Front to engine: one pickled command per frame. Engine to front: one `Record` per step for all of its requests: sampled
tokens as packed rows of two unsigned 64-bit integers, everything rare (starts, ends, logprobs) as pickled side data.
Both ends are our own processes on an inherited socket, so pickle is safe here. No protobuf in this module.

A request is known by its serial: a number that is used once in the life of an instance, see `first_serial`.
"""

import pickle
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.outputs import EngineLoad, OutputFinished, RequestDone, RequestSummary, Started
from engine.sampling_params import SamplingParams
from service.logprob_block import LogprobBlock
from service.served_model import ServedModel

_FRAME = struct.Struct("<II")  # bytes of packed rows, bytes of side data
HEADER_BYTES = _FRAME.size
_OUTPUT_SHIFT = 32
_TOKEN_MASK = (1 << _OUTPUT_SHIFT) - 1
_FRONT_SHIFT = 48


def first_serial(front: int) -> int:
    """Of the serials of a front; it counts on from there. No two fronts of an instance share any."""
    return (front << _FRONT_SHIFT) + 1


# ---- front to engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Times are monotonic seconds; ``prompt`` is packed unsigned 32-bit ids.

    ``takeover``: a live request with this id, also of another front, is cancelled for it; else it is a duplicate.
    """

    serial: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    priority: int
    tenant: str
    arrival: float
    deadline: float | None
    queue_deadline: float | None
    max_duration: float | None
    takeover: bool = False
    cache_salt: str = ""
    bypass_prefix_cache: bool = False

    @property
    def engine_id(self) -> str:
        """The engine's own name for it; it also carries the request id, for logs."""
        return f"{self.request_id}~{self.serial}"


@dataclass(frozen=True, slots=True)
class Cancel:
    serial: int
    message: str


@dataclass(frozen=True, slots=True)
class FinishOutput:
    serial: int
    output_index: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for a `LoadReport` (``what`` "load") or a `RequestList` ("requests"); the reply carries ``call``."""

    call: int
    what: str


@dataclass(frozen=True, slots=True)
class SetLevel:
    logger: str
    level: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget all cached prefixes; the reply, `CacheFlushed`, carries ``call``."""

    call: int


Command = Submit | Cancel | FinishOutput | Query | FlushCache | SetLevel


# ---- engine to front


@dataclass(frozen=True, slots=True)
class Loading:
    """What the engine is doing before it is ready, in words."""

    stage: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and a warm-up request passed."""

    model: ServedModel


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine refused a submit: the class name of its error, and that error's attributes."""

    serial: int
    error: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    call: int
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class RequestList:
    """``serials`` beside ``requests``, whose ids are the engine's."""

    call: int
    serials: tuple[int, ...]
    requests: tuple[RequestSummary, ...]


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """KV blocks that are free now and were not; blocks that live requests hold."""

    call: int
    freed: int
    held: int


@dataclass(slots=True)
class Update:
    """What became known of one request, in the order: started, prompt logprobs, tokens, ends, done.

    ``tokens`` and ``logprobs`` are by output index; ``logprobs`` is empty or runs beside ``tokens``.
    ``prompt_logprobs`` continue where those of the last update ended.
    """

    serial: int
    started: Started | None = None
    prompt_logprobs: LogprobBlock | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, LogprobBlock] = field(default_factory=dict)
    finished: list[OutputFinished] = field(default_factory=list)
    done: RequestDone | None = None


@dataclass(slots=True)
class Record:
    """One or more steps, merged. ``load`` comes about once a second; ``notices`` are whole messages of their own."""

    steps: int
    step_time: float
    updates: list[Update] = field(default_factory=list)
    load: EngineLoad | None = None
    notices: list["Notice"] = field(default_factory=list)


Notice = Loading | Ready | Refused | LoadReport | RequestList | CacheFlushed


def pack_command(command: Command) -> bytes:
    side = pickle.dumps(command, protocol=5)
    return _FRAME.pack(0, len(side)) + side


def pack_record(record: Record) -> bytes:
    """One frame. Tokens leave the updates as rows (serial, output index and token), in order."""
    rows = array("Q")
    rare = []
    for update in record.updates:
        for output_index, tokens in update.tokens.items():
            for token in tokens:
                rows.append(update.serial)
                rows.append(output_index << _OUTPUT_SHIFT | token)
        if update.started or update.prompt_logprobs or update.logprobs or update.finished or update.done:
            parts = (update.started, update.prompt_logprobs, update.logprobs, update.finished, update.done)
            rare.append((update.serial, parts))
    side = pickle.dumps((record.steps, record.step_time, rare, record.load, record.notices), protocol=5)
    packed = rows.tobytes()
    return b"".join((_FRAME.pack(len(packed), len(side)), packed, side))


def frame_sizes(header: bytes) -> tuple[int, int]:
    """Bytes of rows and of side data that follow a header."""
    rows, side = _FRAME.unpack(header)
    return rows, side


def unpack_record(rows: bytes, side: bytes) -> Record:
    steps, step_time, rare, load, notices = pickle.loads(side)
    updates: dict[int, Update] = {}
    pairs = array("Q")
    pairs.frombytes(rows)
    values = iter(pairs)
    for serial, packed in zip(values, values, strict=True):
        update = updates.get(serial) or updates.setdefault(serial, Update(serial))
        update.tokens.setdefault(packed >> _OUTPUT_SHIFT, []).append(packed & _TOKEN_MASK)
    for serial, parts in rare:
        update = updates.get(serial) or updates.setdefault(serial, Update(serial))
        update.started, update.prompt_logprobs, update.logprobs, update.finished, update.done = parts
    return Record(steps, step_time, list(updates.values()), load, notices)


class FrameReader:
    """Cuts a byte stream into frames. ``feed`` takes what arrived and yields the commands that are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Command]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            rows, side = frame_sizes(bytes(self._buffer[start : start + HEADER_BYTES]))
            end = start + HEADER_BYTES + rows + side
            if len(self._buffer) < end:
                break
            command: Command = pickle.loads(self._buffer[start + HEADER_BYTES + rows : end])
            start = end
            yield command
        del self._buffer[:start]


