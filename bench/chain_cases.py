"""Cases of `bench.kernels` for the Triton kernels of the decode chain, launched as the chain launches them.

Imported where Triton can run only. Up to 64 rows the kernels are under programmatic dependent launch: the first weights
of a launch are asked for while the one before still runs, as between the different kernels of a step. `plain` are the
same launches without it. The tiles are those of `kernels.gpu.tiles`. Shapes as in `bench.kernel_cases`; S partial sums.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import BLOCK_SIZE, Bench, Call, Case, kv_caches
from kernels.gpu import cache, decode_attention, gemv, norm, skinny_gemm
from kernels.gpu.tiles import gemv_tile, skinny_tile
from kernels.reference.attention import DecodeMeta
from kernels.reference.cache import HeadNorms

Launch = Callable[..., object]  # takes ``pdl``


def chained(bench: Bench, name: str, size: str, launches: Sequence[Launch], nbytes: float, **more: Any) -> Case:
    """A case of the decode chain; on a CPU there is no dependent launch."""
    plain: list[Call] = [partial(launch, pdl=False) for launch in launches]
    if bench.device == "cpu":
        return Case(name, size, plain, nbytes, **more)
    return Case(name, size, [partial(launch, pdl=True) for launch in launches], nbytes, plain=plain, **more)


def matrices(bench: Bench) -> Iterator[tuple[str, list[Tensor], Tensor | None]]:
    """(name, copies of the weight, bias) of a layer's products and of the head."""
    c = bench.config
    heads = c.num_heads * c.head_dim
    for name, rows, inner, has_bias in (
        ("qkv", heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size, c.qkv_bias),
        ("o", c.hidden_size, heads, c.o_bias),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("down", c.hidden_size, c.intermediate_size, c.mlp_bias),
        ("head", c.vocab_size, c.hidden_size, False),
    ):
        weights = [bench.matrix(rows, inner) for _ in bench.copies(float(rows * inner * bench.itemsize))]
        if weights:
            yield name, weights, bench.random(rows) if has_bias else None


def product(bench: Bench, name: str, launches: list[Launch], weights: list[Tensor], tokens: int, written: int) -> Case:
    """``written``: bytes of the result. torch's product alone is the peer."""
    rows, inner = weights[0].shape
    x = bench.random(tokens, inner)
    return chained(
        bench, name, f"{tokens} x {inner} -> {rows}", launches, float(weights[0].nbytes + x.nbytes + written),
        flops=2.0 * tokens * rows * inner, peer=[partial(F.linear, x, weight) for weight in weights],
    )  # fmt: skip


# -- one row ----------------------------------------------------------------------------------------------------


def gemv_products(bench: Bench) -> Iterator[Case]:
    """One token's products with what is folded into them: norms, bias, RoPE, the KV store, SiLU, the residual."""
    if 1 not in bench.tokens or bench.config.qk_norm:  # a norm of q and k is not folded in: such a row runs as two do
        return
    for name, weights, bias in matrices(bench):
        launches = [_gemv(bench, name, weight, bias) for weight in weights]
        written = len(weights[0]) * (4 if name == "head" else bench.itemsize)
        yield product(bench, f"gemv {name}", launches, weights, 1, written)


