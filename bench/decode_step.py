"""Time of one bare decode step (no engine, no sampling) inside a CUDA graph, and the tiles it runs best with.

    python -m bench.decode_step --shape qwen2.5-1.5b --batch 1 8 32 --context 1024 --json out.json
    python -m bench.decode_step --sweep --batch 1 --tiles kernels/gpu/tiles.json

``--sweep`` changes one field of one tile at a time, measures the whole chain, and keeps what wins: a tile that is best
alone need not be best between its neighbours. The winners are written to ``--tiles`` with their figures.
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench import report
from engine.model.config import load_model_config
from engine.model.decode_chain import MAX_SKINNY, DecodeBuffers, DecodeChain
from engine.model.random_weights import random_weights
from engine.model.rope import cos_sin_table
from engine.model.transformer import Transformer
from kernels.gpu import decode_attention, tiles
from kernels.gpu.decode_attention import DecodePlan
from kernels.gpu.gemv import GemvTile
from kernels.gpu.skinny_gemm import SkinnyTile
from kernels.reference.step import DecodeRows
from scripts.make_shape_model import SHAPES, write_shape

BLOCK_SIZE = 16
GEMV_FIELDS = {"rows": (1, 2, 4, 8, 16), "k": (256, 512, 1024, 2048), "warps": (2, 4, 8), "ahead": (1, 2, 3)}
SKINNY_FIELDS = {
    "rows": (16, 32, 64, 128),
    "k": (32, 64, 128, 256),
    "splits": (1, 2, 3, 4, 6, 8, 12),
    "stages": (2, 3, 4, 5, 6),
    "warps": (4, 8),
    "ahead": (1, 2, 3, 4),
}


class Bench:
    """A random model of a shape, a full KV cache, and the chain over it."""

    def __init__(self, shape: str, layers: int | None, max_rows: int, max_context: int, device: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            overrides = {} if layers is None else {"num_hidden_layers": layers}
            directory = write_shape(Path(name), shape, **overrides)
            self.config = load_model_config(directory)
            weights, _ = random_weights(directory, self.config, 0, torch.bfloat16, torch.device(device), False)
        self.model = Transformer(self.config, weights)
        self.device = device
        self.fold = 0  # rows up to which norms are folded into the products
        blocks_each = max_context // BLOCK_SIZE + 2
        shape_kv = (
            self.config.num_layers, 2, max_rows * blocks_each, BLOCK_SIZE, self.config.num_kv_heads,
            self.config.head_dim,
        )  # fmt: skip
        self.kv_cache = torch.empty(shape_kv, dtype=torch.bfloat16, device=device).normal_()
        tables = torch.randperm(max_rows * blocks_each, device=device).int().view(max_rows, blocks_each)
        arange = torch.arange(max_rows, device=device)
        self.rows = DecodeRows(arange.int(), arange.int(), tables, arange % 1000, BLOCK_SIZE)
        self.cos_sin = cos_sin_table(self.config, max_context + BLOCK_SIZE).to(device)
        self.buffers = DecodeBuffers(self.model, max_rows)

    def graph(self, batch: int, context: int, pdl: bool) -> torch.cuda.CUDAGraph:
        """The captured step of ``batch`` rows; replaying it grows the contexts by one each time."""
        self.rows.positions_S.fill_(context)
        chain = DecodeChain(self.model, self.kv_cache, self.rows, self.cos_sin, self.buffers, self.fold)
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            chain.run(batch, pdl=pdl)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                chain.run(batch, pdl=pdl)
        return graph

    def measure(self, batch: int, context: int, pdl: bool, rounds: int = 40) -> dict[str, float]:
        """Milliseconds of a replay."""
        graph = self.graph(batch, context, pdl)
        times = []
        for number in range(rounds + 10):
            self.rows.positions_S.fill_(context)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 10:
                times.append(start.elapsed_time(end))
        return report.spread(times)

    # -- tiles --------------------------------------------------------------------------------------------------

    def tile_keys(self, batch: int) -> dict[str, Any]:
        """Every tile the chain of ``batch`` rows uses, by key, with its present value."""
        c = self.config
        layer = self.model.weights.layers[0]
        qkv, o, down = layer.qkv.shape, layer.o.shape, layer.down.shape
        gate_up, head = layer.gate_up.shape, self.model.weights.head_VH.shape
        if batch == 1 and not c.qk_norm:
            return {
                tiles.gemv_key("qkv", *qkv): tiles.gemv_tile("qkv", qkv[0], qkv[1], c.head_dim // 2),
                tiles.gemv_key("add", *o): tiles.gemv_tile("add", *o),
                tiles.gemv_key("gate_up", *gate_up): tiles.gemv_tile("gate_up", *gate_up),
                tiles.gemv_key("add", *down): tiles.gemv_tile("add", *down),
                tiles.gemv_key("head", *head): tiles.gemv_tile("head", *head),
            }
        if batch <= self.fold:
            kinds = [*(("folded", shape) for shape in (qkv, o, down)), ("folded_gate_up", gate_up), ("head", head)]
        else:
            kinds = [*(("gemm", shape) for shape in (qkv, o, down)), ("gate_up", gate_up), ("head", head)]
        return {
            tiles.skinny_key(kind, rows, inner, batch): tiles.skinny_tile(kind, rows, inner, batch)
            for kind, (rows, inner) in kinds
        }


def neighbours(key: str, tile: Any) -> list[Any]:
    """Tiles that differ from ``tile`` in one field, as far as they can run."""
    fields = GEMV_FIELDS if isinstance(tile, GemvTile) else SKINNY_FIELDS
    found = []
    for name, values in fields.items():
        for value in values:
            other = replace(tile, **{name: value})
            if other != tile and possible(key, other):
                found.append(other)
    return found


def possible(key: str, tile: Any) -> bool:
    if isinstance(tile, GemvTile):
        doubled = 2 if key.split("/")[1] in ("qkv", "gate_up") else 1
        return 512 <= tile.rows * tile.k * doubled <= 16384
    tokens = int(key.rsplit("/", 1)[1])
    both = 2 if "gate_up/" in key else 1
    shared = (tile.rows * both + tokens) * tile.k * 2 * tile.stages
    splits_fit = tile.splits == 1 or "/gemm/" in key
    return splits_fit and shared <= 200_000 and tile.rows * tokens * both <= 128 * 128


def use(key: str, tile: Any) -> None:
    tiles.measured_tiles().setdefault(key, {})["tile"] = asdict(tile)


def _compile(arguments: tuple[str, int, int, list[tuple[str, Any]]]) -> int:
    """In a process of its own: run each tile once on a model of one layer, so that it lies compiled on the disk."""
    shape, batch, fold, variants = arguments
    bench, done = Bench(shape, 1, max(batch, 2), 64, "cuda"), 0
    for key, tile in variants:
        saved = tiles.measured_tiles().get(key)
        use(key, tile)
        try:
            bench.buffers = DecodeBuffers(bench.model, max(batch, 2))
            chain = DecodeChain(bench.model, bench.kv_cache, bench.rows, bench.cos_sin, bench.buffers, fold)
            bench.rows.positions_S.fill_(20)
            with torch.inference_mode():
                chain.run(batch, pdl=True)
            torch.cuda.synchronize()
            done += 1
        except Exception as error:
            print(f"{key} {tile}: {error!r}"[:200], file=sys.stderr)
        if saved is not None:
            use(key, GemvTile(**saved["tile"]) if "gemv" in key else SkinnyTile(**saved["tile"]))
    return done


def compile_ahead(shape: str, batch: int, fold: int, variants: list[tuple[str, Any]], processes: int) -> None:
    parts = [variants[i::processes] for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, [(shape, batch, fold, part) for part in parts if part]))


def sweep(bench: Bench, shape: str, batch: int, context: int, passes: int, processes: int) -> dict[str, Any]:
    """Coordinate descent over the tiles of ``batch`` rows. Returns entries for the tiles file."""
    current = bench.tile_keys(batch)
    for key, tile in current.items():
        use(key, tile)
    best = bench.measure(batch, context, True, 20)["median"]
    first = best
    for number in range(passes):
        variants = [(key, other) for key, tile in current.items() for other in neighbours(key, tile)]
        compile_ahead(shape, batch, bench.fold, variants, processes)
        for key in current:
            start = current[key]
            for other in neighbours(key, start):
                use(key, other)
                try:
                    bench.buffers = DecodeBuffers(bench.model, len(bench.rows.row_slots_B))
                    time = bench.measure(batch, context, True, 15)["median"]
                except Exception as error:
                    print(f"{key} {other}: {error!r}"[:160], file=sys.stderr)
                    torch.cuda.synchronize()
                    continue
                if time < best * 0.998:
                    best, current[key] = time, other
            use(key, current[key])
        print(f"batch {batch}, pass {number + 1}: {first:.4f} -> {best:.4f} ms", flush=True)
    found = {"gpu": torch.cuda.get_device_name(), "batch": batch, "context": context}
    return {
        key: {"tile": asdict(tile), "step_ms": round(best, 4), "before_ms": round(first, 4), **found}
        for key, tile in current.items()
    }


def sweep_attention(bench: Bench, batch: int, context: int) -> list[dict[str, Any]]:
    """The step's time by the cut of attention."""
    results = []
    original = decode_attention.decode_plan
    plans = [
        DecodePlan(splits, first, tile, warps, stages)
        for splits in (1, 2, 4, 8, 16, 32, 64, 128)
        for first in (16, 32, 64)
        for tile in (32, 64, 128)
        for warps in (2, 4, 8)
        for stages in (2, 3)
        if 256 <= splits * batch * bench.config.num_kv_heads <= 1024 and first <= tile
    ]
    for plan in plans:
        decode_attention.decode_plan = lambda rows, heads, plan=plan: plan  # type: ignore[misc]
        try:
            bench.buffers = DecodeBuffers(bench.model, batch)
            time = bench.measure(batch, context, True, 10)["median"]
            results.append({"batch": batch, "context": context, **asdict(plan), "ms": round(time, 4)})
        except Exception as error:
            print(f"{plan}: {error!r}"[:160], file=sys.stderr)
    decode_attention.decode_plan = original
    return sorted(results, key=lambda result: result["ms"])


