"""Sampling in Triton: no sort, no visit of the host. Shapes: R rows to sample, V vocabulary.

The stages that a batch needs run one after the other: penalties, bias and stops, filters
(`kernels.gpu.sampling_filters`), then the draw: every program finds the best token of a block of a row, and one program
per row the best of those. Blocks do not depend on the batch, so neither does a row's token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2
from kernels.gpu.sampling_filters import find_cuts
from kernels.gpu.sampling_keys import LOWEST_RANK, float_of, id_of_rank, key_of, key_of_rank, rank_of
from kernels.reference import sampling as reference
from kernels.sampling_tensors import SamplingOut, SamplingStages, SamplingTensors

# Elements of a row that one program takes, and its warps.
BLOCK = 1024
WARPS = 4
# Entries of a bias or stop list taken at once.
LIST_BLOCK = 128

GOLDEN_64 = tl.constexpr(reference.GOLDEN_64)
MIX_64_A, MIX_64_B = tl.constexpr(reference.MIX_64[0]), tl.constexpr(reference.MIX_64[1])
GOLDEN_32 = tl.constexpr(reference.GOLDEN_32)
MIX_32_A, MIX_32_B = tl.constexpr(reference.MIX_32[0]), tl.constexpr(reference.MIX_32[1])


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    state: SamplingTensors,
    stages: SamplingStages,
    out: SamplingOut,
) -> None:
    """As `kernels.reference.sampling.sample`. Only launches kernels and allocates: it can be captured in a graph."""
    R, V = logits_RV.shape
    assert logits_RV.dtype == torch.float32
    if not R:
        return
    blocks = triton.cdiv(V, BLOCK)
    rows = (logits_RV, logits_RV.stride(0), logits_RV.stride(1), slots_R)
    # Products and sums stay apart, as in the reference.
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    if stages.penalties:
        _penalise[(R, blocks)](
            *rows, state.counts_SV, state.in_prompt_SV, state.counts_SV.stride(0),
            state.repetition_S, state.frequency_S, state.presence_S, V, BLOCK=BLOCK, **options,
        )  # fmt: skip
    if stages.bias or stages.stops:
        _bias_and_stops[(R,)](
            *rows, positions_R, state.bias_ids, state.bias_values, state.bias_ids.stride(0), state.num_bias_S,
            state.stop_ids, state.stop_ids.stride(0), state.num_stops_S, state.stops_from_S,
            BIAS=stages.bias, STOPS=stages.stops, BLOCK=LIST_BLOCK, **options,
        )  # fmt: skip
    cuts_R = find_cuts(logits_RV, slots_R, state) if stages.filters else slots_R
    ranks_RB = torch.empty((R, blocks), dtype=torch.int64, device=logits_RV.device)
    _draw[(R, blocks)](
        *rows, positions_R, state.seed_S, state.temperature_S, cuts_R, ranks_RB, V,
        NOISE=stages.noise, FILTERS=stages.filters, PROCESSED=stages.processed, BLOCK=BLOCK, **options,
    )  # fmt: skip
    _finish[(R,)](
        ranks_RB, blocks, slots_R, out.tokens_R, out.best_R, state.last_token_S, state.counts_SV,
        state.counts_SV.stride(0), state.repetition_S, state.frequency_S, state.presence_S,
        PENALTIES=stages.penalties, BLOCK=next_power_of_2(blocks), **options,
    )  # fmt: skip


@triton.jit
def gumbel(seed, position, ids):
    """As `kernels.reference.sampling.gumbel_noise`: scalars int64, ids int32; the same bits, float32 noise."""
    key = _mix64(seed.to(tl.uint64, bitcast=True) ^ _mix64(position.to(tl.uint64, bitcast=True)))
    bits = ids.to(tl.uint32, bitcast=True) * tl.full((), GOLDEN_32, tl.uint32)
    bits = _mix32(_mix32(bits ^ key.to(tl.uint32)) ^ (key >> 32).to(tl.uint32))
    # 2^-32; the largest float32 below 1; and 2^-10, below which the series is taken.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    series = u * (1 + u * (0.5 + u * 0.3333333432674408))
    return -tl.log(tl.where(u < 0.0009765625, series, -tl.log(1 - u)))


@triton.jit
def _mix64(z):
    z = z + tl.full((), GOLDEN_64, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), MIX_64_A, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MIX_64_B, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full((), MIX_32_A, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), MIX_32_B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _penalise(
    logits, stride_r, stride_v, slots, counts, in_prompt, stride_s, repetition_S, frequency_S, presence_S, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block; in place."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    repetition = tl.load(repetition_S + slot)
    frequency = tl.load(frequency_S + slot)
    presence = tl.load(presence_S + slot)
    if (repetition == 1) & (frequency == 0) & (presence == 0):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    place = logits + row * stride_r + ids.to(tl.int64) * stride_v
    x = tl.load(place, mask=inside, other=0.0)
    count = tl.load(counts + slot * stride_s + ids, mask=inside, other=0)
    prompt = tl.load(in_prompt + slot * stride_s + ids, mask=inside, other=0) != 0
    factor = tl.where((count > 0) | prompt, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = x - frequency * count.to(tl.float32)
    tl.store(place, x - tl.where(count > 0, presence, 0.0), mask=inside)


@triton.jit
def _bias_and_stops(
    logits, stride_r, stride_v, slots, positions, bias_ids, bias_values, stride_bias, num_bias_S, stop_ids,
    stride_stops, num_stops_S, stops_from_S, BIAS: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row; in place. Bias ids are distinct, so no two threads add to one logit."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    place = logits + row * stride_r
    if BIAS:
        number = tl.load(num_bias_S + slot).to(tl.int32)
        for start in range(0, number, BLOCK):
            i = start + tl.arange(0, BLOCK)
            ids = tl.load(bias_ids + slot * stride_bias + i, mask=i < number, other=0)
            bias = tl.load(bias_values + slot * stride_bias + i, mask=i < number, other=0.0)
            x = tl.load(place + ids * stride_v, mask=i < number, other=0.0)
            tl.store(place + ids * stride_v, x + bias, mask=i < number)
    if BIAS and STOPS:
        tl.debug_barrier()  # a stop id may have a bias, written by another thread
    if STOPS:  # noqa: SIM102 (known when compiling)
        if tl.load(positions + row).to(tl.int64) < tl.load(stops_from_S + slot):
            number = tl.load(num_stops_S + slot).to(tl.int32)
            for start in range(0, number, BLOCK):
                i = start + tl.arange(0, BLOCK)
                ids = tl.load(stop_ids + slot * stride_stops + i, mask=i < number, other=0)
                tl.store(place + ids * stride_v, tl.full((BLOCK,), float("-inf"), tl.float32), mask=i < number)


@triton.jit
def _draw(
    logits, stride_r, stride_v, slots, positions, seed_S, temperature_S, cuts, ranks, V, NOISE: tl.constexpr,
    FILTERS: tl.constexpr, PROCESSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block: the best rank in it. FILTERS: the temperature is in the logits already."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    place = logits + row * stride_r + ids.to(tl.int64) * stride_v
    x = tl.load(place, mask=inside, other=0.0)
    score = x
    if FILTERS or NOISE:
        temperature = tl.load(temperature_S + slot)
        if temperature > 0:
            if FILTERS:
                x = tl.where(rank_of(key_of(x), ids) >= tl.load(cuts + row), x, float("-inf"))
            else:
                x = tl.div_rn(x, temperature)
            score = x
            if NOISE:
                score = x + gumbel(tl.load(seed_S + slot), tl.load(positions + row).to(tl.int64), ids)
    if PROCESSED:
        tl.store(place, x, mask=inside)
    best = tl.max(tl.where(inside, rank_of(key_of(score), ids), LOWEST_RANK), axis=0)
    tl.store(ranks + row * tl.num_programs(1) + block, best)


@triton.jit
def _finish(
    ranks, blocks, slots, tokens, best, last_token_S, counts, stride_s, repetition_S, frequency_S, presence_S,
    PENALTIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, BLOCK)
    rank = tl.max(tl.load(ranks + row * blocks + i, mask=i < blocks, other=LOWEST_RANK), axis=0)
    token = id_of_rank(rank)
    tl.store(tokens + row, token)
    tl.store(best + row, float_of(key_of_rank(rank)))
    tl.store(last_token_S + slot, token)
    if PENALTIES:
        neutral = (tl.load(frequency_S + slot) == 0) & (tl.load(presence_S + slot) == 0)
        if (tl.load(repetition_S + slot) != 1) | (neutral == 0):
            count = counts + slot * stride_s + token
            tl.store(count, tl.load(count) + 1)
