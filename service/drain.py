"""Drainer: takes the instance out of service, step by step, and puts it back or ends it.

Lame duck: not ready but still accepting. Draining: refusing, accepted requests finish. Then the rest is cut.
Driven by the count of live requests, not by the server's own grace period: one open health Watch would make that
last its full time, and stopping closes the listening socket at once.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from service.errors import Reason, ServiceError
from service.instance import DrainProgress, Instance, State
from service.registry import Registry

log = logging.getLogger(__name__)
CUT_GRACE = 2.0  # s for handlers to tell their clients that they were cut


class Drainer:
    """``cut`` fails every live request of the instance and returns how many. ``on_drained`` is called once, when a
    shutdown has drained everything."""

    def __init__(
        self, instance: Instance, registry: Registry, lame_duck: float, timeout: float,
        cut: Callable[[ServiceError], Awaitable[int]], on_drained: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._registry = registry
        self._lame_duck = lame_duck
        self._timeout = timeout
        self._cut = cut
        self._on_drained = on_drained
        self._task: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._hurry = asyncio.Event()

    def requests_changed(self) -> None:
        """The number of live requests has changed, on whatever front."""
        self._left.set()
        if self._instance.drain is not None:
            self._instance.touch()

    def drain(self, lame_duck: float | None = None, timeout: float | None = None, reason: str = "") -> None:
        """Raises `ServiceError` when it is draining, starting or ending."""
        self._refuse_when_shutting_down()
        if self._instance.draining:
            raise ServiceError(Reason.ALREADY_DRAINING, "the instance is draining already")
        self._instance.refuse_unless_accepting()
        self._begin(self._lame_duck if lame_duck is None else lame_duck, timeout, reason, shutdown=False)

    def undrain(self) -> None:
        """Raises `ServiceError` when it is not draining or is shutting down."""
        self._refuse_when_shutting_down()
        if not self._instance.draining:
            raise ServiceError(Reason.NOT_DRAINING, "the instance is not draining")
        self._stop_task()
        self._instance.drain = None
        self._instance.serve()

    def shutdown(self, timeout: float | None = None, *, immediate: bool = False, reason: str = "shutdown") -> None:
        """Drains, then ends. With ``immediate`` also a running one is cut short; else that is a `ServiceError`."""
        if self._shutting_down and immediate:
            self._hurry.set()
            return
        self._refuse_when_shutting_down()
        starting = self._instance.state is State.STARTING
        lame_duck = 0.0 if immediate or starting or self._instance.draining else self._lame_duck
        self._stop_task()
        if immediate:
            self._hurry.set()
        self._begin(lame_duck, timeout, reason, shutdown=True)

    def terminate(self) -> None:
        """SIGTERM: a shutdown, unless one is on its way."""
        if not self._shutting_down and not self._instance.ended:
            self.shutdown(reason="terminated by a signal")

    @property
    def _shutting_down(self) -> bool:
        return self._instance.drain is not None and self._instance.drain.shutdown

    def _refuse_when_shutting_down(self) -> None:
        if self._shutting_down or self._instance.ended:
            raise ServiceError(Reason.SHUTTING_DOWN, "the instance is shutting down")

    def _begin(self, lame_duck: float, timeout: float | None, reason: str, *, shutdown: bool) -> None:
        timeout = self._timeout if timeout is None else timeout
        now = time.time()
        self._instance.drain = DrainProgress(now, now + lame_duck + timeout, self._registry.live_in_instance, shutdown)
        self._instance.move(State.LAME_DUCK if lame_duck > 0 else State.DRAINING, reason)
        log.info("%s: lame duck %.1f s, then at most %.1f s to drain", reason or "drain", lame_duck, timeout)
        self._task = asyncio.get_running_loop().create_task(self._run(lame_duck, timeout, reason))

    def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, lame_duck: float, timeout: float, reason: str) -> None:
        progress = self._instance.drain
        assert progress is not None
        await self._hurried_within(lame_duck)
        self._instance.move(State.DRAINING, reason)
        await self._empty_within(timeout)
        if self._registry.live_in_instance:
            error = ServiceError(Reason.DRAIN_TIMEOUT, "the server drained and the time for accepted requests is over")
            progress.requests_cut = await self._cut(error)
            log.warning("cut %d requests at the end of the drain", progress.requests_cut)
            self._hurry.clear()
            await self._empty_within(CUT_GRACE)
        if progress.shutdown:
            self._instance.move(State.STOPPED, reason)
            self._on_drained()

    async def _hurried_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _empty_within(self, seconds: float) -> None:
        """Waits until no request is live, somebody is in a hurry, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while self._registry.live_in_instance and not self._hurry.is_set():
                    self._left.clear()
                    waits = [asyncio.ensure_future(event.wait()) for event in (self._left, self._hurry)]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
        except TimeoutError:
            pass
