"""Every benchmark runs, on the smallest model and the CPU, and its figures fit together. No speed is asserted."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_busy import busy_and_span
from bench.model_math import prefill_flops, step_bytes
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
    result, printed = run("decode", *options, "--whole-tokens", "4", "--peer-steps", "2", "--num-gpu-blocks", "64")
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
    assert [("skipped" in case) for case in skipped] == [True, True]
    assert "40000" in printed
    assert "vLLM:" not in printed, "figures of another model and GPU are not quoted"


def test_prefill(run: Any) -> None:
    result, printed = run("prefill", "--prompts", "24", "40000", "--counts", "1", "2", "--rounds", "1")
    one, two, *skipped = result["cases"]
    assert two["tokens_per_second"] == pytest.approx(48 / (two["last_ms"]["median"] / 1e3))
    assert one["first_ms"] == one["last_ms"]
    assert one["peer_ms"]["min"] > 0
    assert all("context" in case["skipped"] for case in skipped)
    assert "2 x 24" in printed


def test_kernels(run: Any) -> None:
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


def test_ladder(run: Any) -> None:
    result, printed = run("ladder", "--contexts", "16", "30", "--tokens", "4", "--rounds", "1")
    climbed = [rung for rung in result["rungs"] if "skipped" not in rung]
    assert [rung["rung"] for rung in climbed[:2]] == ["recompute", "contiguous KV cache"]
    for rung in climbed:
        for figures in rung["contexts"].values():
            assert figures["ms_per_token"]["min"] > 0
            assert figures["tokens_equal"] == 4, "in float32 every rung writes the same text"
    assert all(rung["rung"] in printed for rung in result["rungs"])


# -- their parts ------------------------------------------------------------------------------------------------


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
