"""`make bench-gpu`, without a GPU: its options are known to the benchmarks, and no run can stop the others."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from scripts import bench_gpu
from scripts.bench_gpu import Run


def test_every_option_is_known_to_its_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--out", str(tmp_path), "--model", "models/some"])
    args = bench_gpu.arguments()
    for run in bench_gpu.RUNS:
        _, _, module, *options = bench_gpu.command(run, args)
        monkeypatch.setattr(sys, "argv", [module, *options])
        parsed = importlib.import_module(module).arguments()
        assert (parsed.device, parsed.shape) == ("cuda", "qwen2.5-1.5b")
        assert parsed.json == str(tmp_path / f"{run.name}.json")
        assert parsed.model == (Path("models/some") if module == "bench.serve" else None)
    assert len({run.name for run in bench_gpu.RUNS}) == len(bench_gpu.RUNS)


def test_runs_are_chosen_by_name_or_by_its_first_word() -> None:
    assert bench_gpu.chosen([]) == bench_gpu.RUNS
    assert [run.name for run in bench_gpu.chosen(["serve", "decode"])] == ["decode", "serve-1-front", "serve-3-fronts"]
    assert [run.name for run in bench_gpu.chosen(["serve-3-fronts"])] == ["serve-3-fronts"]
    with pytest.raises(SystemExit, match="no benchmark is called decoding"):
        bench_gpu.chosen(["decoding"])


def test_a_run_that_fails_or_takes_too_long_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = "--batches 1 --contexts 16 --steps 5 --rounds 1"
    runs = [
        Run("endless", "bench.engine_cpu", 1.5, "--steps 10000000"),
        Run("wrong", "bench.engine_cpu", 60, "--steps none"),
        Run("quick", "bench.engine_cpu", 60, quick),
    ]
    monkeypatch.setattr(bench_gpu, "RUNS", runs)
    arguments = ["bench_gpu", "--out", str(tmp_path / "out"), "--device", "cpu", "--shape", "nano"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench_gpu.main() == 1
    tables, outcomes = capsys.readouterr().out.split("\nendless ")
    assert "1 x 16" in tables
    endless, wrong, good = outcomes.strip().splitlines()
    assert endless.endswith("stopped after 2 s")
    assert "exit code 2" in wrong
    assert "invalid int value: 'none'" in wrong
    assert good.endswith("done")
    assert json.loads((tmp_path / "out/quick.json").read_text())["benchmark"] == "engine_cpu"
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "10"])
    start = time.monotonic()
    assert bench_gpu.main() == 1
    assert time.monotonic() - start < 1
    printed = capsys.readouterr().out
    assert printed.count("not begun: no time is left") == 3
    assert "1 x 16" not in printed, "a table of an earlier day"
