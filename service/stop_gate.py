"""StopGate: the last calls of a server get an answer.

gRPC drops calls that reach a server after it began to stop, with CANCELLED and no details, and only then tells clients
to go elsewhere. So new calls are kept waiting before it stops: whoever waits sends no more. Then they are answered.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)
_QUIET = 0.05  # s without a new call: what was on its way has come
_MAX_HOLD = 0.5  # s; those who send on without waiting for answers would never be quiet


class StopGate:
    """One per process, for all of its servers. Every call passes it first."""

    def __init__(self) -> None:
        self._holding = False
        self._came = asyncio.Event()
        self._opened = asyncio.Event()

    async def passing(self) -> None:
        """Returns at once, or when the servers have begun to stop."""
        if self._holding:
            self._came.set()
            await self._opened.wait()

    async def stop(self, *stops: Callable[[], Awaitable[None]]) -> None:
        """Keeps new calls waiting, then runs ``stops`` and lets those go on to their answers."""
        self._holding = True
        try:
            async with asyncio.timeout(_MAX_HOLD):
                while await self._another():
                    pass
        except TimeoutError:
            log.info("calls keep coming in; stopping all the same")
        running = [asyncio.ensure_future(stop()) for stop in stops]
        await asyncio.sleep(0)  # each has begun
        self._opened.set()
        await asyncio.gather(*running)

    async def _another(self) -> bool:
        """Whether one more call came in time."""
        self._came.clear()
        try:
            async with asyncio.timeout(_QUIET):
                await self._came.wait()
        except TimeoutError:
            return False
        return True
