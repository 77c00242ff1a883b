"""EngineClient: a front's end of the wire. Commands go out at once, updates are handed to their owners."""

import asyncio
import itertools
import logging
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.errors import DuplicateRequest, EngineError, ExceedsKVCapacity, InvalidRequest, Overloaded, PromptTooLong
from engine.outputs import EngineLoad
from engine.sampling_params import SamplingParams
from service import wire
from service.served_model import ServedModel

log = logging.getLogger(__name__)
QUERY_TIMEOUT = 5.0
_REFUSALS: dict[str, type[EngineError]] = {
    kind.__name__: kind for kind in (InvalidRequest, PromptTooLong, ExceedsKVCapacity, DuplicateRequest, Overloaded)
}


class Receiver(Protocol):
    """Owner of a submitted request."""

    def on_update(self, update: wire.Update) -> None: ...
    def on_refused(self, error: EngineError) -> None: ...
    def on_engine_lost(self) -> None: ...
    def on_bug(self) -> None: ...


class EngineClient:
    """Not thread-safe: lives on the front's event loop.

    ``model`` is None until the engine is ready. ``last_seen`` is the monotonic time of the last record,
    ``steps`` and ``last_step_time`` what it told. ``lost`` once the process is gone.
    """

    def __init__(self, sock: socket.socket, front: int = 0) -> None:
        self._socket = sock
        self._writer: asyncio.StreamWriter | None = None
        self._receivers: dict[int, Receiver] = {}
        self._serials = itertools.count(wire.first_serial(front))
        self._calls: dict[int, asyncio.Future[wire.Notice]] = {}
        self._call_numbers = itertools.count(1)
        self.model: ServedModel | None = None
        self.stage = "starting the engine process"
        self.lost = False
        self.steps = 0
        self.last_step_time: float | None = None
        self.last_seen = time.monotonic()
        self.on_ready: Callable[[ServedModel], None] = lambda model: None
        self.on_load: Callable[[EngineLoad], None] = lambda load: None
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        """Whether requests were submitted and have not ended."""
        return bool(self._receivers)

    async def run(self) -> None:
        """Reads records until the engine is gone; then every request is lost."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            while True:
                rows, side = wire.frame_sizes(await reader.readexactly(wire.HEADER_BYTES))
                record = wire.unpack_record(await reader.readexactly(rows), await reader.readexactly(side))
                self._dispatch(record)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose()
        finally:
            self._writer.close()

    def submit(
        self,
        receiver: Receiver,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int,
        arrival: float,
        deadline: float,
        queue_deadline: float | None,
        max_duration: float | None,
        cache_salt: str,
        bypass_prefix_cache: bool,
        takeover: bool,
    ) -> int:
        """Starts a request; returns its serial. With ``takeover`` one that holds its id, on any front, is cancelled."""
        if not self._receivers:
            self.last_seen = time.monotonic()  # an idle engine is silent
        serial = next(self._serials)
        self._receivers[serial] = receiver
        if self.lost:
            asyncio.get_running_loop().call_soon(receiver.on_engine_lost)
        self._send(
            wire.Submit(
                serial=serial,
                request_id=request_id,
                prompt=array("I", prompt).tobytes(),
                params=params,
                priority=priority,
                tenant="",
                arrival=arrival,
                deadline=deadline,
                queue_deadline=queue_deadline,
                max_duration=max_duration,
                takeover=takeover,
                cache_salt=cache_salt,
                bypass_prefix_cache=bypass_prefix_cache,
            )
        )
        return serial

    def release(self, serial: int, *, cancel: str | None) -> None:
        """The receiver wants no more updates; with ``cancel`` (a message) the engine frees the request, too."""
        if self._receivers.pop(serial, None) is not None and cancel is not None:
            self._send(wire.Cancel(serial, cancel))

    def finish_output(self, serial: int, output_index: int, token_count: int) -> None:
        self._send(wire.FinishOutput(serial, output_index, token_count))

    def set_level(self, logger: str, level: int) -> None:
        self._send(wire.SetLevel(logger, level))

    async def load(self) -> EngineLoad:
        """The load of now. Raises TimeoutError when the engine does not answer, ConnectionError when it is gone."""
        reply = await self._ask(lambda call: wire.Query(call, "load"))
        assert isinstance(reply, wire.LoadReport)
        return reply.load

    async def list_requests(self) -> wire.RequestList:
        """As `load`."""
        reply = await self._ask(lambda call: wire.Query(call, "requests"))
        assert isinstance(reply, wire.RequestList)
        return reply

    async def flush_cache(self) -> wire.CacheFlushed:
        """As `load`. Without an answer it may have happened or not; asking again does no harm."""
        reply = await self._ask(wire.FlushCache)
        assert isinstance(reply, wire.CacheFlushed)
        return reply

    async def _ask(self, question: Callable[[int], wire.Command]) -> wire.Notice:
        if self.lost or self._writer is None:
            raise ConnectionError("the engine process is gone")
        call = next(self._call_numbers)
        reply = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(call))
            async with asyncio.timeout(QUERY_TIMEOUT):
                return await reply
        finally:
            del self._calls[call]

    def _send(self, command: wire.Command) -> None:
        if self._writer is not None and not self.lost:
            self._writer.write(wire.pack_command(command))

    def _dispatch(self, record: wire.Record) -> None:
        self.last_seen = time.monotonic()
        if record.steps:
            self.steps, self.last_step_time = record.steps, record.step_time
        for update in record.updates:
            receiver = self._receivers.get(update.serial)
            if receiver is None:
                continue
            if update.done is not None:
                del self._receivers[update.serial]
            try:
                receiver.on_update(update)
            except Exception:  # a fault in one request's text must not end the others'
                log.exception("update of request %d failed", update.serial)
                receiver.on_bug()
        if record.load is not None:
            self.on_load(record.load)
        for notice in record.notices:
            self._notice(notice)

    def _notice(self, notice: wire.Notice) -> None:
        match notice:
            case wire.Loading(stage):
                self.stage = stage
            case wire.Ready(model):
                self.model = model
                self.on_ready(model)
            case wire.Refused(serial, error, arguments):
                if (receiver := self._receivers.pop(serial, None)) is not None:
                    receiver.on_refused(_refusal(error, arguments))
            case wire.LoadReport(call) | wire.RequestList(call) | wire.CacheFlushed(call):
                if (reply := self._calls.get(call)) is not None and not reply.done():
                    reply.set_result(notice)

    def _lose(self) -> None:
        self.lost = True
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the engine process is gone"))
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_engine_lost()
        self.on_lost()


def _refusal(name: str, arguments: tuple[object, ...]) -> EngineError:
    kind = _REFUSALS.get(name)
    return EngineError(f"{name}: {arguments}") if kind is None else kind(*arguments)
