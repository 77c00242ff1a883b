"""top_k, top_p and min_p in Triton without a sort. Shapes: R rows, V vocabulary, B blocks of a row, C columns.

Wanted is one rank per row, its cut (see `kernels.gpu.sampling_keys`): what ranks lower is not allowed. Nearly always
the cut is among a few hundred best tokens. They are found without a search: of C columns (ids that are equal modulo C)
the n-th best maximum is a pivot that at least n tokens reach, and seldom many more. Those are written down and ranked
one against the other. Where the cut is not among them, `kernels.gpu.sampling_search` finds it.

Sums of float32 are made in an order that depends on V alone, so a row's cut does not depend on the batch. Those of the
found tokens, whose order is not fixed, are made of integers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import sampling_search as search
from kernels.gpu.launch import next_power_of_2
from kernels.gpu.sampling_keys import (
    HIGHEST_KEY,
    LARGEST_FINITE,
    LOWEST_KEY,
    LOWEST_RANK,
    NOT_FILTERED,
    ONE,
    SEARCHED,
    SETTLED,
    SMALLEST_FINITE,
    amount_before,
    append,
    float_of,
    key_of,
    lowest_of,
    rank_of,
    reset_found,
    weight_of,
)
from kernels.sampling_tensors import SamplingTensors

# A row's columns, and how many of their maxima reach the pivot: of 151,936 tokens about 360 do then. COLUMNS divides
# `search.BLOCK`, and twice the tokens that reach a pivot still fit in `search.MAX_FOUND`.
COLUMNS = 512
HEAD = 256


def find_cuts(logits_RV: Tensor, slots_R: Tensor, state: SamplingTensors) -> Tensor:
    """Divide the logits by the temperature, in place, and give each row's cut (int64 [R]): the lowest rank allowed.

    Greedy rows are not divided, and their cuts not set; nothing is cut from a row whose largest logit is not finite.
    """
    R, V = logits_RV.shape
    B, device = triton.cdiv(V, search.BLOCK), logits_RV.device
    rows = search.Rows.allocate(logits_RV)
    columns_RBC = torch.empty((R, B, COLUMNS), dtype=torch.int32, device=device)
    lowest_RB = torch.empty((R, B), dtype=torch.int32, device=device)
    sums_RB = torch.empty((R, B), dtype=torch.float32, device=device)
    limits = (state.top_k_S, state.top_p_S, state.min_p_S)
    options = {"num_warps": search.WARPS, "enable_fp_fusion": False}
    _divide[(R, B)](
        *rows.logits, slots_R, state.temperature_S, columns_RBC, lowest_RB, V,
        BLOCK=search.BLOCK, C=COLUMNS, **options,
    )  # fmt: skip
    _find_pivot[(R,)](
        slots_R, state.temperature_S, *limits, columns_RBC, lowest_RB, *rows.results, *rows.found, B, V,
        C=COLUMNS, HEAD=HEAD, **options,
    )  # fmt: skip
    _write_head[(R, B)](
        *rows.logits, *rows.results, *rows.found, sums_RB, V,
        BLOCK=search.BLOCK, MAX_FOUND=search.MAX_FOUND, **options,
    )  # fmt: skip
    _settle_head[(R,)](
        slots_R, *limits, *rows.results, *rows.found, sums_RB, B, V,
        BLOCKS=next_power_of_2(B), HEAD=HEAD, MAX_FOUND=search.MAX_FOUND, **options,
    )  # fmt: skip
    search.finish_cuts(rows, slots_R, state)
    return rows.cuts_R


@triton.jit
def _divide(
    logits, stride_r, stride_v, slots, temperature_S, columns, lowest, V, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Divide a block by the temperature; its highest key in each column, and its lowest of a finite logit."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(temperature_S + slot)
    if temperature == 0:
        return
    c = tl.arange(0, C)
    ids = block * BLOCK + tl.arange(0, BLOCK // C)[:, None] * C + c[None, :]
    inside = ids < V
    place = logits + row * stride_r + ids.to(tl.int64) * stride_v
    x = tl.div_rn(tl.load(place, mask=inside, other=0.0), temperature)
    tl.store(place, x, mask=inside)
    key = key_of(x)
    finite = inside & (key >= SMALLEST_FINITE) & (key <= LARGEST_FINITE)
    entry = row * tl.num_programs(1) + block
    tl.store(columns + entry * C + c, tl.max(tl.where(inside, key, LOWEST_KEY), axis=0))
    tl.store(lowest + entry, tl.min(tl.min(tl.where(finite, key, HIGHEST_KEY), axis=0), axis=0))


@triton.jit
def _find_pivot(
    slots, temperature_S, top_k_S, top_p_S, min_p_S, columns, lowest_RB, edges, settled, cuts, found, ranks, blocks, V,
    C: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """The row's highest key, its lowest of a finite logit, and the pivot: the n-th best column, n = HEAD or top_k."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(settled + row, NOT_FILTERED)
    tl.store(cuts + row, LOWEST_RANK)
    reset_found(found + row * 3)
    if slot < 0:
        return
    top_k = tl.load(top_k_S + slot)
    filtered = (tl.load(top_p_S + slot) < 1) | (tl.load(min_p_S + slot) > 0) | ((top_k > 0) & (top_k < V))
    if (tl.load(temperature_S + slot) == 0) | (filtered == 0):
        return
    c = tl.arange(0, C)
    best_C = tl.full((C,), LOWEST_KEY, tl.int32)
    lowest = tl.full((), HIGHEST_KEY, tl.int32)
    for block in range(blocks):
        best_C = tl.maximum(best_C, tl.load(columns + (row * blocks + block) * C + c))
        lowest = tl.minimum(lowest, tl.load(lowest_RB + row * blocks + block))
    highest = tl.max(best_C, axis=0)
    if (highest > LARGEST_FINITE) | (highest < SMALLEST_FINITE):
        return
    number = tl.where((top_k > 0) & (top_k < HEAD), top_k, HEAD)
    number = tl.minimum(tl.maximum(number, 1), tl.minimum(V, C))
    # The highest key that so many columns reach; int64, because a difference of keys does not fit into 32 bits.
    lo = tl.full((), LOWEST_KEY, tl.int64)
    hi = highest.to(tl.int64) + 1
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        enough = tl.sum((best_C >= middle).to(tl.int32), axis=0) >= number
        lo = tl.where(enough, middle, lo)
        hi = tl.where(enough, hi, middle)
    tl.store(edges + row * 3, highest)
    tl.store(edges + row * 3 + 1, lowest)
    tl.store(edges + row * 3 + 2, lo.to(tl.int32))
    tl.store(settled + row, SEARCHED)


