"""A further front: serves inference and health on the port of the first one, and does as that one says."""

import asyncio
import logging
from multiprocessing.connection import Connection
from typing import Any

from service.errors import Reason, ServiceError
from service.front_base import Front
from service.front_link import (
    Answer,
    AskFigures,
    AskRequests,
    End,
    Fail,
    Figures,
    InstanceChanged,
    Link,
    Listen,
    LiveRow,
    Message,
    RequestsChanged,
    SetLevel,
    Up,
)
from service.front_ready import FrontProcessOptions, FrontWiring
from service.listening import bind
from service.process import ExitCode

log = logging.getLogger(__name__)


class FurtherFront(Front):
    """Ends with the control front or the engine. Its own death ends its calls and nothing else."""

    def __init__(self, options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> None:
        super().__init__(options, wiring, supervisor)
        (link,) = wiring.links
        self._link = Link(link, self._on_message)
        self._listening = False
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._registry.on_change = self._requests_changed
        self._engine.on_ready = lambda model: self._tell_when_up()
        self._engine.on_lost = lambda: self._finish(ExitCode.FAILED)

    async def start(self) -> None:
        """Waits for the control front to name the port. Raises `ConfigError` when it cannot listen there."""
        self._spawn(self._follow())
        self._spawn(self._engine.run())
        futures: list[asyncio.Future[Any]] = [self._address, self._end]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            return
        address = bind(self._inference, "--listen", self._address.result())
        await self._inference.start()
        log.info("listening on %s, too", address)
        self._listening = True
        self._tell_when_up()

    async def _follow(self) -> None:
        await self._link.run()
        self._registry.fail_all(ServiceError(Reason.WORKER_LOST, "the control process ended; the request is lost"))
        self._finish(ExitCode.FAILED)

    def _tell_when_up(self) -> None:
        if self._listening and self._engine.model is not None:
            self._link.send(Up())

    def _requests_changed(self) -> None:
        if self._instance.draining:
            self._link.send(RequestsChanged())

    def _on_message(self, message: Message) -> None:
        match message:
            case Listen(address):
                self._address.set_result(address)
            case InstanceChanged(reason):
                self._instance.follow(reason)
                self._link.send(RequestsChanged())  # a request may have ended before the state was seen here
            case SetLevel(logger, level):
                logging.getLogger(logger or None).setLevel(level)
            case End(code):
                self._finish(code)
            case AskRequests(call):
                self._link.send(Answer(call, [LiveRow.of(each) for each in self._registry]))
            case AskFigures(call):
                self._link.send(Answer(call, self._figures()))
            case Fail(call, request_ids):
                self._link.send(Answer(call, self._fail(request_ids, message.error)))

    def _figures(self) -> Figures:
        return Figures(self._runtime.metrics, len(asyncio.all_tasks()), self._runtime.budget.used_bytes)

    def _fail(self, request_ids: tuple[str, ...] | None, error: ServiceError) -> list[str]:
        if request_ids is not None:
            return self._registry.fail(request_ids, error)
        ids = [call.request_id for call in self._registry]
        self._registry.fail_all(error)
        return ids
