"""What recorded steps say: gaps between kernels, kernels by name, and a text picture of one step. Plain data, no torch.

All times are integers in nanoseconds on one clock. A kernel under programmatic dependent launch starts while those
before it still run and waits for them inside: its duration holds that wait, and durations add up to more than the time
that has passed. `own` time counts what no kernel that started earlier covers; it adds up to the time the device works.
"""

import re
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.gpu_busy import Activity, busy_and_span
from bench.report import spread

WIDTH = 48  # of a bar
LABEL = 36
MOST_PERIOD = 64  # kernels of a layer, at most
MOST_LINES = 24  # for kernels outside of layers, before some are bundled


class Span(NamedTuple):
    """Something the host did for the ``step``-th step: schedule, launch, wait or commit."""

    what: str
    step: int
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """One step on the device; it ends where the next one starts."""

    number: int
    activities: list[Activity]
    end: int

    @property
    def start(self) -> int:
        return self.activities[0].start

    @property
    def worked_until(self) -> int:
        return max(activity.end for activity in self.activities)


def steps_by_copy(activities: list[Activity]) -> list[Step]:
    """Cut behind every copy to the host: a step's last command. What comes after the last one is left out."""
    groups: list[list[Activity]] = [[]]
    for activity in activities:
        groups[-1].append(activity)
        if activity.is_copy_to_host:
            groups.append([])
    return _steps(groups[:-1])


def steps_by_launch(activities: list[Activity], spans: list[Span]) -> list[Step]:
    """Where a launch computes: what ran in each step's launch."""
    launches = [span for span in spans if span.what == "launch"]
    return _steps([[a for a in activities if span.start <= a.start < span.end] for span in launches])


def _steps(groups: list[list[Activity]]) -> list[Step]:
    """The last step has no next one and ends with its own work."""
    filled = [group for group in groups if group]
    ends = [group[0].start for group in filled[1:]] + [max(a.end for a in group) for group in filled[-1:]]
    return [Step(number, group, end) for number, (group, end) in enumerate(zip(filled, ends, strict=True))]


