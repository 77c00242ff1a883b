"""Every benchmark runs, on the smallest model and the CPU, and its figures fit together. No speed is asserted."""

import importlib
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernel_cases, kernels
from bench.chain_cases import CHAIN_BUILDERS, chained
from bench.gpu_busy import busy_and_span
from bench.kernel_cases import Bench
from bench.ladder import RUNGS
from bench.load_client import tokens_of_messages
from bench.mixed import arrival_times
from bench.model_math import prefill_flops, step_bytes
from bench.options import _named_option
from bench.report import percentiles
from bench.serve import summary
from bench.workload import Lengths, Workload, split, token_ids
from engine.cuda import decode
from engine.model.config import load_model_config
from scripts.make_shape_model import write_shape, write_tokenizer
from service.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

Result = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a benchmark's `main` and returns its JSON and what it printed."""

    def run_it(name: str, *options: str) -> tuple[Result, str]:
        path = tmp_path / "result.json"
        arguments = ["--device", "cpu", "--shape", "nano", "--json", str(path), *options]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(f"bench.{name}").main()
        result: Result = json.loads(path.read_text())
        assert result["benchmark"] == name
        assert result["conditions"]["commit"]
        assert result["arguments"]["shape"] == "nano"
        return result, capsys.readouterr().out

    return run_it


def test_decode(run: Any) -> None:
    options = ["--batches", "1", "2", "--contexts", "16", "40000", "--steps", "3", "--rounds", "3"]
    options += ["--num-gpu-blocks", "64", "--max-prompt-tokens", "50000"]
    result, printed = run("decode", *options, "--whole-tokens", "4", "--peer-steps", "2")
    alone, pair, *skipped = result["cases"]
    assert (alone["batch"], alone["context"], pair["batch"]) == (1, 16, 2)
    assert pair["bytes_per_step"] > alone["bytes_per_step"]
    for case in (alone, pair):
        rate, milliseconds = case["tokens_per_second"], case["step_ms"]
        assert rate["max"] == pytest.approx(1e3 * case["batch"] / milliseconds["min"], rel=1e-6)
        assert case["share_of_read_bandwidth"] == pytest.approx(rate["median"] / case["limit_tokens_per_second"])
        assert case["whole_run_tokens_per_second"]["min"] > 0
    assert list(alone["peers"]) == ["transformers eager"]
    assert pair["peers"] == {}
    assert "context of 32768" in skipped[0]["skipped"]
    assert "its prompts have 80000 tokens" in skipped[1]["skipped"]
    assert "40000" in printed
    assert "vLLM:" not in printed, "figures of another model and GPU are not quoted"


def test_engine_cpu(run: Any) -> None:
    options = ["--batches", "1", "3", "--contexts", "16", "--steps", "20", "--rounds", "2"]
    result, printed = run("engine_cpu", *options)
    for case, batch in zip(result["cases"], (1, 3), strict=True):
        times = case["microseconds"]
        assert case["batch"] == batch
        assert times["schedule"]["min"] > 0
        assert times["schedule"]["min"] + times["commit"]["min"] < times["step"]["max"]
    assert "3 x 16" in printed


def test_prefill(run: Any) -> None:
    result, printed = run("prefill", "--prompts", "24", "40000", "--counts", "1", "2", "--rounds", "1")
    one, two, *skipped = result["cases"]
    assert two["tokens_per_second"] == pytest.approx(48 / (two["last_ms"]["median"] / 1e3))
    assert one["first_ms"] == one["last_ms"]
    assert one["peer_ms"]["min"] > 0
    assert all("context" in case["skipped"] for case in skipped)
    assert "2 x 24" in printed


