"""Runtime: what the servicers of one front share. Built once by the front."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from service.engine_client import EngineClient
from service.errors import Reason, ServiceError
from service.instance import Instance
from service.live_request import LiveRequest
from service.load_history import LoadHistory
from service.metrics import Metrics
from service.options import ServeOptions
from service.output_budget import OutputBudget
from service.registry import Registry
from service.served_model import ServedModel
from service.stop_gate import StopGate
from service.tokenizer import Tokenizer

STALL_SECONDS = 30.0
_SLOW_THREADS = 4
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Runtime:
    options: ServeOptions
    tokenizer: Tokenizer
    engine: EngineClient
    instance: Instance
    registry: Registry
    metrics: Metrics = field(default_factory=Metrics)
    budget: OutputBudget = field(default_factory=OutputBudget)
    history: LoadHistory = field(default_factory=LoadHistory)
    gate: StopGate = field(default_factory=StopGate)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_SLOW_THREADS, thread_name_prefix="prepare")
    )

    idle_time: float = field(default_factory=time.monotonic)  # when the instance was last seen without requests
    wall_offset: float = field(default_factory=lambda: time.time() - time.monotonic())

    def wall_time(self, monotonic: float) -> float:
        """Seconds since the epoch of a monotonic time; the same for the same time, whenever it is asked."""
        return monotonic + self.wall_offset

    @property
    def model(self) -> ServedModel:
        """Raises `ServiceError` while it is not loaded."""
        if self.engine.model is None:
            self.instance.refuse_unless_accepting()
            raise ServiceError(Reason.STARTING, "the model is being loaded")
        return self.engine.model

    def new_request(self, request_id: str, arrival: float, *, takeover: bool = False) -> LiveRequest:
        return LiveRequest(
            request_id, arrival, self.engine, self.tokenizer.table, self.budget,
            takeover=takeover, on_started=self.registry.left_queue,
        )

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs what would hold up the event loop: health must answer meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: function(*args, **kwargs))

    def check_progress(self, busy: bool) -> None:
        """Marks the instance degraded while it is ``busy`` but the engine is silent. Called about once a second."""
        now = time.monotonic()
        if not busy:
            self.idle_time = now  # an idle engine is silent
        silent = now - max(self.engine.last_seen, self.idle_time)
        stalled = silent > STALL_SECONDS
        text = f"no engine step for {silent:.0f} s although requests are live" if stalled else ""
        self.instance.note_health(stalled=text)
