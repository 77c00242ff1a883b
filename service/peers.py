"""Peers: the further fronts, as the control front sees them. With one front process there are none."""

import asyncio
import functools
import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.board import Board, Counts
from service.errors import Reason, ServiceError
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
from service.metrics import Metrics
from service.process import ExitCode

log = logging.getLogger(__name__)
ANSWER_TIMEOUT = 2.0


@dataclass(slots=True, eq=False)
class Peer:
    """``figures`` are the last ones known: those of a front that is gone still count."""

    index: int
    pid: int
    link: Link = field(init=False)
    up: bool = False
    alive: bool = True
    figures: Figures = field(default_factory=lambda: Figures(Metrics()))

    @property
    def name(self) -> str:
        return f"front-{self.index}"


class Peers:
    """``on_up`` is called when all are up, ``on_change`` when the number of their requests did, ``on_lost`` with one
    that is gone."""

    def __init__(self, links: Sequence[socket.socket], pids: Sequence[int], board: Board) -> None:
        self._board = board
        self._peers = [Peer(index, pid) for index, pid in enumerate(pids, start=1)]
        for peer, sock in zip(self._peers, links, strict=True):
            peer.link = Link(sock, functools.partial(self._on_message, peer))
        self._calls: dict[int, tuple[Peer, asyncio.Future[Any]]] = {}
        self._call_numbers = itertools.count(1)
        self.on_up: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Peer], None] = lambda peer: None

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    @property
    def all_up(self) -> bool:
        return all(peer.up for peer in self._peers)

    async def run(self) -> None:
        """Until all are gone."""
        await asyncio.gather(*(self._run(peer) for peer in self._peers))

    # ---- told to all

    def listen(self, address: str) -> None:
        self._tell(Listen(address))

    def instance_changed(self, reason: str) -> None:
        self._tell(InstanceChanged(reason))

    def set_level(self, logger: str, level: int) -> None:
        self._tell(SetLevel(logger, level))

    def end(self, code: ExitCode) -> None:
        self._tell(End(code))

    # ---- asked of all

    async def requests(self) -> list[LiveRow]:
        """Raises `ServiceError` when one does not answer."""
        answers = await self._ask(AskRequests)
        for peer, answer in answers:
            if answer is None:
                raise ServiceError(Reason.WORKER_LOST, f"{peer.name} does not answer")
        return [row for _, rows in answers for row in rows]

    async def figures(self) -> list[tuple[Peer, Figures]]:
        """Of all that there were: the last known ones of those that do not answer."""
        for peer, answer in await self._ask(AskFigures):
            if answer is not None:
                peer.figures = answer
        return [(peer, peer.figures) for peer in self._peers]

    async def fail(self, request_ids: Sequence[str] | None, error: ServiceError) -> list[str]:
        """Fails these requests, None = all of them; returns the ids of those that were alive there."""
        ids = None if request_ids is None else tuple(request_ids)
        answers = await self._ask(lambda call: Fail(call, ids, error.reason, error.message))
        for peer, answer in answers:
            if answer is None:
                log.warning("%s does not answer: its requests were not told that they end", peer.name)
        return [request_id for _, found in answers for request_id in found or ()]

    # ---- inside

    def _tell(self, message: Message) -> None:
        for peer in self._peers:
            if peer.alive:
                peer.link.send(message)

    async def _ask(self, question: Callable[[int], Message]) -> list[tuple[Peer, Any]]:
        """All that are alive at once; None from one that did not answer in time."""
        asked = [peer for peer in self._peers if peer.alive]
        return list(zip(asked, await asyncio.gather(*(self._ask_one(peer, question) for peer in asked)), strict=True))

    async def _ask_one(self, peer: Peer, question: Callable[[int], Message]) -> Any:
        call, answer = next(self._call_numbers), asyncio.get_running_loop().create_future()
        self._calls[call] = peer, answer
        try:
            peer.link.send(question(call))
            async with asyncio.timeout(ANSWER_TIMEOUT):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._calls[call]

    async def _run(self, peer: Peer) -> None:
        await peer.link.run()
        peer.alive = False
        peer.figures = Figures(peer.figures.metrics)
        self._board.set_counts(peer.index, Counts())
        for asked, answer in self._calls.values():
            if asked is peer and not answer.done():
                answer.set_result(None)
        self.on_lost(peer)

    def _on_message(self, peer: Peer, message: Message) -> None:
        match message:
            case Up():
                peer.up = True
                if self.all_up:
                    self.on_up()
            case RequestsChanged():
                self.on_change()
            case Answer(call, value):
                if call in self._calls and not self._calls[call][1].done():
                    self._calls[call][1].set_result(value)