def _gemv(bench: Bench, name: str, weight: Tensor, bias: Tensor | None) -> Launch:
    c, (rows, inner) = bench.config, weight.shape
    x_H = bench.random(c.hidden_size, dtype=torch.float32)
    norm_H, eps = bench.random(c.hidden_size), c.norm_eps
    if name == "qkv":
        q_ND, (k_cache, v_cache) = bench.random(c.num_heads, c.head_dim), kv_caches(bench, 1)
        cos_sin_D = bench.random(c.head_dim, dtype=torch.float32)
        return partial(
            gemv.norm_qkv_rope_store, x_H, norm_H, eps, weight, bias, cos_sin_D, q_ND, k_cache, v_cache,
            bench.integers([3]), gemv_tile("qkv", rows, inner, c.head_dim // 2),
        )  # fmt: skip
    if name == "gate_up":
        out_I = bench.random(rows // 2)
        tile = gemv_tile("gate_up", rows, inner)
        return partial(gemv.norm_gate_up_silu, x_H, norm_H, eps, weight, bias, out_I, tile)
    if name == "head":
        logits_V = bench.random(rows, dtype=torch.float32)
        return partial(gemv.norm_head, x_H, norm_H, eps, weight, logits_V, gemv_tile("head", rows, inner))
    return partial(gemv.gemv_add, bench.random(inner), weight, bias, x_H, gemv_tile("add", rows, inner))


# -- 2 to 64 rows -----------------------------------------------------------------------------------------------


def few_rows(bench: Bench) -> list[int]:
    """The numbers of rows that the narrow products are for; one row as well where it is not fused."""
    least = 1 if bench.config.qk_norm else 2
    return [tokens for tokens in bench.tokens if least <= tokens <= skinny_gemm.MAX_TOKENS]


def skinny_products(bench: Bench) -> Iterator[Case]:
    """Products with the weights as the large operand; partial sums where the inner dimension is split."""
    for name, weights, bias in matrices(bench):
        for tokens in few_rows(bench):
            launches = [_skinny(bench, name, weight, bias, tokens) for weight in weights]
            rows, inner = weights[0].shape
            each = bench.itemsize // 2 if name == "gate_up" else 4 * _splits(name, rows, inner, tokens)
            yield product(bench, f"skinny {name}", launches, weights, tokens, tokens * rows * each)


def _splits(name: str, rows: int, inner: int, tokens: int) -> int:
    return skinny_tile("head" if name == "head" else "gemm", rows, inner, tokens).splits


def _skinny(bench: Bench, name: str, weight: Tensor, bias: Tensor | None, tokens: int) -> Launch:
    rows, inner = weight.shape
    a_MI = bench.random(tokens, inner)
    if name == "gate_up":
        tile = skinny_tile("gate_up", rows, inner, tokens)
        return partial(skinny_gemm.skinny_gate_up_silu, a_MI, weight, bias, bench.random(tokens, rows // 2), tile)
    tile = skinny_tile("head" if name == "head" else "gemm", rows, inner, tokens)
    out_SMO = bench.random(tile.splits, tokens, rows, dtype=torch.float32)
    return partial(skinny_gemm.skinny_gemm, a_MI, weight, bias, out_SMO, tile)


def partial_sum_norms(bench: Bench) -> Iterator[Case]:
    """The residual plus the partial sums of o and of down, and the norm of that."""
    c = bench.config
    H, eps, weight_H = c.hidden_size, c.norm_eps, bench.random(c.hidden_size)
    for tokens in few_rows(bench):
        inners = (c.num_heads * c.head_dim, c.intermediate_size)
        for parts in sorted({_splits("o", H, inner, tokens) for inner in inners}):
            nbytes = float(tokens * H * (4 * parts + 8 + bench.itemsize))
            launches = [
                partial(
                    norm.add_rmsnorm, bench.random(parts, tokens, H, dtype=torch.float32),
                    bench.random(tokens, H, dtype=torch.float32), weight_H, eps, out=bench.random(tokens, H),
                )
                for _ in bench.copies(nbytes)
            ]  # fmt: skip
            yield chained(bench, "add_rmsnorm of sums", f"{parts} x {tokens} x {H}", launches, nbytes)


def partial_sum_ropes(bench: Bench) -> Iterator[Case]:
    """The partial sums of qkv, RoPE, and the store of K and V."""
    c = bench.config
    A, D = c.num_heads + 2 * c.num_kv_heads, c.head_dim
    norms = HeadNorms(bench.random(D), bench.random(D), c.norm_eps) if c.qk_norm else None
    for tokens in few_rows(bench):
        parts = _splits("qkv", A * D, c.hidden_size, tokens)
        nbytes = float(tokens * D * (A * (4 * parts + bench.itemsize) + 4))
        cos_sin = bench.random(tokens, D, dtype=torch.float32)
        slots, q_TND = bench.integers(torch.randperm(tokens)), bench.random(tokens, c.num_heads, D)
        launches = [
            partial(
                cache.rope_and_store, bench.random(parts, tokens, A, D, dtype=torch.float32), c.num_kv_heads, cos_sin,
                *kv_caches(bench, -(-tokens // BLOCK_SIZE)), slots, norms, out=q_TND,
            )
            for _ in bench.copies(nbytes)
        ]  # fmt: skip
        yield chained(bench, "rope_and_store of sums", f"{parts} x {tokens} x {A} x {D}", launches, nbytes)


# -- attention --------------------------------------------------------------------------------------------------


def decode_attention_of_rows(bench: Bench) -> Iterator[Case]:
    """One new token for each of B sequences of equal length, their blocks shuffled; B up to 256."""
    c = bench.config
    N, D = c.num_heads, c.head_dim
    for context in bench.contexts:
        for batch in (tokens for tokens in bench.tokens if tokens <= 256):
            blocks = -(-context // BLOCK_SIZE)
            kv_bytes = 2.0 * batch * context * c.num_kv_heads * D * bench.itemsize
            tables = bench.integers(torch.randperm(batch * blocks).view(batch, blocks), torch.int32)
            lengths, rows = bench.integers([context] * batch, torch.int32), bench.integers(range(batch), torch.int32)
            meta = DecodeMeta(tables, lengths, None, BLOCK_SIZE, rows, None)
            q_BND, out_BND = bench.random(batch, N, D), bench.random(batch, N, D)
            plan = decode_attention.decode_plan(batch, c.num_kv_heads)
            floats = decode_attention.workspace_floats(batch, N, D, plan)
            launches = [
                partial(
                    decode_attention.paged_decode_attention, q_BND, *kv_caches(bench, batch * blocks), meta, D**-0.5,
                    out=out_BND, workspace=bench.random(floats, dtype=torch.float32),
                )
                for _ in bench.copies(kv_bytes)
            ]  # fmt: skip
            size, nbytes, flops = f"{batch} x {context}", kv_bytes + 2 * q_BND.nbytes, 4.0 * batch * context * N * D
            if batch <= skinny_gemm.MAX_TOKENS:
                yield chained(bench, "decode attention", size, launches, nbytes, flops=flops)
            else:
                yield Case("decode attention", size, [*launches], nbytes, flops)


CHAIN_BUILDERS: list[Callable[[Bench], Iterator[Case]]] = [
    gemv_products,
    skinny_products,
    partial_sum_norms,
    partial_sum_ropes,
    decode_attention_of_rows,
]
