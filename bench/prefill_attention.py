"""Attention of prompt chunks: our tiles over the paged cache beside torch's attention over the same KV, gathered first.

    python -m bench.prefill_attention --json bench/results/prefill_attention.json

Each case is (query tokens, context); a context longer than the queries is a cached prefix. TFLOP/s count what causal
attention needs, 4 x head_dim x query heads x pairs of tokens. GPU only.
"""

import argparse
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.report import conditions, spread, table, write_json
from kernels.gpu.prefill_attention import (
    PrefillTile,
    choose_splits,
    choose_tile,
    paged_prefill_attention,
)
from kernels.reference.attention import PrefillMeta

BLOCK_SIZE = 16
CASES = [(8192, 8192), (2118, 2118), (512, 2560), (144, 144), (35, 2118)]
LARGE = [
    PrefillTile(queries, keys, warps, stages)
    for queries, keys, warps, stages in product((64, 128), (64, 128), (4, 8), (2, 3, 5))
    if (queries, warps) != (64, 8)
]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Case:
    """Random q and a scrambled paged cache of one sequence."""

    def __init__(self, queries: int, context: int, heads: int, kv_heads: int, dim: int) -> None:
        blocks = -(-context // BLOCK_SIZE)
        self.queries, self.context, self.heads, self.dim = queries, context, heads, dim
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q = torch.randn(queries, heads, dim, **options)
        self.caches = torch.randn(2, blocks, BLOCK_SIZE, kv_heads, dim, **options)
        self.out = torch.empty_like(self.q)
        tables = torch.randperm(blocks, device="cuda")[None].int()
        starts = torch.tensor([0, queries], device="cuda")
        contexts = torch.tensor([context], device="cuda")
        self.meta = PrefillMeta(tables, starts, contexts, None, None, BLOCK_SIZE)
        positions = torch.arange(context, device="cuda")
        self.slots = tables[0].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    @property
    def flop(self) -> float:
        pairs = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) / 2
        return 4.0 * self.dim * self.heads * pairs

    def ours(self, tile: PrefillTile | None, splits: int | None) -> None:
        k_cache, v_cache = self.caches
        paged_prefill_attention(self.q, k_cache, v_cache, self.meta, self.dim**-0.5, self.out, tile=tile, splits=splits)

    def torchs(self, backend: SDPBackend) -> Tensor:
        """The gather is part of it: two index_selects."""
        k, v = (cache.flatten(0, 1).index_select(0, self.slots).transpose(0, 1)[None] for cache in self.caches)
        q = self.q.transpose(0, 1)[None]
        fresh = self.queries == self.context
        bias = None if fresh else causal_lower_right(self.queries, self.context)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=fresh, enable_gqa=True)


def milliseconds(work: Any, rounds: int) -> dict[str, float]:
    """Of one call, from a graph of eight."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                work()
        times = []
        for _ in range(rounds + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 8)
    return spread(times[2:])


def run(case: Case, rounds: int, sweep: bool) -> list[dict[str, Any]]:
    chosen = choose_tile(torch.bfloat16, case.queries, case.heads, case.dim)
    splits = choose_splits(chosen, case.queries, case.heads)
    variants: list[tuple[str, Any]] = [("chosen", lambda: case.ours(None, None))]
    if sweep:
        for tile in LARGE:
            for count in {1, splits, 2 * splits, 4 * splits} if splits > 1 else {1}:
                name = f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages} /{count}"
                variants.append((name, lambda tile=tile, count=count: case.ours(tile, count)))
    for name, backend in BACKENDS.items():
        variants.append((name, lambda backend=backend: case.torchs(backend)))
    results = []
    for name, work in variants:
        base = {"queries": case.queries, "context": case.context, "what": name}
        try:
            ms = milliseconds(work, rounds)
        except Exception as error:
            torch.cuda.synchronize()
            results.append(base | {"error": repr(error)[:200]})
            continue
        results.append(base | {"ms": ms, "TFLOPs": case.flop / ms["median"] / 1e9})
    results[0]["tile"] = asdict(chosen) | {"splits": splits}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, nargs=3, default=[12, 2, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sweep", action="store_true", help="also every tile that fits")
    parser.add_argument("--json")
    args = parser.parse_args()
    results = [
        result
        for queries, context in CASES
        for result in run(Case(queries, context, *args.heads), args.rounds, args.sweep)
    ]
    write_json(args.json, {"conditions": conditions("cuda"), "heads": args.heads, "results": results})
    rows = [
        [
            f"{r['queries']} of {r['context']}", r["what"],
            f"{r['ms']['median']:.4f}" if "ms" in r else r["error"][:60], f"{r.get('TFLOPs', 0):.0f}",
        ]
        for r in results
    ]  # fmt: skip
    print(table(["queries of context", "what", "ms", "TFLOP/s"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
