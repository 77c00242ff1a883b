"""Drives an engine for measurements: batches kept decoding, steps timed from outside, CPU time told from waiting."""

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from engine.engine import Engine
from engine.outputs import TokenOutput
from engine.plan import StepPlan
from engine.sampling_params import SamplingParams


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing, so that no prefix of one is another's."""
    generator = random.Random(f"{seed}-{count}-{length}")
    return [generator.choices(range(3, vocab_size), k=length) for _ in range(count)]


@dataclass(frozen=True)
class Steps:
    """Some consecutive steps; all times in seconds. ``launch`` and ``wait`` are parts of ``wall``."""

    count: int
    tokens: int
    wall: float
    launch: float
    wait: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.wall

    @property
    def cpu_per_step(self) -> float:
        """The engine's own time: everything but waiting for the device. Means nothing where the device is the CPU."""
        return (self.wall - self.wait) / self.count


class TimedRunner:
    """In place of an engine's runner: the same, with the time spent in `launch` and in `wait` added up."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.launch_seconds = self.wait_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> "_TimedHandle":
        start = time.perf_counter()
        handle = self._runner.launch(plan)
        self.launch_seconds += time.perf_counter() - start
        return _TimedHandle(self, handle)


class _TimedHandle:
    def __init__(self, timed: TimedRunner, handle: Any) -> None:
        self._timed, self._handle = timed, handle

    def wait(self) -> Any:
        start = time.perf_counter()
        result = self._handle.wait()
        self._timed.wait_seconds += time.perf_counter() - start
        return result


def facts(engine: Engine) -> dict[str, Any]:
    """What was loaded, for the JSON."""
    info = engine.info
    return {"dtype": info.dtype, "pipeline_depth": info.pipeline_depth, "limits": asdict(info.limits)}


class Driver:
    """One engine. Between measurements it may hold a batch that is decoding."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._timed = TimedRunner(engine._runner)
        engine._runner = self._timed  # type: ignore[assignment]

    def begin(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Admit a batch and return when each of its requests has its first token."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.engine.add(str(number), prompt, params)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {e.request_id for e in self.engine.step().events if isinstance(e, TokenOutput)}

    def steps(self, count: int) -> Steps:
        """Take ``count`` steps of the batch that is decoding."""
        timed = self._timed
        launch, wait, tokens = timed.launch_seconds, timed.wait_seconds, 0
        start = time.perf_counter()
        for _ in range(count):
            tokens += sum(isinstance(event, TokenOutput) for event in self.engine.step().events)
        wall = time.perf_counter() - start
        return Steps(count, tokens, wall, timed.launch_seconds - launch, timed.wait_seconds - wait)

    def end(self) -> None:
        """Cancel what is alive and let the engine come to rest."""
        for request in self.engine.list_requests():
            self.engine.cancel(request.request_id)
        while self.engine.has_work():
            self.engine.step()

    def first_tokens(self, prompts: list[list[int]]) -> list[float]:
        """Seconds from now until each prompt's first token is known, all of them sent at once, sorted."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        start = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self.engine.add(str(number), prompt, params)
        times: list[float] = []
        while self.engine.has_work():
            tokens = sum(isinstance(event, TokenOutput) for event in self.engine.step().events)
            times += [time.perf_counter() - start] * tokens
        return times

    def whole_run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Generated tokens per second of a batch from its arrival to its end, prefill included."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        self.engine.generate(prompts, params)
        return len(prompts) * max_tokens / (time.perf_counter() - start)