@triton.jit
def _write_head(
    logits, stride_r, stride_v, edges, settled, cuts, found, ranks, sums, V, BLOCK: tl.constexpr,
    MAX_FOUND: tl.constexpr,
):  # fmt: skip
    """Write down what reaches the pivot, and sum the weights of a block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(settled + row) != SEARCHED:
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=float("-inf"))
    key = key_of(x)
    weight = tl.exp(x - float_of(tl.load(edges + row * 3)))
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(weight, axis=0))
    member = (ids < V) & (key >= tl.load(edges + row * 3 + 2))
    append(member, rank_of(key, ids), found + row * 3, ranks + row * MAX_FOUND, MAX_FOUND)


@triton.jit
def _settle_head(
    slots, top_k_S, top_p_S, min_p_S, edges, settled, cuts, found, ranks, sums, blocks, V, BLOCKS: tl.constexpr,
    HEAD: tl.constexpr, MAX_FOUND: tl.constexpr,
):  # fmt: skip
    """The cut of top_k and top_p, if it is among the found tokens. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(settled + row) != SEARCHED:
        return
    number = tl.load(found + row * 3)
    if number > MAX_FOUND:
        return
    slot = tl.load(slots + row).to(tl.int64)
    top_k = tl.load(top_k_S + slot)
    top_p = tl.load(top_p_S + slot)
    has_k = (top_k > 0) & (top_k < V)
    all_of_k = has_k & (top_k <= HEAD)
    best = float_of(tl.load(edges + row * 3))
    i = tl.arange(0, MAX_FOUND)
    mine = tl.load(ranks + row * MAX_FOUND + i, mask=i < number, other=LOWEST_RANK)
    weight = weight_of(mine, best)
    stays = (i < number) & (amount_before(mine, ranks + row * MAX_FOUND, number, best, False, MAX_FOUND) < top_k)
    stays = stays | ((i < number) & (has_k == 0))
    # top_p is a share of what top_k left.
    b = tl.arange(0, BLOCKS)
    whole = tl.sum(tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0), axis=0)
    left = tl.sum(tl.where(stays, weight, 0), axis=0)
    share = tl.where(all_of_k, left.to(tl.float32), whole * ONE) * top_p
    target = tl.maximum(share.to(tl.int64), 1)
    if top_p < 1:
        before = amount_before(mine, ranks + row * MAX_FOUND, number, best, True, MAX_FOUND)
        stays = stays & (before < target)
    only_p = (has_k == 0) & (top_p < 1)
    if all_of_k | (only_p & (left >= target)):
        tl.store(cuts + row, lowest_of(mine, stays))
        tl.store(settled + row, SETTLED)
    if (has_k == 0) & (top_p >= 1):
        tl.store(settled + row, SETTLED)