def read_bandwidth() -> float:
    """TB/s of a read-only pass over 8 GiB."""
    data = torch.empty(1 << 31, dtype=torch.float32, device="cuda").normal_()
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return data.nbytes / statistics.median(times) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--sweep", action="store_true", help="find the best tiles of the batches up to 64")
    parser.add_argument("--sweep-attention", action="store_true")
    parser.add_argument("--fold", type=int, default=0, help="rows up to which norms are folded into the products")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--processes", type=int, default=12, help="that compile tiles ahead")
    parser.add_argument("--tiles", help="add the winners to this file")
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = Bench(args.shape, None, max(args.batch), max(args.context), "cuda")
    bench.fold = args.fold
    weights = sum(p.nbytes for layer in bench.model.weights.layers for p in (layer.qkv, layer.o, layer.gate_up))
    weights += sum(layer.down.nbytes for layer in bench.model.weights.layers) + bench.model.weights.head_VH.nbytes
    bandwidth = read_bandwidth()
    content: dict[str, Any] = {"conditions": report.conditions("cuda"), "read_TBps": bandwidth, "steps": []}
    if args.sweep:
        content["tiles"] = {}
        for batch in args.batch:
            if batch <= MAX_SKINNY:
                content["tiles"] |= sweep(bench, args.shape, batch, args.context[0], args.passes, args.processes)
        if args.tiles:
            stored = json.loads(Path(args.tiles).read_text(encoding="utf-8"))
            stored["entries"] |= content["tiles"]
            Path(args.tiles).write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if args.sweep_attention:
        content["attention"] = []
        for batch in args.batch:
            for context in args.context:
                best = sweep_attention(bench, batch, context)
                content["attention"] += best
                print(*best[:4], sep="\n", flush=True)
    rows = []
    for batch in args.batch:
        for context in args.context:
            for pdl in (False, True) if batch <= MAX_SKINNY else (False,):
                ms = bench.measure(batch, context, pdl)
                c = bench.config
                kv = batch * context * 4 * c.num_layers * c.num_kv_heads * c.head_dim
                share = (weights + kv) / ms["median"] / 1e9 / bandwidth
                content["steps"].append({"batch": batch, "context": context, "pdl": pdl, "ms": ms, "share": share})
                rows.append(
                    [f"{batch}", f"{context}", "yes" if pdl else "no", f"{ms['median']:.4f}", f"{ms['min']:.4f}",
                     f"{ms['max']:.4f}", f"{1000 * batch / ms['median']:.0f}", f"{100 * share:.0f} %"]
                )  # fmt: skip
    report.write_json(args.json, content)
    header = ["batch", "context", "PDL", "ms", "min", "max", "tok/s", f"of {bandwidth:.2f} TB/s"]
    print(report.table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
