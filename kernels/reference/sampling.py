"""Sampling in plain torch. Shapes: R rows to sample, V vocabulary.

The draw is ``argmax(processed logit + Gumbel noise)`` over the allowed set (Gumbel 1954; Maddison et al. 2014,
arXiv 1411.0030). The noise is a pure function of (seed, position, token id), so a draw does not depend on the batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.sampling_tensors import SamplingOut, SamplingStages, SamplingTensors

NEVER = float("-inf")
# splitmix64: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".
GOLDEN_64 = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# 32-bit mixer "lowbias32": C. Wellons, hash-prospector. Its multipliers, and an odd constant to spread token ids.
MIX_32 = (0x7FEB352D, 0x846CA68B)
GOLDEN_32 = 0x9E3779B1
# How many of the largest logits the filters look at before they sort the whole row.
HEAD = 1024


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    state: SamplingTensors,
    stages: SamplingStages,
    out: SamplingOut,
) -> None:
    """Draw one token per row of ``logits_RV`` (float32) by what its slot wants.

    In this order: penalties, bias, stops held back, temperature, filters, noise; then the best score, the lowest id
    among equals. ``slots_R``: integers, -1 = a padded row, for which nothing is read or written; ``positions_R``:
    absolute positions of the new tokens. Writes ``out``, ``last_token_S``, and ``counts_SV`` of rows with penalties.
    A token depends on its own row alone. ``logits_RV`` holds the processed logits afterwards if ``stages.processed``;
    else its content is undefined when any of the stages but noise is on, and unchanged otherwise.
    """
    rows_r = (slots_R >= 0).nonzero().squeeze(1)
    if not len(rows_r):
        return
    slots_r, positions_r = slots_R[rows_r].long(), positions_R[rows_r].long()
    logits_rV = logits_RV if len(rows_r) == len(slots_R) else logits_RV[rows_r]
    processed_rV = _processed(logits_rV, slots_r, positions_r, state, stages)
    if stages.processed and processed_rV is not logits_RV:
        logits_RV.index_copy_(0, rows_r, processed_rV)
    scores_rV = _perturbed(processed_rV, slots_r, positions_r, state) if stages.noise else processed_rV
    best_r, tokens_r = scores_rV.max(dim=1)
    out.tokens_R.index_copy_(0, rows_r, tokens_r)
    out.best_R.index_copy_(0, rows_r, best_r)
    state.last_token_S.index_copy_(0, slots_r, tokens_r)
    if stages.penalties:
        counted = _has_penalties(state, slots_r)
        once = torch.ones_like(tokens_r[counted], dtype=torch.int32)
        state.counts_SV.index_put_((slots_r[counted], tokens_r[counted]), once, accumulate=True)


def splitmix64(value: int) -> int:
    """One output of splitmix64 for the state ``value``; all in uint64."""
    mask = 2**64 - 1
    z = (value + GOLDEN_64) & mask
    z = ((z ^ (z >> 30)) * MIX_64[0]) & mask
    z = ((z ^ (z >> 27)) * MIX_64[1]) & mask
    return z ^ (z >> 31)


def sub_seed(seed: int, output_index: int) -> int:
    """The seed of output i of a request: s_0 = seed, s_i = splitmix64(seed + i), uint64."""
    return seed if output_index == 0 else splitmix64((seed + output_index) % 2**64)


def signed64(value: int) -> int:
    """A uint64 as the int64 with the same bits (torch has no uint64 arithmetic)."""
    return value - 2**64 if value >= 2**63 else value


def random_bits(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """32 random bits for every (row, token id), as int32 [R, V].

    ``seeds_R`` int64 (the bits of the uint64 seed), ``positions_R`` int64: the absolute position of the new token.
    """
    key_R = _mix64(seeds_R ^ _mix64(positions_R))
    low_R, high_R = key_R.to(torch.int32), (key_R >> 32).to(torch.int32)
    ids_V = torch.arange(vocab_size, dtype=torch.int32, device=seeds_R.device) * _signed32(GOLDEN_32)
    bits_RV = _mix32(ids_V[None, :] ^ low_R[:, None])
    return _mix32(bits_RV.bitwise_xor_(high_R[:, None]))


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, V]: ``-log(-log(1 - u))``, u = (bits + 1/2) / 2^32.

    Near u = 0, where the largest noise comes from, ``-log(1 - u)`` is taken from its series: u + u^2/2 + u^3/3.
    """
    bits_RV = random_bits(seeds_R, positions_R, vocab_size).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    u = bits_RV.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    series = u * (1 + u * (0.5 + u / 3))
    exponential = torch.where(u < 2.0**-10, series, -torch.log(1 - u))
    return exponential.log_().neg_()


