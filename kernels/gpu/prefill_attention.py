"""Causal attention of prompt chunks over paged KV in Triton, with an online softmax (FlashAttention, arXiv 2307.08691).

One program has BLOCK_M query tokens of one sequence and one query head. It walks over its KV positions BLOCK_N at a
time: first those that all of its tokens see, without a mask, then the diagonal and the end of the context. It never
reads KV past the context. Lengths, starts and block tables are read on the device, so that a graph of a launch serves
any batch that fits its shapes.

A few tokens after a long prefix make too few programs for a GPU: then several share a tile's KV positions, and a second
kernel combines what they found, in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2
from kernels.reference.attention import HeadGroups, PrefillMeta

LOG2_E = 1.4426950408889634
# Multiprocessors of the GPU. With fewer programs smaller tiles finish sooner, and two of those fit on each.
_MULTIPROCESSORS = 132
_MAX_SPLITS = 8
# KV positions that are worth a program of their own.
_MIN_SPLIT = 256


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """``queries`` tokens of a program, ``keys`` positions of a step of it; both powers of two, at least 16."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the power of two at or above head_dim. The first where it gives enough programs, else the second.
HALF_TILES: dict[int, tuple[PrefillTile, PrefillTile]] = {
    16: (PrefillTile(128, 64, 4, 3), PrefillTile(64, 64, 4, 3)),
    32: (PrefillTile(128, 64, 4, 3), PrefillTile(64, 64, 4, 3)),
    64: (PrefillTile(128, 128, 8, 3), PrefillTile(64, 64, 4, 3)),
    128: (PrefillTile(128, 128, 8, 3), PrefillTile(64, 64, 4, 3)),
    256: (PrefillTile(128, 32, 8, 3), PrefillTile(64, 64, 8, 2)),
}
# Without tensor cores; a larger one spills registers where heads are wide.
FLOAT32_TILE = PrefillTile(16, 16, 4, 2)


