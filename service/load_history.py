"""LoadHistory: token rates from the load reports that the engine sends about once a second."""

import time
from collections import deque
from dataclasses import dataclass

from engine.outputs import EngineLoad

WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second over ``seconds``; all zero without two reports."""

    prompt: float = 0.0
    generated: float = 0.0
    seconds: float = 0.0


class LoadHistory:
    """Keeps the reports of the last `WINDOW_SECONDS` and one older."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, EngineLoad]] = deque()

    def add(self, load: EngineLoad) -> None:
        self._reports.append((time.monotonic(), load))
        while len(self._reports) > 2 and self._reports[1][0] < time.monotonic() - WINDOW_SECONDS:
            self._reports.popleft()

    def rates(self, load: EngineLoad) -> Rates:
        """From the oldest report kept until ``load``, which is of now."""
        if not self._reports:
            return Rates()
        begin, first = self._reports[0]
        seconds = time.monotonic() - begin
        if seconds <= 0:
            return Rates()
        return Rates(
            (load.prompt_tokens_computed - first.prompt_tokens_computed) / seconds,
            (load.tokens_generated - first.tokens_generated) / seconds,
            seconds,
        )