def test_kernels(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU has. Kernels of the decode chain come with Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET")
    options = ["--tokens", "1", "3", "--contexts", "20", "--prefills", "24", "--rounds", "1"]
    result, printed = run("kernels", *options)
    by_name: dict[str, list[Result]] = {}
    for kernel in result["kernels"]:
        by_name.setdefault(kernel["kernel"], []).append(kernel)
    names = {"linear qkv", "linear head", "add_rmsnorm", "rope_and_store", "decode attention", "prefill attention"}
    assert names <= by_name.keys()
    assert len(by_name["linear down"]) == 2
    assert by_name["linear down"][1]["flops"] == 2 * 3 * 64 * 128
    assert by_name["decode attention"][0]["bytes"] == 4 * (20 * 2 * 2 * 16 + 2 * 4 * 16)
    for kernel in result["kernels"]:
        assert 0 < kernel["us"]["min"] <= kernel["us"]["median"] <= kernel["us"]["max"]
        assert kernel["kernel"] in printed
        assert ("torch_us" in kernel) == kernel["kernel"].startswith("linear")
    only, _ = run("kernels", *options, "--only", "silu")
    assert {kernel["kernel"] for kernel in only["kernels"]} == {"silu_mul"}
    nothing, _ = run("kernels", *options, "--only", "partial_sum_norms")
    assert nothing["kernels"] == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chained, _ = run("kernels", *options, "--only", "partial_sum_norms")
    assert [kernel["kernel"] for kernel in chained["kernels"]] == ["add_rmsnorm of sums"]


@pytest.mark.parametrize("shape", ["nano", "qwen3-0.6b"])
def test_kernels_of_the_decode_chain(shape: str, tmp_path: Path) -> None:
    """Each case runs, once and interpreted; with norms of q and k there is no fused row."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = load_model_config(write_shape(tmp_path, shape, **sizes))
    bench = Bench(config, "cpu", torch.float32, [1, 3, 300], [20], [])
    seen = {}
    for builder in CHAIN_BUILDERS:
        for case in builder(bench):
            case.calls[0]()
            seen[case.name, case.size] = case
    products = {name for name, _ in seen if name.startswith(("gemv", "skinny"))}
    matrices = ["qkv", "o", "gate_up", "down", "head"]
    fused = [] if config.qk_norm else [f"gemv {name}" for name in matrices]
    assert products == {*fused, *(f"skinny {name}" for name in matrices)}
    down = seen["skinny down", "3 x 128 -> 64"]
    assert (down.nbytes, down.flops) == (4 * (128 * 64 + 3 * 128 + 3 * 64), 2 * 3 * 128 * 64)
    assert seen["add_rmsnorm of sums", "1 x 3 x 64"].nbytes == 4 * 3 * 64 * (1 + 2 + 1)
    assert seen["decode attention", "3 x 20"].nbytes == 4 * 3 * (20 * 2 * 2 * 16 + 2 * 4 * 16)
    assert "300" not in str(list(seen)), "the chain has other products for so many rows, and attention ends at 256"


def test_kernels_are_measured_with_and_without_dependent_launch(tmp_path: Path) -> None:
    launched: list[bool] = []
    bench = Bench(load_model_config(write_shape(tmp_path, "nano")), "cuda", torch.float32, [], [], [])
    case = chained(bench, "x", "1", [lambda *, pdl: launched.append(pdl)], 8.0)
    result = kernels.measure(case, "cpu", rounds=1)
    assert launched == [True] * 1 + [False] * 1 + [True] * 6 + [False] * 6
    kernels.add_shares(result, 1e9, 1e12)
    assert len(kernels.row(result)) == len(kernels.HEADER)
    assert result["plain_us"]["min"] > 0
    assert "torch_us" not in result


def test_sampling_is_measured_as_engines_launch_it() -> None:
    assert (kernel_cases.PLAIN, kernel_cases.FULL) == (decode.PLAIN, decode.FULL)


def test_ladder(run: Any) -> None:
    result, printed = run("ladder", "--contexts", "16", "30", "--tokens", "4", "--rounds", "1")
    assert [rung["rung"] for rung in result["rungs"]] == [rung.name for rung in RUNGS["cpu"]]
    for rung in result["rungs"]:
        for figures in rung["contexts"].values():
            assert figures["ms_per_token"]["min"] > 0
            assert figures["tokens_equal"] == 4, "in float32 every rung writes the same text"
    assert all(rung["rung"] in printed for rung in result["rungs"])


def test_mixed(run: Any) -> None:
    options = ["--streams", "2", "--prompt", "40", "--rates", "0", "40", "--seconds", "0.3", "--budgets", "64", "128"]
    result, printed = run("mixed", *options, "--rounds", "1")
    assert [(row["budget"], row["rate"]) for row in result["rows"]] == [(64, 0), (64, 40), (128, 0), (128, 40)]
    for row in result["rows"]:
        assert row["gap_ms"]["count"] > 2
        assert row["gap_ms"]["p50"] <= row["gap_ms"]["p99"] <= row["gap_ms"]["max"]
        assert (row["arrivals"] > 0) == (row["rate"] > 0)
        assert row["first_token_ms"].get("count", 0) + row["late"] == row["arrivals"]
    assert "vLLM:" not in printed


def test_serve(run: Any, smollm2_dir: Path) -> None:
    options = ["--requests", "6", "--output-tokens", "4-8", "--prompt-tokens", "20", "--clients", "2"]
    result, printed = run("serve", *options, "--concurrency", "2", "--rates", "40", "--ttft-limit", "60000")
    assert result["start"]["ready_seconds"] < result["start"]["first_token_seconds"]
    workload = Workload(Lengths.parse("20"), Lengths.parse("4-8"), 0, 1, 0.0, 0)
    assert [row["load"] for row in result["rows"]] == ["2 at once", "40 per s"]
    for row, first_wave in zip(result["rows"], (2, 0), strict=True):
        assert (row["requests"], row["errors"]) == (6, {})
        assert row["tokens"] == sum(request.output_tokens for request in workload.plan(6, None, first_wave))
        assert 1 <= row["tokens_per_message"] <= 8
        assert row["ttft_ms"]["count"] == 6 - first_wave
        assert row["first_wave_ttft_ms"].get("count", 0) == first_wave
        assert (row["full_tokens_per_second"] is None) == (first_wave == 0)
        names = set(row["cpu_seconds"])
        assert {"supervisor", "engine-0", "clients"} <= names
        assert any(name.startswith("front") for name in names)
    assert "first token after" in printed


# -- their parts ------------------------------------------------------------------------------------------------


def test_a_workload_is_what_was_asked_for_and_the_same_for_a_seed() -> None:
    workload = Workload(Lengths.parse("10-20"), Lengths.parse("exp:30"), 64, 3, 0.5, seed=7)
    planned = workload.plan(2000, rate=50)
    assert planned == workload.plan(2000, rate=50)
    assert all(10 <= request.prompt_tokens <= 20 and 1 <= request.output_tokens <= 120 for request in planned)
    assert statistics.fmean(request.output_tokens for request in planned) == pytest.approx(30, rel=0.1)
    assert {request.prefix for request in planned} == {None, 0, 1, 2}
    assert sum(request.prefix_tokens == 64 for request in planned) == pytest.approx(1000, rel=0.1)
    arrivals = [request.at for request in planned if request.at is not None]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40, rel=0.1)
    untimed = workload.plan(2000, None, first_wave=500)
    assert [(r.prompt_tokens, r.at) for r in untimed] == [(r.prompt_tokens, None) for r in planned]
    assert [r.output_tokens for r in untimed[500:]] == [r.output_tokens for r in planned[500:]]
    cut = [(r.output_tokens, p.output_tokens) for r, p in zip(untimed[:500], planned, strict=False)]
    assert all(1 <= ours <= whole for ours, whole in cut)
    assert sum(ours for ours, _ in cut) == pytest.approx(sum(whole for _, whole in cut) / 2, rel=0.2)
    shares = split(planned, 3)
    assert sorted(request["number"] for share in shares for request in share) == list(range(2000))


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    plan = Workload(Lengths.parse("16"), Lengths.parse("1"), 8, 1, 1.0, seed=1).plan(2, None)
    first, second = (token_ids(asdict(request), "1", 1000) for request in plan)
    assert len(first) == 24
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert token_ids(asdict(plan[0]), "2", 1000)[:8] != first[:8], "another load has other prefixes, too"


@pytest.mark.parametrize("text", ["0", "9-3", "abc", "exp:x"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no range of lengths|invalid literal"):
        Lengths.parse(text)


def test_latencies_of_requests() -> None:
    """Two answered, one within the limits; the tokens of a message reach to the next one."""
    assert tokens_of_messages([0, 1, 4], 6) == [1, 3, 2]
    requests = [
        {"number": 0, "at": 0.0, "sent": 0.25, "times": [0.5, 0.75, 1.5], "tokens": [1, 3, 2]},
        {"number": 1, "at": 1.0, "sent": 1.0, "times": [2.0, 2.5], "tokens": [1, 1]},
        {"number": 2, "at": 2.0, "sent": 2.0, "error": "UNAVAILABLE: x"},
    ]
    seen = summary(requests, limits=(0.3, 0.2))
    assert seen["ttft_ms"]["p50"] == 250
    assert seen["tpot_ms"]["max"] == 500
    assert sorted([seen["tpot_ms"]["p50"], seen["tpot_ms"]["p99"]]) == [200, 500]
    assert seen["icl_ms"]["count"] == 3
    assert seen["seconds"] == 2.25
    assert seen["tokens_per_second"] == pytest.approx(8 / 2.25)
    assert seen["goodput"] == pytest.approx(1 / 2.25)
    assert seen["tokens_per_message"] == 8 / 5
    assert seen["errors"] == {"UNAVAILABLE: x": 1}
    assert seen["send_lag_ms"]["max"] == 250
    assert seen["first_wave_ttft_ms"] == {}
    assert seen["full_tokens_per_second"] is None
    apart = summary(requests, limits=(0.3, 0.2), first_wave=1)
    assert (apart["first_wave_ttft_ms"]["max"], apart["ttft_ms"]["max"]) == (250, 1000)
    assert apart["full_tokens_per_second"] == 3 / 0.5, "3 tokens from 0.5, the first token, to 1.0, the last request"
    assert apart["goodput"] == seen["goodput"]


def test_an_option_of_the_engine_has_the_value_that_python_would_read() -> None:
    written = ["a=1", "b=7.5", "c=true", "d=separate", "e=False"]
    read = dict(_named_option(text) for text in written)
    assert read == {"a": 1, "b": 7.5, "c": True, "d": "separate", "e": False}
    assert isinstance(read["a"], int)
    with pytest.raises(SystemExit, match="NAME=VALUE"):
        _named_option("max_num_seqs")


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) == {}
    assert percentiles([5.0])["p99"] == 5
    found = percentiles([float(value) for value in range(200, 0, -1)])
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (100, 180, 198, 200)


def test_arrivals_are_even_or_poisson() -> None:
    assert arrival_times(0, 10, even=True, seed=1) == []
    assert arrival_times(4, 1, even=True, seed=1) == [0, 0.25, 0.5, 0.75]
    random_times = arrival_times(100, 50, even=False, seed=1)
    assert len(random_times) == pytest.approx(5000, rel=0.1)
    assert random_times == sorted(random_times)
    assert max(random_times) < 50


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], (0, 0)),
        ([(5, 9)], (4, 4)),
        ([(0, 4), (6, 8)], (6, 8)),
        ([(6, 8), (0, 4), (3, 7)], (8, 8)),
        ([(0, 10), (2, 3), (9, 12), (20, 21)], (13, 21)),
    ],
    ids=str,
)
def test_overlapping_kernels_count_once(intervals: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    assert busy_and_span(intervals) == expected


def test_the_bytes_and_operations_behind_every_share(tmp_path: Path) -> None:
    """docs: 3.087 GB a step and 28,672 bytes of KV per token; 2,048 tokens are 7.3 ms at 790 TFLOP/s."""
    config = load_model_config(write_shape(tmp_path, "qwen2.5-1.5b"))
    assert round(step_bytes(config, 2, 1, 0) / 1e9, 3) == 3.087
    assert step_bytes(config, 2, 3, 100) - step_bytes(config, 2, 3, 99) == 3 * 28_672
    assert prefill_flops(config, 2048) / 790e12 == pytest.approx(7.3e-3, rel=0.05)
    assert prefill_flops(config, 8192) / 790e12 == pytest.approx(34.5e-3, rel=0.05)


def test_a_filled_up_tokenizer_has_a_text_for_every_id_and_the_same_ids_for_a_text(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    vocab_size = 60_000
    write_tokenizer(tmp_path, vocab_size)
    filled, donor = Tokenizer.load(tmp_path), Tokenizer.load(smollm2_dir)
    assert len(filled.table.pieces) == vocab_size
    assert all(filled.table.pieces)
    assert filled.decode([49_151, 49_152, vocab_size - 1]) == donor.decode([49_151]) + " w49152 w59999"
    text = "Paged attention, w50000 and 12 KV heads: ünïcödé."
    assert filled.encode(text) == donor.encode(text)
