"""The timeline of steps: what it says of recorded kernels, and a run on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from bench import timeline
from bench.gpu_busy import Activity, Recording, outermost
from bench.step_trace import (
    Layers,
    Span,
    find_layers,
    gap_rows,
    kernel_rows,
    own_times,
    picture,
    short,
    steps_by_copy,
    steps_by_launch,
    typical,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER = ("qkv", "attend", "add", "mlp")
COPY = "Memcpy DtoH (Device -> Pinned)"


def a_step(start: int, layers: int = 3) -> list[Activity]:
    """`begin` of 2 us, layers whose kernels of 5 us start 1 us before the one before ends, `head`, 3 us, a copy."""
    activities, now = [Activity("begin", start, start + 2000, 7)], start + 2000
    for name in LAYER * layers:
        activities.append(Activity(name, now, now + 5000, 7))
        now += 4000
    now += 1000
    return [*activities, Activity("head", now, now + 10_000, 7), Activity(COPY, now + 13_000, now + 14_000, 7)]


def three_steps(pause: int) -> list[Activity]:
    first = a_step(0)
    second = a_step(first[-1].end + pause)
    return [*first, *second, *a_step(second[-1].end + pause)]


def test_steps_are_cut_at_their_copies_and_end_where_the_next_one_starts() -> None:
    activities = three_steps(500)
    steps = steps_by_copy([*activities, Activity("begin", 10**9, 10**9 + 1, 7)])
    assert [len(step.activities) for step in steps] == [15, 15, 15], "what has no copy behind it is no whole step"
    assert [step.end - step.worked_until for step in steps] == [500, 500, 0]
    assert steps[1].start == steps[0].end
    assert typical(steps) is steps[1]
    assert steps_by_copy([]) == []


def test_steps_of_a_cpu_are_what_ran_in_their_launches() -> None:
    operations = [Activity("a", 5, 9), Activity("b", 10, 12), Activity("read", 22, 23), Activity("a", 31, 34)]
    spans = [Span("launch", 0, 4, 20), Span("wait", 0, 20, 25), Span("launch", 1, 30, 40)]
    assert [[a.name for a in step.activities] for step in steps_by_launch(operations, spans)] == [["a", "b"], ["a"]]


def test_durations_overlap_and_own_times_do_not() -> None:
    activities = three_steps(500)
    rows = {row["name"]: row for row in kernel_rows(activities, 3)}
    assert [row["name"] for row in kernel_rows(activities, 3)][-1] == COPY
    assert rows["attend"] == {
        "name": "attend", "per_step": 3, "us": 15, "own_us": 12, "share": pytest.approx(15 / 73)
    }  # fmt: skip
    assert sum(own_times(a_step(0))) == 2000 + 4 * 3 * 4000 + 1000 + 10_000 + 1000


def test_gaps_are_told_by_what_stands_around_them() -> None:
    rows = gap_rows(three_steps(2500), least=2000, steps=3)
    around = [(row["before"], row["after"], row["per_step"]) for row in rows]
    assert around == [("head", COPY, 1), (COPY, "begin", 2 / 3)]
    assert rows[0]["us"] == {"median": 3, "min": 3, "max": 3}
    assert rows[1]["us_per_step"] == pytest.approx(5 / 3)
    covered = [Activity("long", 0, 100), Activity("short", 10, 20), Activity("next", 103, 104)]
    assert [(row["before"], row["us_per_step"]) for row in gap_rows(covered, 0, 1)] == [("long", 0.003)]


def test_layers_are_the_longest_repetition_in_its_shortest_form() -> None:
    assert find_layers([activity.name for activity in a_step(0, layers=6)]) == Layers(1, 4, 6)
    assert find_layers(list("xababababy")) == Layers(1, 2, 4)
    assert find_layers(list("norm" + 5 * "gemm-a.gemm-b.")) == Layers(4, 14, 5)
    assert find_layers(list("abcdefghab")) is None
    assert find_layers([]) is None


def test_the_picture_folds_layers_and_shows_what_overlaps() -> None:
    steps = steps_by_copy(three_steps(500))
    spans = [
        Span("launch", 1, steps[1].start - 9000, steps[1].start - 1000),
        Span("schedule", 2, steps[1].start + 1000, steps[1].start + 3000),
        Span("commit", 3, steps[2].start + 1000, steps[2].start + 3000),
    ]
    whole, layer = picture(steps[1], spans).split("\n\n")
    lines = whole.splitlines()
    assert lines[0].startswith("one step: 65.5 us")
    labels = [line[:36].strip() for line in lines[2:]]
    assert labels == [
        "begin", "layer 1: 4, idle 0.0 us", "layers 2 to 3: 8, idle 0.0 us", "head", COPY,
        "nothing, until the next step starts", "CPU: launch, this step", "CPU: schedule, the next step",
    ]  # fmt: skip
    assert lines[8].split()[-2:] == ["|", "|"], "what was done before is not drawn"
    shown = layer.splitlines()[2:]
    assert [line.split()[0] for line in shown] == [*LAYER, "qkv"]
    assert [line.split()[3] for line in shown[1:4]] == ["1.0"] * 3
    assert shown[1].split("|")[1].strip() == "+++###########"
    assert shown[0].split("|")[1].strip() == "#" * 14, "the first kernel waits for none"


def test_names_lose_types_and_namespaces() -> None:
    assert short("void at::native::(anonymous namespace)::fill<int, at::X<3>>(int*, long)") == "fill"
    assert short("_gemv_add") == "_gemv_add"
    assert short(COPY) == COPY


def test_the_report_of_a_gpu() -> None:
    """Recorded as a GPU would record it: idle shares with and without copies, and clocks that disagree."""
    steps = steps_by_copy(three_steps(500))
    spans = [Span("launch", number, step.start - 2000, step.start - 500) for number, step in enumerate(steps)]
    launches = [Activity("cudaGraphLaunch", step.start - 1500, step.start - 1000) for step in steps]
    launches.append(Activity("cudaGraphLaunch", 10**9, 10**9 + 500))
    case = timeline.analyse(Recording(three_steps(500), launches), spans, "cuda", 2000)
    assert case["launches_in_lane"] == 0.75
    assert case["kernels_per_step"] == 14
    assert case["idle_share"] == pytest.approx(2 * 4500 / (3 * 61_000 + 2 * 4500))
    assert case["idle_share_of_streams"] == {7: case["idle_share"]}
    assert case["idle_share_with_copies"] == pytest.approx((3 * 3000 + 2 * 500) / (3 * 65_000 + 2 * 500))
    assert case["between_steps_us"]["median"] == 0.5
    text = timeline.markdown([case | {"batch": 1, "context": 1024, "step_us": 66.0}])
    assert "| `attend` | 3.0 | 15.0 | 20.5 % | 12.0 |" in text
    assert "75.00 % of the driver's launches" in text
    with pytest.raises(SystemExit, match="recorded no step"):
        timeline.analyse(Recording([], []), spans, "cuda", 2000)


def test_a_timeline_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "result.json", tmp_path / "report.md"
    options = ["--batches", "1", "2", "--context", "16", "--steps", "6", "--pipeline-depth", "2"]
    arguments = ["--device", "cpu", "--shape", "nano", "--json", str(path), "--markdown", str(report), *options]
    monkeypatch.setattr(sys, "argv", ["timeline", *arguments])
    timeline.main()
    result = json.loads(path.read_text())
    assert [case["batch"] for case in result["cases"]] == [1, 2]
    for case in result["cases"]:
        assert case["steps"] == 6
        assert 0 <= case["idle_share"] < 1
        done = {what: (start, duration) for what, start, duration in case["typical_step"]["host"]}
        assert list(done) == ["schedule", "launch", "wait", "commit"]
        launched, waited = done["launch"], done["wait"]
        assert launched[0] + launched[1] < waited[0]
        for _, start, duration, _ in case["typical_step"]["activities"]:
            assert launched[0] <= start <= start + duration <= launched[0] + launched[1], "the clocks are one"
    assert "### Batch 2, context 16" in report.read_text()
    assert report.read_text() in capsys.readouterr().out


def test_only_whole_operations_of_a_cpu_count() -> None:
    nested = [Activity("outer", 0, 10), Activity("inner", 0, 4), Activity("inner", 5, 10), Activity("next", 10, 12)]
    assert [activity.name for activity in outermost(nested)] == ["outer", "next"]
