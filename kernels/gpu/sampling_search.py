"""The cut of a row that is not among its best few hundred tokens (see `kernels.gpu.sampling_filters`).

Shapes: R rows, V vocabulary, B blocks of a row, T thresholds. Two searches, each for the rows that need it: for the
k-th token, then for the one at which the probability reaches its share. Either lies between two keys, ``lo`` with
enough above it and ``hi`` with too little. A pass sums what is above T thresholds between them and brings them T + 1
times closer. After PASSES passes few tokens are in between; they are written down and ranked one against the other.
Where they are too many, as with equal logits, one program goes on over the whole row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2
from kernels.gpu.sampling_keys import (
    LOWEST_KEY,
    LOWEST_RANK,
    NOT_FILTERED,
    ONE,
    SEARCHED,
    amount_before,
    append,
    float_of,
    key_of,
    lowest_of,
    rank_of,
    reset_found,
)
from kernels.sampling_tensors import SamplingTensors

# Elements of a row that one program takes, and those it takes at once: STEP divides BLOCK.
BLOCK = 4096
STEP = 512
THRESHOLDS = 16
PASSES = 3
# So many tokens at most are ranked one against the other.
MAX_FOUND = 1024
WARPS = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """What the kernels of the filters share.

    ``edges``: the highest key, the lowest of a finite logit, the pivot; ``settled``: how far the row is;
    ``found``: number, lowest and highest key of the tokens in ``ranks``.
    """

    logits_RV: Tensor
    edges_R3: Tensor
    settled_R: Tensor
    cuts_R: Tensor
    found_R3: Tensor
    ranks_RF: Tensor

    @classmethod
    def allocate(cls, logits_RV: Tensor) -> "Rows":
        R, device = logits_RV.shape[0], logits_RV.device
        return cls(
            logits_RV,
            torch.empty((R, 3), dtype=torch.int32, device=device),
            torch.empty(R, dtype=torch.int32, device=device),
            torch.empty(R, dtype=torch.int64, device=device),
            torch.empty((R, 3), dtype=torch.int32, device=device),
            torch.empty((R, MAX_FOUND), dtype=torch.int64, device=device),
        )

    @property
    def logits(self) -> tuple[Tensor, int, int]:
        return self.logits_RV, self.logits_RV.stride(0), self.logits_RV.stride(1)

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.edges_R3, self.settled_R, self.cuts_R

    @property
    def found(self) -> tuple[Tensor, Tensor]:
        return self.found_R3, self.ranks_RF


def finish_cuts(rows: Rows, slots_R: Tensor, state: SamplingTensors) -> None:
    """Complete ``rows.cuts_R``: the searches that are still needed, then min_p.

    Entry p of ``bounds`` is (lo, hi), of ``levels`` (sum above hi, sum wanted or 0 = not known yet), as pass p found
    them. The last entry is what remains after all passes.
    """
    R, V = rows.logits_RV.shape
    B, device = triton.cdiv(V, BLOCK), slots_R.device
    # An even number of rows: every pass begins at a multiple of 16 bytes, or Triton makes kernels of two kinds.
    bounds = torch.empty((PASSES + 1, R + R % 2, 2), dtype=torch.int32, device=device)
    levels = torch.empty((PASSES + 1, R + R % 2, 2), dtype=torch.float32, device=device)
    thresholds = torch.empty((PASSES, R, THRESHOLDS), dtype=torch.int32, device=device)
    sums = torch.empty((PASSES, R, B, THRESHOLDS), dtype=torch.float32, device=device)
    limits = (slots_R, state.top_k_S, state.top_p_S)
    sizes = {"BLOCK": BLOCK, "BLOCKS": next_power_of_2(B), "T": THRESHOLDS}
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    for weigh in (False, True):
        for p in range(PASSES):
            before = (bounds[p - 1], levels[p - 1], thresholds[p - 1], sums[p - 1])
            _sum_above[(R, B)](
                *rows.logits, *limits, *rows.results, rows.found_R3, *before,
                bounds[p], levels[p], thresholds[p], sums[p], V, PASS=p, WEIGH=weigh, STEP=STEP, **sizes, **options,
            )  # fmt: skip
        _write_between[(R, B)](
            *rows.logits, *limits, *rows.results, *rows.found, bounds[-2], levels[-2], thresholds[-1], sums[-1],
            bounds[-1], levels[-1], V, WEIGH=weigh, MAX_FOUND=MAX_FOUND, **sizes, **options,
        )  # fmt: skip
        _settle[(R,)](
            *rows.logits, *limits, state.min_p_S, *rows.results, *rows.found, bounds[-1], levels[-1], V,
            WEIGH=weigh, MAX_FOUND=MAX_FOUND, STEP=STEP, T=THRESHOLDS, **options,
        )  # fmt: skip


@triton.jit
def _sum_above(
    logits, stride_r, stride_v, slots, top_k_S, top_p_S, edges, settled, cuts, found, bounds_before, levels_before,
    thresholds_before, sums_before, bounds, levels, thresholds, sums, V, PASS: tl.constexpr, WEIGH: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One pass: number or weight of a block's tokens above each threshold. Weighed are only those that top_k left.

    The first one empties the list of found tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    if tl.load(settled + row) != SEARCHED:
        return
    slot = tl.load(slots + row).to(tl.int64)
    if not _is_wanted(slot, top_k_S, top_p_S, V, WEIGH):
        return
    highest = tl.load(edges + row * 3)
    lo = tl.full((), LOWEST_KEY, tl.int32)
    hi = highest
    above_hi = tl.full((), 0.0, tl.float32)
    target = above_hi if WEIGH else tl.load(top_k_S + slot).to(tl.float32)
    if PASS > 0:
        top_p = tl.load(top_p_S + slot)
        lo, hi, above_hi, target = _narrow(
            row, blocks, bounds_before, levels_before, thresholds_before, sums_before, top_p, BLOCKS, T
        )
    keys_T = _spread(lo, hi, highest, tl.load(edges + row * 3 + 1), PASS == 0, WEIGH, T)
    t = tl.arange(0, T)
    if block == 0:
        _store_entry(bounds + row * 2, levels + row * 2, lo, hi, above_hi, target)
        tl.store(thresholds + row * T + t, keys_T)
        if PASS == 0:
            reset_found(found + row * 3)
    cut = tl.load(cuts + row)
    total_TC = tl.zeros((T, STEP), tl.float32)
    for start in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, V), STEP):
        total_TC = _add_above(
            total_TC, logits + row * stride_r, stride_v, start, V, keys_T, cut, float_of(highest), WEIGH, STEP
        )
    tl.store(sums + (row * blocks + block) * T + t, tl.sum(total_TC, axis=1))


@triton.jit
def _write_between(
    logits, stride_r, stride_v, slots, top_k_S, top_p_S, edges, settled, cuts, found, ranks, bounds_before,
    levels_before, thresholds_before, sums_before, bounds, levels, V, WEIGH: tl.constexpr, MAX_FOUND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write down a block's tokens between the final bounds."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(settled + row) != SEARCHED:
        return
    slot = tl.load(slots + row).to(tl.int64)
    if not _is_wanted(slot, top_k_S, top_p_S, V, WEIGH):
        return
    top_p = tl.load(top_p_S + slot)
    lo, hi, above_hi, target = _narrow(
        row, tl.num_programs(1), bounds_before, levels_before, thresholds_before, sums_before, top_p, BLOCKS, T
    )
    if block == 0:
        _store_entry(bounds + row * 2, levels + row * 2, lo, hi, above_hi, target)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=0.0)
    key = key_of(x)
    rank = rank_of(key, ids)
    member = (ids < V) & (key > lo) & (key <= hi)
    if WEIGH:
        member = member & (rank >= tl.load(cuts + row))
    append(member, rank, found + row * 3, ranks + row * MAX_FOUND, MAX_FOUND)


@triton.jit
def _settle(
    logits, stride_r, stride_v, slots, top_k_S, top_p_S, min_p_S, edges, settled, cuts, found, ranks, bounds, levels,
    V, WEIGH: tl.constexpr, MAX_FOUND: tl.constexpr, STEP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The cut of this search, after the last one that of min_p, too. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    progress = tl.load(settled + row)
    if progress == NOT_FILTERED:
        return
    slot = tl.load(slots + row).to(tl.int64)
    best = float_of(tl.load(edges + row * 3))
    cut = tl.load(cuts + row)
    if (progress == SEARCHED) & _is_wanted(slot, top_k_S, top_p_S, V, WEIGH):
        above_hi = tl.load(levels + row * 2)
        target = tl.load(levels + row * 2 + 1)
        number = tl.load(found + row * 3)
        if number <= MAX_FOUND:
            i = tl.arange(0, MAX_FOUND)
            mine = tl.load(ranks + row * MAX_FOUND + i, mask=i < number, other=LOWEST_RANK)
            before = amount_before(mine, ranks + row * MAX_FOUND, number, best, WEIGH, MAX_FOUND)
            stays = (i < number) & (before < _missing(target, above_hi, WEIGH))
            cut = tl.maximum(cut, lowest_of(mine, stays))
        else:
            # As close around what was found as can be; int64, because a difference of keys does not fit into 32 bits.
            lo = tl.maximum(tl.load(bounds + row * 2).to(tl.int64), tl.load(found + row * 3 + 1).to(tl.int64) - 1)
            hi = tl.minimum(tl.load(bounds + row * 2 + 1), tl.load(found + row * 3 + 2)).to(tl.int64)
            cut = _search_alone(
                logits + row * stride_r, stride_v, V, lo, hi, above_hi, target, cut, best, WEIGH, T, STEP
            )
    if WEIGH:
        min_p = tl.load(min_p_S + slot)
        if min_p > 0:
            cut = tl.maximum(cut, key_of(best + tl.log(min_p)).to(tl.int64) << 32)
    tl.store(cuts + row, cut)


# -- parts of them ----------------------------------------------------------------------------------------------


@triton.jit
def _is_wanted(slot, top_k_S, top_p_S, V, WEIGH: tl.constexpr):
    """Whether a row that is not settled needs this search."""
    if WEIGH:
        wanted = tl.load(top_p_S + slot) < 1
    else:
        top_k = tl.load(top_k_S + slot)
        wanted = (top_k > 0) & (top_k < V)
    return wanted


@triton.jit
def _store_entry(bounds, levels, lo, hi, above_hi, target):
    tl.store(bounds, lo)
    tl.store(bounds + 1, hi)
    tl.store(levels, above_hi)
    tl.store(levels + 1, target)


@triton.jit
def _narrow(row, blocks, bounds, levels, thresholds, sums, top_p, BLOCKS: tl.constexpr, T: tl.constexpr):
    """The entry that follows from a pass's entry and its sums. Every program of the next pass does this for itself."""
    t = tl.arange(0, T)
    b = tl.arange(0, BLOCKS)
    place = sums + (row * blocks + b[:, None]) * T + t[None, :]
    sums_T = tl.sum(tl.load(place, mask=(b < blocks)[:, None], other=0.0), axis=0)
    keys_T = tl.load(thresholds + row * T + t)
    target = tl.load(levels + row * 2 + 1)
    # The first pass's lowest threshold is below everything.
    target = tl.where(target == 0, tl.max(sums_T, axis=0) * top_p, target)
    lo, hi = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    lo, hi, above_hi = _closer(keys_T, sums_T, target, lo, hi, tl.load(levels + row * 2))
    return lo, hi, above_hi, target


