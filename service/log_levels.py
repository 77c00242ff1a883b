"""LogLevels: levels set for a while. One owner of the timers that put the earlier level back."""

import asyncio
import logging
from collections.abc import Callable


class LogLevels:
    """``on_set(logger, level)`` is told every change, so that other processes follow."""

    def __init__(self, on_set: Callable[[str, int], None]) -> None:
        self._on_set = on_set
        self._timers: dict[str, tuple[asyncio.TimerHandle, int]] = {}

    def set(self, name: str, level: int, ttl: float | None) -> int:
        """Sets a level, for ``ttl`` seconds or until set again; returns the level that was in force."""
        logger = logging.getLogger(name or None)
        effective, back = logger.getEffectiveLevel(), logger.level
        if (pending := self._timers.pop(name, None)) is not None:
            timer, back = pending
            timer.cancel()
        self._apply(name, level)
        if ttl is not None:
            timer = asyncio.get_running_loop().call_later(ttl, self._restore, name, back)
            self._timers[name] = (timer, back)
        return effective

    def _restore(self, name: str, level: int) -> None:
        del self._timers[name]
        self._apply(name, level)

    def _apply(self, name: str, level: int) -> None:
        logging.getLogger(name or None).setLevel(level)
        self._on_set(name, level)
