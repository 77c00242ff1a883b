"""What every front process is: a server for inference, the tokenizer and the text, and a line to the engine."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from multiprocessing.connection import Connection

from service.engine_client import EngineClient
from service.front_ready import FrontProcessOptions, FrontWiring
from service.instance import Instance
from service.process import ExitCode
from service.registry import Registry
from service.runtime import Runtime
from service.servers import inference_server
from service.tokenizer import Tokenizer

log = logging.getLogger(__name__)
STOP_GRACE = 1.0


class Front(ABC):
    """Builds what is common, and waits for the end."""

    def __init__(self, options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> None:
        serve = options.serve
        self._options = serve
        self._supervisor = supervisor
        self._end: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._instance = Instance(wiring.board)
        self._engine = EngineClient(wiring.engine, options.index)
        self._registry = Registry(
            self._instance, wiring.board, options.index,
            serve.engine.max_queued_requests, serve.engine.max_queued_tokens,
        )
        tokenizer = Tokenizer.load(serve.engine.model)
        self._runtime = Runtime(serve, tokenizer, self._engine, self._instance, self._registry)
        self._inference = inference_server(self._runtime)

    @abstractmethod
    async def start(self) -> None:
        """Begins to answer. Raises `ConfigError` when it cannot listen."""

    async def serve(self) -> ExitCode:
        """Until the end; then closes the servers."""
        code = await self._end
        await self._stop(code)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._runtime.threads.shutdown(wait=False, cancel_futures=True)
        return code

    async def _stop(self, code: ExitCode) -> None:
        await self._runtime.gate.stop(lambda: self._inference.stop(STOP_GRACE))

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
