"""The front process: gRPC servers, tokenizer and text, admission. Free of torch; never touches a GPU."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Awaitable
from multiprocessing.connection import Connection

import grpc

from engine.errors import ConfigError, EngineError
from service.admin_messages import Workers
from service.drain import Drainer
from service.engine_client import EngineClient
from service.front_ready import FrontDraining, FrontProcessOptions, FrontReady
from service.instance import Instance, State
from service.log import set_up_logging
from service.process import ExitCode, bind_life_to_parent
from service.registry import Registry
from service.runtime import Runtime
from service.served_model import ServedModel
from service.servers import admin_server, inference_server
from service.tokenizer import Tokenizer

log = logging.getLogger(__name__)
STOP_GRACE = 1.0
_CHECK_INTERVAL = 1.0


def front_main(options: FrontProcessOptions, engine: socket.socket, supervisor: Connection) -> None:
    """Entry point of the process. Exit codes: 0 after an orderly end, 1 when the engine died, 2 cannot start."""
    bind_life_to_parent()
    set_up_logging(options.serve.log_level, "front")
    try:
        code = asyncio.run(_run(options, engine, supervisor))
    except EngineError as error:
        supervisor.send(str(error))
        code = ExitCode.UNUSABLE
    sys.exit(code)


async def _run(options: FrontProcessOptions, engine: socket.socket, supervisor: Connection) -> ExitCode:
    front = Front(options, engine, supervisor)
    await front.start()
    return await front.serve()


class Front:
    """Builds everything, connects it, and waits for the end."""

    def __init__(self, options: FrontProcessOptions, engine: socket.socket, supervisor: Connection) -> None:
        self._options = options.serve
        self._workers = Workers(options.engine_pid)
        self._supervisor = supervisor
        self._end: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        serve = options.serve
        self._instance = Instance()
        self._engine = EngineClient(engine)
        registry = Registry(serve.engine.max_queued_requests, serve.engine.max_queued_tokens)
        self._runtime = Runtime(serve, Tokenizer.load(serve.engine.model), self._engine, self._instance, registry)
        self._drainer = Drainer(
            self._instance, registry, serve.lame_duck, serve.drain_timeout, lambda: self._finish(ExitCode.OK)
        )
        registry.on_change = self._drainer.requests_changed
        self._engine.on_ready = self._ready
        self._engine.on_load = self._runtime.history.add
        self._engine.on_lost = self._engine_lost

    async def start(self) -> None:
        """Listens, answering STARTING until the engine is ready. Raises `ConfigError` when it cannot listen."""
        self._inference = inference_server(self._runtime)
        self._admin = admin_server(self._runtime, self._drainer, self._workers)
        self._inference_address = _bind(self._inference, "--listen", self._options.listen)
        self._admin_address = _bind(self._admin, "--admin-listen", self._options.admin_listen)
        await self._inference.start()
        await self._admin.start()
        log.info("listening on %s and %s for administration", self._inference_address, self._admin_address)
        asyncio.get_running_loop().add_reader(self._supervisor.fileno(), self._on_supervisor)
        self._spawn(self._engine.run())
        self._spawn(self._watch_progress())

    async def serve(self) -> ExitCode:
        """Until the end; then closes the servers."""
        code = await self._end
        asyncio.get_running_loop().remove_reader(self._supervisor.fileno())
        await asyncio.gather(self._inference.stop(STOP_GRACE), self._admin.stop(STOP_GRACE))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._runtime.threads.shutdown(wait=False, cancel_futures=True)
        return code

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: "asyncio.Future[None]") -> None:
        """A background task that fails takes the process down: nothing would answer any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)
            self._finish(ExitCode.FAILED)

    def _finish(self, code: ExitCode) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _ready(self, model: ServedModel) -> None:
        if self._instance.state is State.STARTING:
            self._instance.move(State.SERVING)
            self._supervisor.send(FrontReady(self._inference_address, self._admin_address, model))

    def _engine_lost(self) -> None:
        self._instance.move(State.FAILED, "the engine process ended")
        self._finish(ExitCode.FAILED)

    def _on_supervisor(self) -> None:
        """SIGTERM once: drain and end. Twice: end at once. The supervisor gone: the kernel ends us anyway."""
        try:
            order = self._supervisor.recv()
        except (EOFError, OSError):
            self._finish(ExitCode.FAILED)
            return
        if order == "drain":
            self._drainer.terminate()
            if (drain := self._instance.drain) is not None:
                self._supervisor.send(FrontDraining(max(drain.deadline_time - time.time(), 0.0)))
        else:
            self._drainer.shutdown(immediate=True, reason="terminated by a second signal")

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            self._runtime.check_progress()


def _bind(server: grpc.aio.Server, option: str, address: str) -> str:
    """The address in use, with its port. Raises `ConfigError`."""
    try:
        port = 0 if _answers(address) else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"{option} {address}: cannot listen there; is the address in use?")
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _answers(address: str) -> bool:
    """Whether somebody listens on this unix socket: gRPC would take it away from them. One left behind is replaced."""
    if not address.startswith("unix:"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
        except OSError:
            return False
    return True
