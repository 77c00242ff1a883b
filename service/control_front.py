"""The first front: besides inference it has the administration, and it moves the state of the instance."""

import asyncio
import logging
import time
from multiprocessing.connection import Connection

from service.admin_messages import Workers
from service.drain import Drainer
from service.errors import ServiceError
from service.front_base import STOP_GRACE, Front
from service.front_ready import FrontDraining, FrontProcessOptions, FrontReady, FrontWiring
from service.instance import State
from service.listening import PortClaim, bind
from service.peers import Peer, Peers
from service.process import ExitCode
from service.served_model import ServedModel
from service.servers import admin_server

log = logging.getLogger(__name__)
_CHECK_INTERVAL = 1.0
_PEERS_END = 2.0  # s beyond the grace that servers get


class ControlFront(Front):
    """Ready when the engine and all further fronts are. Without it the instance ends."""

    def __init__(self, options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> None:
        super().__init__(options, wiring, supervisor)
        self._peers = Peers(wiring.links, options.further_pids, wiring.board)
        self._drainer = Drainer(
            self._instance, self._registry, self._options.lame_duck, self._options.drain_timeout,
            self._cut, lambda: self._finish(ExitCode.OK),
        )
        self._registry.on_change = self._peers.on_change = self._drainer.requests_changed
        self._instance.on_move = lambda: self._peers.instance_changed(self._instance.reason)
        self._peers.on_up = self._begin_when_complete
        self._peers.on_lost = self._peer_lost
        self._engine.on_ready = lambda model: self._begin_when_complete()
        self._engine.on_load = self._runtime.history.add
        self._engine.on_lost = self._engine_lost
        self._admin = admin_server(self._runtime, self._drainer, self._peers, Workers(options.engine_pid))
        self._claim: PortClaim | None = None
        self._peers_ended = asyncio.Event()

    async def start(self) -> None:
        """Listens, answering STARTING until the engine is ready. Raises `ConfigError` when it cannot listen."""
        listen = self._options.listen
        if self._options.front_processes > 1:
            self._claim = PortClaim("--listen", listen)
            listen = self._claim.address
        self._inference_address = bind(self._inference, "--listen", listen)
        self._admin_address = bind(self._admin, "--admin-listen", self._options.admin_listen)
        await self._inference.start()
        await self._admin.start()
        log.info("listening on %s and %s for administration", self._inference_address, self._admin_address)
        self._peers.listen(self._inference_address)
        asyncio.get_running_loop().add_reader(self._supervisor.fileno(), self._on_supervisor)
        self._spawn(self._engine.run())
        self._spawn(self._run_peers())
        self._spawn(self._watch_progress())

    async def _stop(self, code: ExitCode) -> None:
        """Ends after the further fronts: the engine stops as soon as this process is gone."""
        asyncio.get_running_loop().remove_reader(self._supervisor.fileno())
        self._peers.end(code)
        await self._runtime.gate.stop(lambda: self._inference.stop(STOP_GRACE), lambda: self._admin.stop(STOP_GRACE))
        try:
            async with asyncio.timeout(_PEERS_END):
                await self._peers_ended.wait()
        except TimeoutError:
            log.error("a further front does not end")
        if self._claim is not None:
            self._claim.close()

    async def _run_peers(self) -> None:
        await self._peers.run()
        self._peers_ended.set()

    def _begin_when_complete(self) -> None:
        model: ServedModel | None = self._engine.model
        if model is not None and self._peers.all_up and self._instance.state is State.STARTING:
            self._instance.serve()
            self._supervisor.send(FrontReady(self._inference_address, self._admin_address, model))

    def _engine_lost(self) -> None:
        self._instance.move(State.FAILED, "the engine process ended")
        self._finish(ExitCode.FAILED)

    def _peer_lost(self, peer: Peer) -> None:
        """Its streams are gone with it; the instance goes on without it, unless it was only starting."""
        if self._end.done():
            return
        self._drainer.requests_changed()
        if self._instance.state is State.STARTING:
            self._instance.move(State.FAILED, f"{peer.name} ended while the instance was starting")
            self._finish(ExitCode.FAILED)
            return
        log.error("%s ended, and its calls with it; the other fronts go on", peer.name)
        gone = ", ".join(other.name for other in self._peers if not other.alive)
        self._instance.note_health(incomplete=f"without {gone}, which ended")

    async def _cut(self, error: ServiceError) -> int:
        """Fails every live request of the instance; returns how many."""
        return self._registry.fail_all(error) + len(await self._peers.fail(None, error))

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
            elsewhere = self._registry.live_in_instance > len(self._registry)
            self._runtime.check_progress(self._engine.busy or elsewhere)