def choose_tile(dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int) -> PrefillTile:
    """The tile for ``num_tokens`` rows of queries, by what the host knows of a batch."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    large, small = HALF_TILES[max(next_power_of_2(head_dim), 16)]
    return large if -(-num_tokens // large.queries) * num_heads >= _MULTIPROCESSORS else small


def choose_splits(tile: PrefillTile, num_tokens: int, num_heads: int) -> int:
    """How many programs share the KV positions of a tile, so that all multiprocessors have work: a power of two."""
    programs = -(-num_tokens // tile.queries) * num_heads
    splits = 1
    while programs < _MULTIPROCESSORS and 2 * splits * programs <= 2 * _MULTIPROCESSORS and 2 * splits <= _MAX_SPLITS:
        splits *= 2
    return splits


def paged_prefill_attention(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PrefillMeta,
    scale: float,
    out_TND: Tensor,
    *,
    num_tiles: int | None = None,
    tile: PrefillTile | None = None,
    splits: int | None = None,
) -> None:
    """As `kernels.reference.attention.paged_prefill_attention`; reads the device's tensors of ``meta`` only.

    ``num_tiles`` bounds the tiles of ``tile.queries`` tokens: at least ``T // tile.queries + B``, which is the default
    with T the rows of ``q_TND``, where T may be the rows that belong to a sequence. ``scale`` > 0. The last dimensions
    are dense, K and V of a layer are laid out alike, head_dim is at most 256. Rows of no sequence are not written.
    ``splits`` programs share a tile's KV positions, at least 256 each.
    """
    T, N, D = q_TND.shape
    B = meta.context_lens.shape[0]
    assert k_cache.stride() == v_cache.stride(), "K and V of a layer are laid out alike"
    assert q_TND.stride(2) == k_cache.stride(3) == out_TND.stride(2) == meta.block_tables.stride(1) == 1
    if T == 0 or B == 0:
        return
    tile = tile or choose_tile(q_TND.dtype, T, N, D)
    splits = splits or choose_splits(tile, T, N)
    heads = meta.heads or HeadGroups(N // k_cache.shape[2])
    block_d = max(next_power_of_2(D), 16)
    part_STND, weight_STN = out_TND, None
    if splits > 1:
        part_STND = torch.empty((splits, T, N, D), dtype=torch.float32, device=q_TND.device)
        weight_STN = torch.empty((splits, T, N), dtype=torch.float32, device=q_TND.device)
    _prefill_kernel[(N, T // tile.queries + B if num_tiles is None else num_tiles, splits)](
        q_TND, k_cache, v_cache, part_STND, weight_STN, meta.block_tables, meta.query_starts, meta.context_lens,
        scale * LOG2_E, T, N, B, q_TND.stride(0), q_TND.stride(1), part_STND.stride(-3), part_STND.stride(-2),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), meta.block_tables.stride(0),
        GROUP=heads.size, FIRST=heads.first % heads.size, D=D, BLOCK_SIZE=k_cache.shape[1], BLOCK_M=tile.queries,
        BLOCK_N=tile.keys, BLOCK_D=block_d, SEQUENCES=next_power_of_2(B), SPLITS=splits, MIN_SPLIT=_MIN_SPLIT,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(T, N)](
            part_STND, weight_STN, out_TND, meta.query_starts, T, N, B, out_TND.stride(0), out_TND.stride(1),
            D=D, BLOCK_D=block_d, SPLITS=splits, BLOCK_SPLITS=next_power_of_2(splits), num_warps=1,
        )  # fmt: skip


@triton.jit
def _find_tile(
    starts_ptr: tl.tensor, num_sequences: tl.tensor, tile: tl.tensor, BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(sequence, its first token of this tile). A sequence's tiles begin at ``start // BLOCK_M`` plus its number.

    So they are at least as many as it needs, and all sequences are looked at at once.
    """
    b = tl.arange(0, SEQUENCES)
    origin = tl.load(starts_ptr)
    starts = tl.load(starts_ptr + b, mask=b < num_sequences, other=0)
    begun = ((starts - origin) // BLOCK_M + b <= tile) & (b < num_sequences)
    sequence = tl.sum(begun.to(tl.int32)) - 1
    first_tile = (tl.load(starts_ptr + sequence) - origin) // BLOCK_M + sequence
    return sequence, (tile - first_tile).to(tl.int32) * BLOCK_M


@triton.jit
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over KV positions [begin, end); MASKED: queries see up to their own ``position``.

    Without MASKED, end - begin is a multiple of BLOCK_N. ``highest`` is the running maximum in units of log 2.
    """
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    for at in tl.range(begin, end, BLOCK_N):
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table_ptr + at // BLOCK_SIZE)
            offset = block.to(tl.int64) * block_stride + (at % BLOCK_SIZE + n).to(tl.int64) * slot_stride
        else:
            if MASKED:
                block = tl.load(table_ptr + (at + n) // BLOCK_SIZE, mask=at + n < end, other=0)
            else:
                block = tl.load(table_ptr + (at + n) // BLOCK_SIZE)
            offset = block.to(tl.int64) * block_stride + ((at + n) % BLOCK_SIZE).to(tl.int64) * slot_stride
        k_ptrs = k_ptr + offset[None, :] + d[:, None]
        v_ptrs = v_ptr + offset[:, None] + d[None, :]
        if MASKED:
            k = tl.load(k_ptrs, mask=(at + n < end)[None, :] & (d < D)[:, None], other=0.0)
        elif D == BLOCK_D:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            scores = tl.where((at + n)[None, :] <= position[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        # A query may see nothing of a split: minus infinity is not subtracted from itself.
        origin = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(scores * scale_log2 - origin[:, None])
        shrink = tl.exp2(highest - origin)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            v = tl.load(v_ptrs, mask=(at + n < end)[:, None] & (d < D)[None, :], other=0.0)
        elif D == BLOCK_D:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(d < D)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest
    return acc, total, highest


@triton.jit
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    contexts_ptr: tl.tensor,
    scale_log2: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_sequences: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
) -> None:
    # The last tiles of a prompt have the most to do and start first; the heads of a tile run side by side and
    # find the KV of their group in the L2 cache.
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, row = _find_tile(starts_ptr, num_sequences, tile, BLOCK_M, SEQUENCES)
    start = tl.load(starts_ptr + sequence)
    length = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    if row >= length:
        return
    context = tl.load(contexts_ptr + sequence).to(tl.int32)
    first = context - length + row
    begin, end = 0, tl.minimum(context, first + BLOCK_M)
    full_end = (first + 1) // BLOCK_N * BLOCK_N
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N, MIN_SPLIT)
        begin = tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
        full_end = tl.minimum(tl.maximum(full_end, begin), end)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows = (start + row).to(tl.int64) + m
    row_mask = row + m < length
    mask = row_mask[:, None] & (d < D)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    q_ptrs = q_ptr + head.to(tl.int64) * q_head_stride + rows[:, None] * q_stride + d[None, :]
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    kv_offset = ((FIRST + head) // GROUP).to(tl.int64) * kv_head_stride
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    acc, total, highest = _attend(
        acc, total, highest, q, first + m, k_ptr + kv_offset, v_ptr + kv_offset, table_ptr, begin, full_end,
        scale_log2, block_stride, slot_stride, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=False,
    )  # fmt: skip
    acc, total, highest = _attend(
        acc, total, highest, q, first + m, k_ptr + kv_offset, v_ptr + kv_offset, table_ptr, full_end, end,
        scale_log2, block_stride, slot_stride, D, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=True,
    )  # fmt: skip
    if SPLITS > 1:
        rows += tl.program_id(2).to(tl.int64) * num_rows
        found = total > 0
        weight = tl.where(found, highest + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
        tl.store(weight_ptr + rows * num_heads + head, weight, mask=row_mask)
        mask = mask & found[:, None]
        total = tl.where(found, total, 1.0)
    out = acc / total[:, None]
    out_ptrs = out_ptr + head.to(tl.int64) * out_head_stride + rows[:, None] * out_stride + d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    part_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    num_sequences: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    """One program per row and head; a split that found nothing has the weight minus infinity and no values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (row < tl.load(starts_ptr)) | (row >= tl.load(starts_ptr + num_sequences)):
        return
    split = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    at = (split.to(tl.int64) * num_rows + row) * num_heads + head
    weight = tl.load(weight_ptr + at, mask=split < SPLITS, other=float("-inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    mask = (share > 0)[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    out = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    out_ptrs = out_ptr + row * out_stride + head.to(tl.int64) * out_head_stride + d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d < D)
