"""Paged attention of one query token per sequence: split over the context, then combined in a fixed order.

A program attends one split of one sequence for all query heads of one KV head at once: they are the rows of one
matrix product, so K and V are read once. Splits follow from the length on the device, so one launch (and one CUDA
graph) serves every length. A length gives the same splits whatever else is in the batch bucket.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import pdl_options, wait_for_earlier_kernels
from kernels.reference.attention import DecodeMeta

LOG2_E = 1.4426950408889634
# tl.dot wants at least 16 rows.
SMALLEST_DOT = 16
# About one program for each multiprocessor of a large GPU: more splits cost more in the combination than they save.
ENOUGH_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a launch is cut: ``splits`` of each context, of at least ``first`` tokens, read ``tile`` at a time."""

    splits: int
    first: int
    tile: int
    warps: int = 4
    stages: int = 2


def decode_plan(num_rows: int, num_kv_heads: int) -> DecodePlan:
    """Many small splits for few sequences, none where there are enough of them (figures in docs/decisions.md)."""
    splits = min(max(triton.next_power_of_2(ENOUGH_PROGRAMS // (num_rows * num_kv_heads)), 1), 64)
    return DecodePlan(splits, first=32, tile=32 if splits == 64 else 64, warps=8 if splits >= 8 else 4)


def workspace_floats(num_rows: int, num_heads: int, head_dim: int, plan: DecodePlan) -> int:
    """float32 elements of scratch that a launch needs."""
    return 0 if plan.splits == 1 else num_rows * num_heads * plan.splits * (head_dim + 2)


def paged_decode_attention(
    q_BND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: DecodeMeta,
    scale: float,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    plan: DecodePlan | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `kernels.reference.attention.paged_decode_attention`; ``meta.host_lens`` are not used.

    ``out`` [B, N, D] and ``workspace`` (float32, at least `workspace_floats`) may be given, as a CUDA graph needs.
    """
    B, N, D = q_BND.shape
    K = k_cache.shape[2]
    plan = plan or decode_plan(B, K)
    out = torch.empty((B, N, D), dtype=q_BND.dtype, device=q_BND.device) if out is None else out
    if workspace is None:
        workspace = torch.empty(workspace_floats(B, N, D, plan), dtype=torch.float32, device=q_BND.device)
    heads = meta.heads
    group, first = (heads.size, heads.first) if heads is not None else (N // K, 0)
    part = workspace[: B * N * plan.splits * D]
    stats = workspace[B * N * plan.splits * D :]
    rows = meta.block_tables if meta.table_rows is None else meta.table_rows
    _attend_split[(B, K, plan.splits)](
        q_BND, k_cache, v_cache, meta.block_tables, rows, meta.context_lens, part, stats, out,
        scale * LOG2_E, q_BND.stride(0), q_BND.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), meta.block_tables.stride(0),
        out.stride(0), out.stride(1), N, first, GROUP=group,
        ROWS=max(SMALLEST_DOT, triton.next_power_of_2(group)), D=D, D_PAD=triton.next_power_of_2(D),
        BLOCK_SIZE=meta.block_size, SPLITS=plan.splits, FIRST=plan.first, TILE=plan.tile,
        HAS_ROWS=meta.table_rows is not None, PDL=pdl, num_warps=plan.warps, num_stages=plan.stages, **pdl_options(pdl),
    )  # fmt: skip
    if plan.splits > 1:
        _combine_splits[(B, N)](
            part, stats, rows, meta.context_lens, out, out.stride(0), out.stride(1), N,
            D=D, D_PAD=triton.next_power_of_2(D), SPLITS=plan.splits, FIRST=plan.first,
            HAS_ROWS=meta.table_rows is not None, PDL=pdl, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip
    return out


@triton.jit
def _length(rows, lens, b, HAS_ROWS: tl.constexpr):
    """The context length of sequence b, 0 for a padded row."""
    n = tl.load(lens + b)
    if HAS_ROWS:
        n = tl.where(tl.load(rows + b) < 0, 0, n)
    return n.to(tl.int32)


@triton.jit
def _split_length(n, SPLITS: tl.constexpr, FIRST: tl.constexpr):
    """Tokens of each split: a multiple of FIRST, the same in both kernels."""
    return tl.maximum(tl.cdiv(tl.cdiv(n, SPLITS), FIRST) * FIRST, FIRST)


@triton.jit
def _kv_offsets(table, t, ok, stride_block, stride_position, BLOCK_SIZE: tl.constexpr):
    """Element offsets of the positions ``t``; a pool may be larger than 2^31 elements."""
    block = tl.load(table + t // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
    return block * stride_block + (t % BLOCK_SIZE) * stride_position


@triton.jit
def _attend_split(
    q, k_cache, v_cache, tables, rows, lens, part, stats, out,
    scale, stride_qb, stride_qn, stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh, stride_tb,
    stride_ob, stride_on, num_heads, first_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one sequence, for the query heads of one KV head.

    Under PDL all KV but the newest token's is loaded before the wait: no kernel of the chain writes it, nor lengths and
    tables. q and the newest token's KV come from the kernel right before.
    """
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = _length(rows, lens, b, HAS_ROWS)
    table_row = tl.load(rows + b).to(tl.int64) if HAS_ROWS else b.to(tl.int64)
    table = tables + tl.maximum(table_row, 0) * stride_tb
    per = _split_length(n, SPLITS, FIRST)
    start = s * per
    end = tl.minimum(start + per, n)
    d = tl.arange(0, D_PAD)
    d_ok = (d < D)[None, :]
    t = start + tl.arange(0, FIRST)
    old = t < n - 1
    k_base, v_base = k_cache + h * stride_kh + d[None, :], v_cache + h * stride_vh + d[None, :]
    kx = tl.load(k_base + _kv_offsets(table, t, old, stride_kb, stride_kp, BLOCK_SIZE)[:, None],
                 mask=old[:, None] & d_ok, other=0.0)  # fmt: skip
    vx = tl.load(v_base + _kv_offsets(table, t, old, stride_vb, stride_vp, BLOCK_SIZE)[:, None],
                 mask=old[:, None] & d_ok, other=0.0)  # fmt: skip
    wait_for_earlier_kernels(PDL)
    if start >= n:
        return
    newest = (n - 1 + tl.arange(0, 1)).to(tl.int32)
    kn = tl.load(k_base + _kv_offsets(table, newest, newest >= 0, stride_kb, stride_kp, BLOCK_SIZE)[:, None],
                 mask=d_ok, other=0.0)  # fmt: skip
    vn = tl.load(v_base + _kv_offsets(table, newest, newest >= 0, stride_vb, stride_vp, BLOCK_SIZE)[:, None],
                 mask=d_ok, other=0.0)  # fmt: skip
    is_newest = (t == n - 1)[:, None]
    kx, vx = tl.where(is_newest, kn, kx), tl.where(is_newest, vn, vx)
    r = tl.arange(0, ROWS)
    head = (h + first_head // GROUP) * GROUP - first_head + r
    head_ok = (r < GROUP) & (head >= 0) & (head < num_heads)
    qx = tl.load(q + b.to(tl.int64) * stride_qb + head[:, None] * stride_qn + d[None, :],
                 mask=head_ok[:, None] & d_ok, other=0.0)  # fmt: skip

    scores = tl.dot(qx, tl.trans(kx), input_precision="ieee") * scale
    scores = tl.where((t < end)[None, :], scores, -float("inf"))
    m = tl.max(scores, 1)
    p = tl.exp2(scores - m[:, None])
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(vx.dtype), vx, input_precision="ieee")
    for t0 in range(start + FIRST, end, TILE):
        u = t0 + tl.arange(0, TILE)
        u_ok = u < end
        at_k = _kv_offsets(table, u, u_ok, stride_kb, stride_kp, BLOCK_SIZE)
        at_v = _kv_offsets(table, u, u_ok, stride_vb, stride_vp, BLOCK_SIZE)
        ku = tl.load(k_base + at_k[:, None], mask=u_ok[:, None] & d_ok, other=0.0)
        vu = tl.load(v_base + at_v[:, None], mask=u_ok[:, None] & d_ok, other=0.0)
        more = tl.dot(qx, tl.trans(ku), input_precision="ieee") * scale
        more = tl.where(u_ok[None, :], more, -float("inf"))
        m_new = tl.maximum(m, tl.max(more, 1))
        pu = tl.exp2(more - m_new[:, None])
        decay = tl.exp2(m - m_new)
        acc = acc * decay[:, None] + tl.dot(pu.to(vu.dtype), vu, input_precision="ieee")
        total = total * decay + tl.sum(pu, 1)
        m = m_new

    out_mask = head_ok[:, None] & d_ok
    if SPLITS == 1:
        o = out + b.to(tl.int64) * stride_ob + head[:, None] * stride_on + d[None, :]
        tl.store(o, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        at = (b.to(tl.int64) * num_heads + head) * SPLITS + s
        tl.store(part + at[:, None] * D + d[None, :], acc, mask=out_mask)
        tl.store(stats + at * 2, m, mask=head_ok)
        tl.store(stats + at * 2 + 1, total, mask=head_ok)


@triton.jit
def _combine_splits(
    part, stats, rows, lens, out, stride_ob, stride_on, num_heads,
    D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr, HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence; splits are summed in a fixed order. Splits past the length were not written."""
    b, head = tl.program_id(0), tl.program_id(1)
    n = _length(rows, lens, b, HAS_ROWS)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    used = s * _split_length(n, SPLITS, FIRST) < n
    at = (b.to(tl.int64) * num_heads + head) * SPLITS + s
    wait_for_earlier_kernels(PDL)
    if n == 0:
        return
    m = tl.load(stats + at * 2, mask=used, other=-float("inf"))
    total = tl.load(stats + at * 2 + 1, mask=used, other=0.0)
    acc = tl.load(part + at[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
    weight = tl.exp2(m - tl.max(m, 0))
    o = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    at_out = out + b.to(tl.int64) * stride_ob + head * stride_on + d
    tl.store(at_out, o.to(out.dtype.element_ty), mask=d < D)