def typical(steps: list[Step]) -> Step:
    """The one of median length, the first and the last left out where there are others."""
    inner = sorted(steps[1:-1] or steps, key=lambda step: step.end - step.start)
    return inner[len(inner) // 2]


# -- tables -----------------------------------------------------------------------------------------------------


def own_times(activities: list[Activity]) -> list[int]:
    """Of each, by start, the time that no earlier one covers."""
    own, reached = [], 0
    for activity in activities:
        own.append(max(0, activity.end - max(activity.start, reached)))
        reached = max(reached, activity.end)
    return own


def idle_ns(activities: list[Activity]) -> int:
    """From the first start to the last end, how long nothing ran."""
    busy, span = busy_and_span((activity.start, activity.end) for activity in activities)
    return span - busy


def kernel_rows(activities: list[Activity], steps: int) -> list[dict[str, Any]]:
    """By name, the largest sum of durations first; microseconds per step."""
    found: dict[str, list[int]] = {}
    for activity, own in zip(activities, own_times(activities), strict=True):
        entry = found.setdefault(activity.name, [0, 0, 0])
        for index, value in enumerate((1, activity.end - activity.start, own)):
            entry[index] += value
    total = sum(entry[1] for entry in found.values())
    return [
        {
            "name": name,
            "per_step": count / steps,
            "us": duration / 1e3 / steps,
            "own_us": own / 1e3 / steps,
            "share": duration / total if total else 0.0,
        }
        for name, (count, duration, own) in sorted(found.items(), key=lambda item: -item[1][1])
    ]


def gap_rows(activities: list[Activity], least: int, steps: int) -> list[dict[str, Any]]:
    """Stretches longer than ``least`` in which nothing runs, by what ends and what starts there; most time first."""
    found: dict[tuple[str, str], list[int]] = {}
    last: Activity | None = None
    for activity in activities:
        if last is not None and activity.start - last.end > least:
            found.setdefault((last.name, activity.name), []).append(activity.start - last.end)
        if last is None or activity.end > last.end:
            last = activity
    return [
        {
            "before": before,
            "after": after,
            "per_step": len(gaps) / steps,
            "us": spread([gap / 1e3 for gap in gaps]),
            "us_per_step": sum(gaps) / 1e3 / steps,
        }
        for (before, after), gaps in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def lane_rows(spans: list[Span]) -> dict[str, float]:
    """Median microseconds of each thing the host does."""
    durations: dict[str, list[int]] = {}
    for span in spans:
        durations.setdefault(span.what, []).append(span.end - span.start)
    return {what: statistics.median(some) / 1e3 for what, some in durations.items()}


# -- the picture ------------------------------------------------------------------------------------------------


class Layers(NamedTuple):
    """Activities ``first`` .. ``first + period * repeats`` are ``repeats`` times the same ``period`` names."""

    first: int
    period: int
    repeats: int


def find_layers(names: list[str]) -> Layers | None:
    """The repetition that covers most, in its shortest form; None where none of two or more names covers half."""
    best: Layers | None = None
    for period in range(2, min(MOST_PERIOD, len(names) // 2) + 1):
        same = [names[i] == names[i + period] for i in range(len(names) - period)]
        first = 0
        while first < len(same):
            run = first
            while run < len(same) and same[run]:
                run += 1
            repeats = (run - first) // period + 1
            covered = repeats * period if repeats > 1 else 0
            if covered > (best.period * best.repeats if best else 0):
                best = Layers(first, period, repeats)
            first = run + 1
    return best if best and 2 * best.period * best.repeats >= len(names) else None


class _Row(NamedTuple):
    label: str
    start: int
    end: int
    note: str
    pieces: list[tuple[int, int, str]]


def picture(step: Step, spans: list[Span]) -> str:
    """The step on one scale with its layers folded, what the host does meanwhile, and the first layer on its own."""
    layers = find_layers([activity.name for activity in step.activities])
    parts = [_draw("one step", step.start, step.end, [*_folded(step, layers), *_lanes(step, spans)])]
    if layers is not None:
        first = step.activities[layers.first : layers.first + layers.period + 1]
        end = max(activity.end for activity in first[:-1])
        before = max((a.end for a in step.activities[: layers.first]), default=0)
        parts.append(_draw("its first layer, and what follows", first[0].start, end, _each(first, before)))
    return "\n\n".join(parts)


def _folded(step: Step, layers: Layers | None) -> list[_Row]:
    activities = step.activities
    if layers is None:
        rows = _bundled(activities)
    else:
        second, after = layers.first + layers.period, layers.first + layers.period * layers.repeats
        rows = _bundled(activities[: layers.first])
        rows.append(_group("layer 1", activities[layers.first : second]))
        others = f"layers 2 to {layers.repeats}" if layers.repeats > 2 else "layer 2"
        rows.append(_group(others, activities[second:after]))
        rows += _bundled(activities[after:], max(activity.end for activity in activities[:after]))
    if step.end > step.worked_until:
        gap = step.worked_until, step.end
        rows.append(_Row("nothing, until the next step starts", *gap, "", [(*gap, ".")]))
    return rows


def _bundled(activities: list[Activity], reached: int = 0) -> list[_Row]:
    """A line each; of very many the middle ones in one line."""
    rows = _each(activities, reached)
    if len(rows) <= MOST_LINES:
        return rows
    half = MOST_LINES // 2
    return [*rows[:half], _group("in between", activities[half:-half]), *rows[-half:]]


def _each(activities: list[Activity], reached: int = 0) -> list[_Row]:
    rows = []
    for activity, own in zip(activities, _own_after(activities, reached), strict=True):
        earlier = activity.end - activity.start - own
        alone = activity.start + earlier
        mark = "=" if activity.is_copy else "#"
        pieces = [(activity.start, alone, "+"), (alone, activity.end, mark)]
        rows.append(
            _Row(
                short(activity.name), activity.start, activity.end, f"{earlier / 1e3:.1f}" if earlier else "",
                [piece for piece in pieces if piece[1] > piece[0]],
            )
        )  # fmt: skip
    return rows


def _own_after(activities: list[Activity], reached: int) -> list[int]:
    return own_times([Activity("", reached, reached), *activities])[1:]


def _group(what: str, activities: list[Activity]) -> _Row:
    start, end = activities[0].start, max(activity.end for activity in activities)
    idle = idle_ns(activities)
    return _Row(f"{what}: {len(activities)}, idle {idle / 1e3:.1f} us", start, end, "", [(start, end, "#")])


def _lanes(step: Step, spans: list[Span]) -> list[_Row]:
    """What the host did for this step, and whatever it did while the device was at it."""
    which = {-1: "the step before", 0: "this step", 1: "the next step"}
    rows = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.step == step.number or (span.end > step.start and span.start < step.end):
            whose = which.get(span.step - step.number, f"step {span.step - step.number:+}")
            rows.append(
                _Row(f"CPU: {span.what}, {whose}", span.start, span.end, "", [(span.start, span.end, "*")])
            )
    return rows


def _draw(title: str, start: int, end: int, rows: list[_Row]) -> str:
    scale = max(end - start, 1) / WIDTH
    lines = [f"{title}: {(end - start) / 1e3:.1f} us, {scale / 1e3:.2f} us a mark"]
    lines.append(f"{'':{LABEL}} {'start':>8} {'us':>8} {'overlap':>8}")
    for row in rows:
        cells = [" "] * WIDTH
        for begin, finish, mark in row.pieces:
            if begin >= end:
                continue
            first = min(round((begin - start) / scale), WIDTH - 1)
            last = max(round((finish - start) / scale), first + 1)
            for cell in range(max(first, 0), min(last, WIDTH)):
                cells[cell] = mark
        figures = f"{(row.start - start) / 1e3:8.1f} {(row.end - row.start) / 1e3:8.1f} {row.note:>8}"
        lines.append(f"{row.label[:LABEL]:{LABEL}} {figures} |{''.join(cells)}|")
    return "\n".join(lines)


def short(name: str) -> str:
    """A kernel's name without types and namespaces."""
    if name.startswith("Mem"):
        return name
    bare = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    return bare.split("::")[-1] or name