def apply_penalties(
    logits_RV: Tensor,
    counts_RV: Tensor,
    in_prompt_RV: Tensor,
    repetition_R: Tensor,
    frequency_R: Tensor,
    presence_R: Tensor,
) -> Tensor:
    """Repetition penalty over prompt and output tokens (Keskar et al. 2019, arXiv 1909.05858), then frequency and
    presence penalties over output tokens: ``logit - frequency * count - presence * [count > 0]``.

    ``counts_RV`` int32: how often each token was generated; ``in_prompt_RV`` bool. Returns a new tensor.
    """
    generated_RV = counts_RV > 0
    factor_RV = torch.where(generated_RV | in_prompt_RV, repetition_R[:, None], 1.0)
    penalised = torch.where(logits_RV > 0, logits_RV / factor_RV, logits_RV * factor_RV)
    penalised -= frequency_R[:, None] * counts_RV
    return penalised.sub_(presence_R[:, None] * generated_RV)


def filter_logits(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Set everything outside the allowed set to minus infinity. Returns a new tensor.

    In this order: the ``top_k`` largest (0 = all); of those the smallest head whose probability reaches ``top_p``;
    of those the ones with at least ``min_p`` times the largest probability. Equal logits rank by lowest id.
    ``scaled_RV`` is already divided by the temperature.
    """
    V = scaled_RV.shape[1]
    head = min(HEAD, V)
    values, ids = _ranked_head(scaled_RV, head)
    keep = _keep(scaled_RV, values, top_k_R, top_p_R, min_p_R)
    out = torch.full_like(scaled_RV, NEVER).scatter_(1, ids, values.masked_fill(~keep, NEVER))
    # The head decides a row when something in it was cut, and the cut is not inside a tie with what lies beyond.
    undecided = keep.new_zeros(len(keep))
    if head < V:
        # A share of a top_k that ends beyond the head needs the sum over all of that top_k.
        share_of_more = (top_k_R > head) & (top_k_R < V) & (top_p_R < 1)
        undecided = keep[:, -1] | _tied_at(scaled_RV, values, keep) | share_of_more
    if bool(undecided.any()):
        rows = undecided.nonzero().squeeze(1)
        values, ids = scaled_RV[rows].sort(dim=1, descending=True, stable=True)
        keep = _keep(scaled_RV[rows], values, top_k_R[rows], top_p_R[rows], min_p_R[rows])
        whole = torch.full_like(values, NEVER).scatter_(1, ids, values.masked_fill(~keep, NEVER))
        out.index_copy_(0, rows, whole)
    return out


def _processed(
    logits_rV: Tensor, slots_r: Tensor, positions_r: Tensor, state: SamplingTensors, stages: SamplingStages
) -> Tensor:
    """The logits after every stage but noise; each stage touches only the rows that want it."""
    logits = logits_rV
    if stages.penalties:
        logits = _where(_has_penalties(state, slots_r), logits, slots_r, lambda x, slots: _penalised(x, slots, state))
    if stages.bias:
        logits = _where(state.num_bias_S[slots_r] > 0, logits, slots_r, lambda x, slots: _biased(x, slots, state))
    if stages.stops:
        held_back = (positions_r < state.stops_from_S[slots_r]) & (state.num_stops_S[slots_r] > 0)
        logits = _where(held_back, logits, slots_r, lambda x, slots: _without_stops(x, slots, state))
    temperature_r = state.temperature_S[slots_r]
    if stages.filters or stages.noise:
        warm_r = (temperature_r != 0) & (temperature_r != 1)
        logits = _where(warm_r, logits, slots_r, lambda x, slots: x / state.temperature_S[slots][:, None])
    if stages.filters:
        narrowed_r = (state.top_k_S[slots_r] > 0) | (state.top_p_S[slots_r] < 1) | (state.min_p_S[slots_r] > 0)
        logits = _where(narrowed_r & (temperature_r > 0), logits, slots_r, lambda x, slots: _narrowed(x, slots, state))
    return logits


def _where(wanted_r: Tensor, logits_rV: Tensor, slots_r: Tensor, stage: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``stage(logits, slots)`` of the rows that want it, the others as they are. Returns a new tensor, or the same."""
    rows = wanted_r.nonzero().squeeze(1)
    if len(rows) == len(wanted_r):
        return stage(logits_rV, slots_r)
    return logits_rV.index_copy(0, rows, stage(logits_rV[rows], slots_r[rows])) if len(rows) else logits_rV


def _has_penalties(state: SamplingTensors, slots_r: Tensor) -> Tensor:
    neutral_r = (state.frequency_S[slots_r] == 0) & (state.presence_S[slots_r] == 0)
    return (state.repetition_S[slots_r] != 1) | ~neutral_r


def _penalised(logits_rV: Tensor, slots_r: Tensor, state: SamplingTensors) -> Tensor:
    return apply_penalties(
        logits_rV,
        state.counts_SV[slots_r],
        state.in_prompt_SV[slots_r],
        state.repetition_S[slots_r],
        state.frequency_S[slots_r],
        state.presence_S[slots_r],
    )


def _biased(logits_rV: Tensor, slots_r: Tensor, state: SamplingTensors) -> Tensor:
    number_r = state.num_bias_S[slots_r]
    width = int(number_r.max())
    unused = torch.arange(width, device=logits_rV.device) >= number_r[:, None]
    ids = state.bias_ids[slots_r, :width].masked_fill(unused, 0)
    return logits_rV.scatter_add(1, ids, state.bias_values[slots_r, :width].masked_fill(unused, 0.0))


def _without_stops(logits_rV: Tensor, slots_r: Tensor, state: SamplingTensors) -> Tensor:
    number_r = state.num_stops_S[slots_r]
    width = int(number_r.max())
    unused = torch.arange(width, device=logits_rV.device) >= number_r[:, None]
    ids = state.stop_ids[slots_r, :width]
    return logits_rV.scatter(1, torch.where(unused, ids[:, :1], ids), NEVER)


def _narrowed(logits_rV: Tensor, slots_r: Tensor, state: SamplingTensors) -> Tensor:
    return filter_logits(logits_rV, state.top_k_S[slots_r], state.top_p_S[slots_r], state.min_p_S[slots_r])


def _perturbed(processed_rV: Tensor, slots_r: Tensor, positions_r: Tensor, state: SamplingTensors) -> Tensor:
    """With noise where the temperature is above 0. Returns a new tensor, or the same."""
    rows = (state.temperature_S[slots_r] > 0).nonzero().squeeze(1)
    noise_rV = gumbel_noise(state.seed_S[slots_r[rows]], positions_r[rows], processed_rV.shape[1])
    if len(rows) == len(slots_r):
        return noise_rV.add_(processed_rV)
    return processed_rV.index_add(0, rows, noise_rV)


def _ranked_head(scaled_RV: Tensor, head: int) -> tuple[Tensor, Tensor]:
    values, ids = scaled_RV.topk(head, dim=1)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _tied_at(scaled_RV: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """Rows whose last kept value equals the head's last value, with more of the same beyond the head."""
    last_kept = values.masked_fill(~keep, float("inf")).amin(dim=1)
    beyond = (scaled_RV >= values[:, -1:]).sum(dim=1) > values.shape[1]
    return (last_kept == values[:, -1]) & beyond


def _keep(scaled_RV: Tensor, values: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Which of the ranked ``values`` (descending, a head of the row or all of it) stay."""
    ranks = torch.arange(values.shape[1], device=values.device)
    limit_R = torch.where(top_k_R > 0, top_k_R, scaled_RV.shape[1])
    in_top_k = ranks < limit_R[:, None]
    weights = (values - values[:, :1]).exp()
    # top_p is a share of what top_k left: of the head alone where top_k ends in it, else of the whole row.
    whole_R = (scaled_RV - values[:, :1]).exp().sum(dim=1)
    total_R = torch.where(limit_R <= values.shape[1], (weights * in_top_k).sum(dim=1), whole_R)
    before = weights.cumsum(dim=1) - weights
    in_top_p = (before < (top_p_R * total_R)[:, None]) | (top_p_R >= 1)[:, None]
    keep = in_top_k & in_top_p & (values >= values[:, :1] + min_p_R.log()[:, None])
    keep[:, 0] = True
    return keep


def _mix64(z: Tensor) -> Tensor:
    z = z + signed64(GOLDEN_64)
    z = (z ^ _shift_right(z, 30, 64)) * signed64(MIX_64[0])
    z = (z ^ _shift_right(z, 27, 64)) * signed64(MIX_64[1])
    return z ^ _shift_right(z, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(_signed32(MIX_32[0]))
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed32(MIX_32[1]))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift of a signed tensor of ``width`` bits."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _signed32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
