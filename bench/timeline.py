"""A timeline of the engine's steps: what the GPU runs and waits for, and what the host does meanwhile.

    python -m bench.timeline --markdown timeline.md --json bench/results/timeline.json
    python -m bench.timeline --device cpu --shape nano --batches 1 2 --context 16 --steps 5

A batch decodes greedily; after a warm-up the steps are timed, and as many more run under torch.profiler. `idle` is 1 -
union of the kernels' intervals / time from the first to the last of them. A kernel under programmatic dependent launch
starts while those before it still run, and waits for them inside: its `us` hold that wait, and the sum over the kernels
is more than the time that has passed; `own us` is what no earlier kernel covers. The profiler makes steps longer, by
about what the two step times differ. On a CPU the operations of torch stand for the kernels, and launch is the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.driver import Driver, facts, random_prompts
from bench.gpu_busy import Activity, Recording, idle_share, record
from bench.options import engine_config, engine_options, finish, model_directory, parser
from bench.report import markdown_table, spread
from bench.step_trace import (
    Span,
    Step,
    gap_rows,
    kernel_rows,
    lane_rows,
    picture,
    short,
    steps_by_copy,
    steps_by_launch,
    typical,
)
from engine.engine import Engine

WARM_UP = 20
MOST_ROWS = 24  # of a table
LEGEND = """\
`#` runs, `+` runs while an earlier one still does (under dependent launch it mostly waits), `=` copies, `.` nothing
runs, `*` the host. Under dependent launch `us` holds a kernel's wait for those before it, so kernels add up to more
than the step; `own us` is what no earlier kernel covers, `overlap` what one does."""


class Lanes:
    """Stamps what the engine's thread does, in the profiler's clock, with the number of the step that it is for."""

    def __init__(self, engine: Engine) -> None:
        self.spans: list[Span] = []
        self._engine, self._counts = engine, dict[str, int]()
        launch = engine._runner.launch
        self._watch(engine._scheduler, "schedule")
        self._watch(engine._lifecycle, "commit")
        self._watch(engine._runner, "launch", lambda plan: _Handle(self, launch(plan)))

    def begin(self) -> None:
        """The step that is launched next has the number 0."""
        self.spans.clear()
        in_flight = len(self._engine._in_flight)
        self._counts = {"schedule": 0, "launch": 0, "wait": -in_flight, "commit": -in_flight}

    def stamp(self, what: str, start: int) -> None:
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        self.spans.append(Span(what, number, start, time.time_ns()))

    def _watch(self, owner: Any, what: str, call: Callable[..., Any] | None = None) -> None:
        original = call or getattr(owner, what)

        def stamped(*arguments: Any) -> Any:
            start = time.time_ns()
            result = original(*arguments)
            self.stamp(what, start)
            return result

        setattr(owner, what, stamped)


class _Handle:
    def __init__(self, lanes: Lanes, handle: Any) -> None:
        self._lanes, self._handle = lanes, handle

    def wait(self) -> Any:
        start = time.time_ns()
        result = self._handle.wait()
        self._lanes.stamp("wait", start)
        return result


def measure_case(driver: Driver, lanes: Lanes, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One batch: its steps timed, then recorded."""
    engine = driver.engine
    late = -(-batch * args.context // args.max_num_batched_tokens)
    prompts = random_prompts(batch, args.context, engine.info.limits.vocab_size, args.seed)
    driver.begin(prompts, late + 2 * WARM_UP + 2 * args.steps)
    driver.steps(WARM_UP)
    timed = driver.steps(args.steps)
    lanes.begin()
    recording = record(lambda: driver.steps(args.steps), args.device)
    driver.end()
    case: dict[str, Any] = {"batch": batch, "context": args.context, "step_us": 1e6 * timed.wall / timed.count}
    return case | analyse(recording, lanes.spans, args.device, round(1e3 * args.gap_us))


def analyse(recording: Recording, spans: list[Span], device: str, least_gap: int) -> dict[str, Any]:
    """Everything the report says of recorded steps."""
    activities = recording.activities
    steps = steps_by_copy(activities) if device == "cuda" else steps_by_launch(activities, spans)
    kernels = [activity for activity in activities if not activity.is_copy]
    streams = sorted({kernel.stream for kernel in kernels})
    if not steps:
        raise SystemExit("the profiler recorded no step")
    step = typical(steps)
    return {
        "steps": len(steps),
        "profiled_step_us": spread([(step.end - step.start) / 1e3 for step in steps[:-1] or steps]),
        "between_steps_us": spread([(step.end - step.worked_until) / 1e3 for step in steps[:-1] or steps]),
        "kernels_per_step": len(kernels) / len(steps),
        "idle_share": idle_share(kernels),
        "idle_share_with_copies": idle_share(activities),
        "idle_share_of_streams": {s: idle_share(k for k in kernels if k.stream == s) for s in streams},
        "launches_in_lane": launches_in_lane(recording.launches, spans),
        "host_us": lane_rows(spans),
        "kernels": kernel_rows(activities, len(steps)),
        "gaps": gap_rows(activities, least_gap, len(steps)),
        "typical_step": content_of(step, spans),
        "picture": picture(step, spans),
    }


def launches_in_lane(launches: list[Activity], spans: list[Span]) -> float | None:
    """The share of the driver's launches that lie in a launch of ours: 1 where both clocks are one."""
    lane = [span for span in spans if span.what == "launch"]
    inside = [any(span.start <= call.start <= span.end for span in lane) for call in launches]
    return statistics.fmean(inside) if inside else None


def content_of(step: Step, spans: list[Span]) -> dict[str, Any]:
    """For the JSON: microseconds from the step's start, and durations."""
    activities, start = step.activities, step.start
    done = [span for span in spans if span.step == step.number]
    return {
        "activities": [[a.name, (a.start - start) / 1e3, (a.end - a.start) / 1e3, a.stream] for a in activities],
        "host": [[span.what, (span.start - start) / 1e3, (span.end - span.start) / 1e3] for span in done],
    }


# -- the report -------------------------------------------------------------------------------------------------


def markdown(cases: list[dict[str, Any]]) -> str:
    parts = []
    for case in cases:
        parts += [f"### Batch {case['batch']}, context {case['context']:,}", facts_of(case)]
        parts += [kernel_table(case["kernels"]), gap_table(case["gaps"]), f"```\n{case['picture']}\n```"]
    return "\n\n".join([*parts, LEGEND]) + "\n"


def facts_of(case: dict[str, Any]) -> str:
    def percent(share: float | None) -> str:
        return "nothing recorded" if share is None else f"{100 * share:.2f} %"

    def times(values: dict[str, float]) -> str:
        return f"{values['median']:.1f} us ({values['min']:.1f} to {values['max']:.1f})"

    streams = ", ".join(f"stream {s}: {percent(share)}" for s, share in case["idle_share_of_streams"].items())
    host = ", ".join(f"{what} {us:.1f}" for what, us in case["host_us"].items())
    lines = [
        f"- a step: {case['step_us']:.1f} us; under the profiler {times(case['profiled_step_us'])} "
        f"in {case['steps']} steps, {case['kernels_per_step']:.1f} kernels",
        f"- idle: {percent(case['idle_share'])} without a kernel ({streams}), "
        f"{percent(case['idle_share_with_copies'])} without a kernel or a copy",
        f"- from the end of a step's last command to the next step's first: {times(case['between_steps_us'])}",
        f"- the host, median us of a step: {host}",
    ]
    if case["launches_in_lane"] is not None:
        inside = percent(case["launches_in_lane"])
        lines.append(f"- {inside} of the driver's launches lie in `launch`: with less the clocks of both disagree")
    return "\n".join(lines)


def kernel_table(rows: list[dict[str, Any]]) -> str:
    shown = [
        [f"`{short(row['name'])}`", f"{row['per_step']:.1f}", f"{row['us']:.1f}", f"{100 * row['share']:.1f} %",
         f"{row['own_us']:.1f}"]
        for row in rows[:MOST_ROWS]
    ]  # fmt: skip
    total = sum(row["per_step"] for row in rows), sum(row["us"] for row in rows), sum(row["own_us"] for row in rows)
    shown.append([f"all {len(rows)}", f"{total[0]:.1f}", f"{total[1]:.1f}", "", f"{total[2]:.1f}"])
    return markdown_table(["kernel", "per step", "us per step", "share", "own us per step"], shown)


def gap_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "No gap is that long."
    shown = [
        [f"`{short(row['before'])}`", f"`{short(row['after'])}`", f"{row['per_step']:.2f}",
         f"{row['us']['median']:.1f}", f"{row['us']['max']:.1f}", f"{row['us_per_step']:.2f}"]
        for row in rows[:MOST_ROWS]
    ]  # fmt: skip
    return markdown_table(["gap after", "before", "per step", "median us", "max us", "us per step"], shown)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=1)
    engine_options(made)
    made.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    made.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    made.add_argument("--steps", type=int, default=200, metavar="N", help="that are recorded")
    made.add_argument("--gap-us", type=float, default=2.0, metavar="US", help="gaps that are longer are listed")
    made.add_argument("--markdown", metavar="PATH", help="write the report here as well")
    return made.parse_args()


def main() -> None:
    args = arguments()
    with model_directory(args) as directory:
        driver = Driver(Engine(engine_config(args, directory, max_num_seqs=max(args.batches))))
        lanes = Lanes(driver.engine)
        cases = [measure_case(driver, lanes, batch, args) for batch in args.batches]
    text = markdown(cases)
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(text, encoding="utf-8")
    finish(args, "timeline", {"engine": facts(driver.engine), "cases": cases})


if __name__ == "__main__":
    main()