@triton.jit
def _closer(keys_T, sums_T, target, lo, hi, above_hi):
    """The new bounds, and the sum above ``hi``: the nearest thresholds with enough above them and with too little."""
    too_little = sums_T < target
    above_hi = tl.max(tl.where(too_little, sums_T, above_hi), axis=0)
    closest = tl.max(tl.where(too_little, lo, keys_T), axis=0)
    return tl.maximum(lo, closest), tl.min(tl.where(too_little, keys_T, hi), axis=0), above_hi


@triton.jit
def _spread(lo, hi, highest, lowest, FIRST: tl.constexpr, WEIGH: tl.constexpr, T: tl.constexpr):
    """T keys from ``lo`` to ``hi``; in the first pass closer to each other near the best, and one below everything."""
    t = tl.arange(0, T)
    floor = float_of(lowest)
    if WEIGH:
        best = float_of(highest)
        # What is further below adds nothing to a sum of float32. A tiny temperature makes huge logits.
        floor = tl.maximum(floor, best - tl.maximum(tl.abs(best) * 1e-4, 32.0))
    bottom = tl.where(lo < lowest, floor, tl.maximum(float_of(lo), floor))
    top = float_of(hi)
    if FIRST:
        share = (t + 1).to(tl.float32) / T
        share = share * share
    else:
        share = (t + 1).to(tl.float32) / (T + 1)
    keys_T = tl.minimum(tl.maximum(key_of(top - (top - bottom) * share), lo), hi)
    if FIRST:
        keys_T = tl.where(t == T - 1, LOWEST_KEY, keys_T)
    return keys_T


