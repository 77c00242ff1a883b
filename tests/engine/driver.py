"""A scheduler and lifecycle with a pretend device: tokens are drawn by the test, results come after a delay."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.block_manager import BlockManager
from engine.lifecycle import Lifecycle, StepResult
from engine.outputs import Event, RequestDone, TokenLogprob
from engine.plan import StepPlan
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

EOS = 0


class Driver:
    """Steps the real scheduler and lifecycle without a model, `depth` plans deep, checking invariants every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 32,
        depth: int = 1,
        token: Callable[[str, int, int], int] | None = None,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget)
        self.life = Lifecycle(self.scheduler, (EOS,))
        self.depth = depth
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self._in_flight: deque[StepPlan] = deque()
        self._token = token or (lambda request_id, output, position: 7)
        self._number = 0

    def add(self, request_id: str, prompt_len: int, max_tokens: int = 8, n: int = 1, **options: Any) -> Request:
        params = options.pop("params", None) or SamplingParams(n=n)
        self._number += 1
        request = Request(request_id, [5] * prompt_len, params, 1, max_tokens, self._number, self.now, **options)
        self.life.add(request)
        return request

    def step(self) -> StepPlan | None:
        self.now += 1
        self.life.expire(self.now)
        plan = self.scheduler.schedule()
        if plan is not None:
            self.life.launched(plan, self.now)
            self._in_flight.append(plan)
            self.plans.append(plan)
        if self._in_flight and (plan is None or len(self._in_flight) >= self.depth):
            oldest = self._in_flight.popleft()
            self.life.commit(oldest, self._result(oldest), self.now)
        self.check()
        self.events.extend(self.life.events)
        self.life.events.clear()
        return plan

    def check(self) -> None:
        self.scheduler.check(list(self.life.live.values()))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing lives."""
        for _ in range(max_steps):
            if not self.life.live and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"still alive after {max_steps} steps: {list(self.life.live)}")

    def _result(self, plan: StepPlan) -> StepResult:
        samples = [sample for row in plan.rows for sample in row.samples]
        return StepResult(
            tokens=[self._token(s.output.request.id, s.output.index, s.position) for s in samples],
            is_nan=[False] * len(samples),
            logprobs=[None] * len(samples),
            prompt_logprobs={
                number: tuple(TokenLogprob(5, None, None) for _ in range(row.prompt_logprobs[1]))
                for number, row in enumerate(plan.rows)
                if row.prompt_logprobs
            },
        )

    def done(self) -> dict[str, RequestDone]:
        """Terminal events by request; asserts that no request has two."""
        found: dict[str, RequestDone] = {}
        for event in self.events:
            if isinstance(event, RequestDone):
                assert event.request_id not in found, f"{event.request_id} ended twice"
                found[event.request_id] = event
        return found


def random_token(seed: int, eos_share: float = 0.05) -> Callable[[str, int, int], int]:
    """Tokens as a pure function of (request, output, position), some of them EOS."""

    def token(request_id: str, output: int, position: int) -> int:
        draw = random.Random(f"{seed}/{request_id}/{output}/{position}")
        return EOS if draw.random() < eos_share else draw.randrange(1, 100)

    return token
