"""AdminService: the handlers. State lives in Instance, Drainer, Registry and the engine; this only shows and asks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from engine.outputs import EngineLoad
from protos.picovllm.admin.v1 import admin_pb2 as pb
from protos.picovllm.admin.v1 import admin_pb2_grpc
from service import admin_messages as messages
from service.calls import answer
from service.drain import Drainer
from service.errors import Reason, ServiceError, field_errors
from service.front_link import Figures, LiveRow
from service.log_levels import LogLevels
from service.metrics import metrics_text
from service.options import MAX_DRAIN_SECONDS
from service.peers import Peers
from service.runtime import Runtime
from service.validate import duration_seconds, refuse_unknown_fields
from service.wire import RequestList

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext
MAX_REASON_BYTES = 256
T = TypeVar("T")
_LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, runtime: Runtime, drainer: Drainer, peers: Peers, workers: messages.Workers) -> None:
        self._runtime = runtime
        self._drainer = drainer
        self._peers = peers
        self._workers = workers
        self._levels = LogLevels(self._set_level_elsewhere)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        async def body() -> pb.GetStatusResponse:
            return pb.GetStatusResponse(status=self._status())

        return await self._answer(request, context, "GetStatus", body)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Context) -> None:
        async def body() -> None:
            instance = self._runtime.instance
            while True:
                ended, change = instance.ended, instance.next_change
                await context.write(pb.WatchStatusResponse(status=self._status()))
                if ended:
                    return
                await change.wait()

        await self._answer(request, context, "WatchStatus", body)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        async def body() -> pb.GetLoadResponse:
            load = await self._load()
            return messages.load_message(load, self._runtime.history.rates(load))

        return await self._answer(request, context, "GetLoad", body)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async def body() -> pb.DrainResponse:
            found: list[tuple[str, str]] = []
            lame_duck = _drain_seconds(request, "lame_duck", found)
            timeout = _drain_seconds(request, "timeout", found)
            if len(request.reason.encode()) > MAX_REASON_BYTES:
                found.append(("reason", f"at most {MAX_REASON_BYTES} bytes"))
            _refuse(found)
            self._drainer.drain(lame_duck, timeout, request.reason)
            return pb.DrainResponse(status=self._status())

        return await self._answer(request, context, "Drain", body)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        async def body() -> pb.UndrainResponse:
            self._drainer.undrain()
            return pb.UndrainResponse(status=self._status())

        return await self._answer(request, context, "Undrain", body)

    async def Shutdown(self, request: pb.ShutdownRequest, context: Context) -> pb.ShutdownResponse:
        async def body() -> pb.ShutdownResponse:
            found: list[tuple[str, str]] = []
            timeout = _drain_seconds(request, "timeout", found)
            if request.immediate and request.HasField("timeout"):
                found.append(("timeout", "is not possible beside immediate"))
            if request.scope not in (pb.SHUTDOWN_SCOPE_UNSPECIFIED, pb.SHUTDOWN_SCOPE_INSTANCE):
                found.append(("scope", f"unknown value {request.scope}"))
            _refuse(found)
            self._drainer.shutdown(timeout, immediate=request.immediate, reason="shut down by an administrator")
            return pb.ShutdownResponse(status=self._status())

        return await self._answer(request, context, "Shutdown", body)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        async def body() -> pb.ListRequestsResponse:
            known = await self._known_requests()
            by_serial = dict(zip(known.serials, known.requests, strict=True))
            rows = [LiveRow.of(call) for call in self._runtime.registry] + await self._peers.requests()
            rows.sort(key=lambda row: row.arrival)
            return pb.ListRequestsResponse(
                requests=[messages.request_message(row, by_serial.get(row.serial or 0)) for row in rows]
            )

        return await self._answer(request, context, "ListRequests", body)

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Context) -> pb.CancelRequestsResponse:
        async def body() -> pb.CancelRequestsResponse:
            error = ServiceError(Reason.ADMIN_CANCELLED, "cancelled by an administrator")
            asked, registry = _asked_ids(request), self._runtime.registry
            here = registry.fail([call.request_id for call in registry] if asked is None else asked, error)
            found = dict.fromkeys(here + await self._peers.fail(asked, error))
            return pb.CancelRequestsResponse(
                cancelled_ids=found, unknown_ids=[each for each in asked or () if each not in found]
            )

        return await self._answer(request, context, "CancelRequests", body)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        async def body() -> pb.FlushCacheResponse:
            flushed = await self._from_engine(self._runtime.engine.flush_cache)
            return pb.FlushCacheResponse(kv_blocks_freed=flushed.freed, kv_blocks_held=flushed.held)

        return await self._answer(request, context, "FlushCache", body)

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        async def body() -> pb.SetLogLevelResponse:
            found: list[tuple[str, str]] = []
            if request.level not in _LEVELS:
                found.append(("level", "must be one of DEBUG, INFO, WARNING, ERROR"))
            ttl = duration_seconds(request.ttl, "ttl", found) if request.HasField("ttl") else None
            if ttl is not None and ttl <= 0:
                found.append(("ttl", f"must be positive, got {ttl:g} s"))
            _refuse(found)
            previous = self._levels.set(request.logger, _LEVELS[request.level], ttl)
            return pb.SetLogLevelResponse(previous_level=messages.log_level(previous))

        return await self._answer(request, context, "SetLogLevel", body)

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        async def body() -> pb.GetMetricsResponse:
            runtime = self._runtime
            load = await self._load() if runtime.engine.model is not None and not runtime.engine.lost else None
            here = Figures(runtime.metrics, len(asyncio.all_tasks()), runtime.budget.used_bytes)
            fronts = {"front-0": here} | {peer.name: figures for peer, figures in await self._peers.figures()}
            tasks = sum(figures.tasks for figures in fronts.values())
            buffered = sum(figures.buffer_bytes for figures in fronts.values())
            gauges = {
                "ready": (float(runtime.instance.ready), "Whether the instance is ready for requests."),
                "event_loop_tasks": (float(tasks), "Tasks on the fronts' event loops."),
                "live_requests": (float(runtime.registry.live_in_instance), "Requests accepted and not ended."),
                "output_buffer_bytes": (float(buffered), "Output that waits for slow readers."),
            }
            by_front = {name: figures.metrics for name, figures in fronts.items()}
            return pb.GetMetricsResponse(text=metrics_text(by_front, gauges, load))

        return await self._answer(request, context, "GetMetrics", body)

    def _status(self) -> pb.Status:
        return messages.status_message(self._runtime, self._workers, self._peers)

    def _set_level_elsewhere(self, logger: str, level: int) -> None:
        self._runtime.engine.set_level(logger, level)
        self._peers.set_level(logger, level)

    async def _load(self) -> EngineLoad:
        return await self._from_engine(self._runtime.engine.load)

    async def _known_requests(self) -> RequestList:
        return await self._from_engine(self._runtime.engine.list_requests)

    async def _from_engine(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises `ServiceError` when it does not answer, as while it is loading."""
        _ = self._runtime.model
        try:
            return await ask()
        except (TimeoutError, ConnectionError) as error:
            raise ServiceError(Reason.WORKER_LOST, "the engine process does not answer") from error

    async def _answer(self, request: Message, context: Context, method: str, body: Callable[[], Awaitable[T]]) -> T:
        async def checked() -> T:
            refuse_unknown_fields(request)
            return await body()

        return await answer(context, method, self._runtime.metrics, checked)


def _asked_ids(request: pb.CancelRequestsRequest) -> list[str] | None:
    """Without repetitions; None = all. Raises `ServiceError`."""
    kind = request.WhichOneof("target")
    if kind == "ids" and request.ids.ids:
        return list(dict.fromkeys(request.ids.ids))
    if kind == "all" and request.all:
        return None
    problem = {"ids": ("ids.ids", "must hold at least one id"), "all": ("all", "only true is a value")}
    raise field_errors([problem.get(kind or "", ("target", "set one of ids and all"))])


def _refuse(found: list[tuple[str, str]]) -> None:
    if found:
        raise field_errors(found)


def _drain_seconds(
    request: pb.DrainRequest | pb.ShutdownRequest, name: str, found: list[tuple[str, str]]
) -> float | None:
    if not request.HasField(name):
        return None
    value = duration_seconds(getattr(request, name), name, found)
    if value is not None and value < 0:
        found.append((name, f"must not be negative, got {value:g} s"))
    elif value is not None and value > MAX_DRAIN_SECONDS:
        found.append((name, f"at most {MAX_DRAIN_SECONDS:.0f} s, got {value:.0f} s"))
    return value
