"""The engine's own time per step: planning, committing and telling, with a device that answers at once.

    python -m bench.engine_cpu --json bench/results/engine_cpu.json
    python -m bench.engine_cpu --batches 1 8 --contexts 16 --steps 20 --rounds 2

A batch of greedy outputs decodes; the runner is a pretence that returns the same token for every sample. What building
tensors and launching kernels costs comes on top. Medians over steps in microseconds: `schedule` plans, `launched` and
`commit` keep the requests' books, `rest` is what else `Engine.step` does, and `read` is a caller that looks at
every event. A figure that grows with the context is a defect. Contexts differ by up to a block, so that about as many
outputs need a block in every step.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.driver import facts, random_prompts
from bench.options import engine_config, finish, model_directory, parser
from bench.report import spread, table
from engine.engine import Engine
from engine.lifecycle import StepResult
from engine.outputs import TokenOutput
from engine.plan import StepPlan
from engine.sampling_params import SamplingParams

WARM_UP = 20
PARTS = ("schedule", "launched", "commit")
COLUMNS = ("step", *PARTS, "rest", "read")
BLOCK_SIZE = 16


class InstantRunner:
    """In place of an engine's runner: every sample gets ``token_id`` and nothing is computed."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def launch(self, plan: StepPlan) -> "_InstantHandle":
        return _InstantHandle(len(plan.decode) + sum(len(row.samples) for row in plan.chunks), self._token_id)


class _InstantHandle:
    def __init__(self, count: int, token_id: int) -> None:
        self._result = StepResult([token_id] * count, [False] * count, [None] * count)

    def wait(self) -> StepResult:
        return self._result


class Clock:
    """Adds up, in nanoseconds, what calls of some methods of an object cost."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}

    def watch(self, owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)
        self.spent[name] = 0

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter_ns()
            result = method(*arguments)
            self.spent[name] += time.perf_counter_ns() - start
            return result

        setattr(owner, name, timed)


class SteppedEngine:
    """An engine over an `InstantRunner`, taken apart by a clock."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._clock = engine, Clock()
        engine._runner = InstantRunner(5)  # type: ignore[assignment]
        self._clock.watch(engine._scheduler, "schedule")
        self._clock.watch(engine._lifecycle, "launched")
        self._clock.watch(engine._lifecycle, "commit")

    def begin(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Admit a batch and step until all of it decodes."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.engine.add(str(number), prompt, params)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {event.request_id for event in self.engine.step().events if isinstance(event, TokenOutput)}

    def steps(self, count: int) -> dict[str, float]:
        """Medians over ``count`` steps, in microseconds."""
        taken = [self._step() for _ in range(count)]
        return {column: statistics.median(one[column] for one in taken) / 1e3 for column in COLUMNS}

    def _step(self) -> dict[str, int]:
        before = dict(self._clock.spent)
        start = time.perf_counter_ns()
        events = self.engine.step().events
        stepped = time.perf_counter_ns()
        told = [(event.request_id, event.token_id) for event in events if isinstance(event, TokenOutput)]
        read = time.perf_counter_ns() - stepped
        assert len(told) == len(events), "the batch is not in steady decode"
        parts = {name: spent - before[name] for name, spent in self._clock.spent.items()}
        step = stepped - start
        return {"step": step, **parts, "rest": step - sum(parts.values()), "read": read}

    def end(self) -> None:
        for request in self.engine.list_requests():
            self.engine.cancel(request.request_id)
        while self.engine.has_work():
            self.engine.step()


def measure_case(stepped: SteppedEngine, batch: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: the medians of the rounds, and their spread."""
    prefill_steps = -(-batch * (context + BLOCK_SIZE) // args.max_num_batched_tokens)
    new_tokens = 2 * WARM_UP + prefill_steps + args.rounds * args.steps + 2
    vocab_size = stepped.engine.info.limits.vocab_size
    prompts = random_prompts(batch, context + BLOCK_SIZE, vocab_size, args.seed)
    stepped.begin([prompt[number % BLOCK_SIZE :] for number, prompt in enumerate(prompts)], new_tokens)
    stepped.steps(WARM_UP)
    rounds = [stepped.steps(args.steps) for _ in range(args.rounds)]
    stepped.end()
    stepped.engine.check()
    columns = {column: spread([one[column] for one in rounds]) for column in COLUMNS}
    return {"batch": batch, "context": context, "microseconds": columns}


def row(case: dict[str, Any]) -> list[str]:
    times = case["microseconds"]
    per_output = times["step"]["median"] / case["batch"]
    return [
        f"{case['batch']} x {case['context']}",
        *(f"{times[column]['median']:.1f}" for column in COLUMNS),
        f"{times['step']['min']:.0f}-{times['step']['max']:.0f}",
        f"{per_output:.2f}",
    ]


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=5)
    made.set_defaults(device="cpu", shape="nano")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    made.add_argument("--contexts", type=int, nargs="+", default=[128, 4096])
    made.add_argument("--steps", type=int, default=100, help="of a round")
    made.add_argument("--max-num-batched-tokens", type=int, default=16_384, metavar="N", help="tokens of one step")
    made.add_argument("--pipeline-depth", type=int, choices=(1, 2), default=2)
    args = made.parse_args()
    args.engine = []
    longest = max(args.contexts) + BLOCK_SIZE + args.rounds * args.steps + 4 * WARM_UP
    longest += -(-max(args.batches) * (max(args.contexts) + BLOCK_SIZE) // args.max_num_batched_tokens)
    args.num_gpu_blocks = 2 * max(args.batches) * -(-longest // BLOCK_SIZE)
    return args


def main() -> None:
    args = arguments()
    with model_directory(args) as directory:
        engine = Engine(engine_config(args, directory, max_num_seqs=max(args.batches), block_size=BLOCK_SIZE))
    stepped = SteppedEngine(engine)
    gc.collect()
    gc.freeze()  # what loading left behind is not this benchmark's to collect
    cases = [measure_case(stepped, batch, context, args) for context in args.contexts for batch in args.batches]
    gc.unfreeze()
    print("microseconds per step")
    print(table(["batch x context", *COLUMNS, "min-max", "step/output"], [row(case) for case in cases]))
    finish(args, "engine_cpu", {"engine": facts(engine), "cases": cases})


if __name__ == "__main__":
    main()