@triton.jit
def _add_above(
    total_TC, logits, stride_v, start, V, keys_T, cut, best, WEIGH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add the number or the weight of STEP tokens to every threshold that they are above of."""
    ids = start + tl.arange(0, STEP)
    x = tl.load(logits + ids.to(tl.int64) * stride_v, mask=ids < V, other=float("-inf"))
    key = tl.where(ids < V, key_of(x), LOWEST_KEY)
    if WEIGH:
        weight = tl.where(rank_of(key, ids) >= cut, tl.exp(x - best), 0.0)
        total_TC += tl.where(key[None, :] > keys_T[:, None], weight[None, :], 0.0)
    else:
        total_TC += tl.where(key[None, :] > keys_T[:, None], 1.0, 0.0)
    return total_TC


@triton.jit
def _missing(target, above_hi, WEIGH: tl.constexpr):
    """What is wanted and not above ``hi``, in the integers that found tokens are summed in; at least one."""
    missing = target - above_hi
    if WEIGH:
        missing = missing * ONE
    return tl.maximum(missing.to(tl.int64), 1)


@triton.jit
def _search_alone(
    logits, stride_v, V, lo, hi, above_hi, target, cut, best, WEIGH: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The cut, by one program: more passes over the row until ``hi`` is the key, then over its equals for the id."""
    t = tl.arange(0, T)
    while hi - lo > 1:
        keys_T = lo + (hi - lo) * (t + 1) // (T + 1)
        total_TC = tl.zeros((T, STEP), tl.float32)
        for start in range(0, V, STEP):
            total_TC = _add_above(total_TC, logits, stride_v, start, V, keys_T.to(tl.int32), cut, best, WEIGH, STEP)
        lo, hi, above_hi = _closer(keys_T, tl.sum(total_TC, axis=1), target, lo, hi, above_hi)
    key = hi.to(tl.int32)
    equals = _missing(target, above_hi, WEIGH)
    if WEIGH:
        weight = (tl.exp(float_of(key) - best) * ONE).to(tl.int64)
        equals = tl.where(weight > 0, (equals + weight - 1) // tl.maximum(weight, 1), V)
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, V, STEP):
        ids = start + tl.arange(0, STEP)
        x = tl.load(logits + ids.to(tl.int64) * stride_v, mask=ids < V, other=float("-inf"))
        equal = (ids < V) & (key_of(x) == key)
        order = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.minimum(last, tl.min(tl.where(equal & (order == equals), ids, 0x7FFFFFFF), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return tl.maximum(cut, rank_of(key, last))
