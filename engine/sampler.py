"""The sampler: one call per batch, from logits to tokens. Shapes: R rows to sample, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.outputs import TokenLogprob
from engine.plan import Sample
from engine.sampling_params import LogprobsMode
from engine.sampling_state import SamplingState, has_filters, has_penalties, stop_ids
from kernels import ops
from kernels.reference.sampling import NEVER


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors of one sampling call; ``logits_RV`` and ``processed_RV`` are kept only for logprobs."""

    tokens_R: Tensor
    best_R: Tensor
    logits_RV: Tensor
    processed_RV: Tensor


class Sampler:
    """Applies penalties, bias, stops held back, temperature and filters, then draws by Gumbel-max.

    Every stage is skipped when no row wants it, and is exact for rows that do not: a row's token never depends on
    its neighbours.
    """

    def __init__(self, state: SamplingState, eos_token_ids: tuple[int, ...]) -> None:
        self._state = state
        self._eos = eos_token_ids

    def sample(self, logits_RV: Tensor, samples: list[Sample]) -> Sampled:
        """Draw one token per row, write it to the rows' slots, and count it for penalties."""
        state, device = self._state, logits_RV.device
        slots_R = torch.tensor([sample.slot for sample in samples], device=device)
        positions_R = torch.tensor([sample.position for sample in samples], device=device)
        penalised = any(has_penalties(sample.output) for sample in samples)
        processed_RV = self._process(logits_RV, samples, slots_R, penalised)
        scores_RV = processed_RV
        rows = [i for i, sample in enumerate(samples) if sample.output.request.params.temperature > 0]
        if rows:
            rows_r = torch.tensor(rows, device=device)
            noise = ops.gumbel_noise(state.seed_S[slots_R[rows_r]], positions_R[rows_r], logits_RV.shape[1])
            scores_RV = processed_RV.index_add(0, rows_r, noise)
        best_R, tokens_R = scores_RV.max(dim=1)
        state.last_token_S.index_copy_(0, slots_R, tokens_R)
        if penalised:
            once = torch.ones_like(tokens_R, dtype=torch.int32)
            state.counts_SV.index_put_((slots_R, tokens_R), once, accumulate=True)
        return Sampled(tokens_R, best_R, logits_RV, processed_RV)

    def _process(self, logits_RV: Tensor, samples: list[Sample], slots_R: Tensor, penalised: bool) -> Tensor:
        state = self._state
        logits = logits_RV
        if penalised:
            logits = ops.apply_penalties(
                logits,
                state.counts_SV[slots_R],
                state.in_prompt_SV[slots_R],
                state.repetition_S[slots_R],
                state.frequency_S[slots_R],
                state.presence_S[slots_R],
            )
        if rows := [i for i, sample in enumerate(samples) if sample.output.request.params.logit_bias]:
            rows_r = torch.tensor(rows, device=logits.device)
            biased = logits[rows_r].scatter_add_(1, state.bias_ids[slots_R[rows_r]], state.bias_values[slots_R[rows_r]])
            logits = logits.index_copy(0, rows_r, biased)
        if rows := [i for i, s in enumerate(samples) if s.suppress_stops and stop_ids(s.output, self._eos)]:
            rows_r = torch.tensor(rows, device=logits.device)
            held_back = logits[rows_r].scatter_(1, state.stop_ids[slots_R[rows_r]], NEVER)
            logits = logits.index_copy(0, rows_r, held_back)
        return self._narrow(logits, samples, slots_R)

    def _narrow(self, logits: Tensor, samples: list[Sample], slots_R: Tensor) -> Tensor:
        """Temperature, then the allowed set."""
        state = self._state
        if any(sample.output.request.params.temperature not in (0, 1) for sample in samples):
            logits = logits / state.temperature_S[slots_R][:, None]
        if rows := [i for i, sample in enumerate(samples) if has_filters(sample.output)]:
            rows_r = torch.tensor(rows, device=logits.device)
            slots_r = slots_R[rows_r]
            allowed = ops.filter_logits(
                logits[rows_r], state.top_k_S[slots_r], state.top_p_S[slots_r], state.min_p_S[slots_r]
            )
            logits = logits.index_copy(0, rows_r, allowed)
        return logits


def sampled_logprobs(sampled: Sampled, samples: list[Sample]) -> list[TokenLogprob | None]:
    """The records of the rows that asked for logprobs, None for the others. Waits for the device."""
    records: list[TokenLogprob | None] = [None] * len(samples)
    for i, sample in enumerate(samples):
        params = sample.output.request.params
        if params.top_logprobs is not None:
            raw = params.logprobs_mode is LogprobsMode.RAW
            logits = sampled.logits_RV if raw else sampled.processed_RV
            records[i] = logprob_records(logits[i : i + 1], sampled.tokens_R[i : i + 1], params.top_logprobs)[0]
    return records


def logprob_records(logits_RV: Tensor, token_ids_R: Tensor, top: int) -> list[TokenLogprob]:
    """One record per row: the token's logprob and rank, and the ``top`` most likely tokens. Waits for the device."""
    logprobs_RV = logits_RV.log_softmax(dim=1)
    chosen_R = logprobs_RV.gather(1, token_ids_R[:, None])
    ranks = ((logprobs_RV > chosen_R).sum(dim=1) + 1).tolist()
    tops = [()] * len(ranks) if top == 0 else _top_records(logprobs_RV, top)
    rows = zip(token_ids_R.tolist(), chosen_R.squeeze(1).tolist(), ranks, tops, strict=True)
    return [TokenLogprob(token, _finite(logprob), rank, tuple(best)) for token, logprob, rank, best in rows]


def _top_records(logprobs_RV: Tensor, top: int) -> list[tuple[TokenLogprob, ...]]:
    values, ids = logprobs_RV.topk(min(top, logprobs_RV.shape[1]), dim=1)
    return [
        tuple(
            TokenLogprob(token, value, rank + 1)
            for rank, (token, value) in enumerate(zip(row_ids, row_values, strict=True))
            if _finite(value) is not None
        )
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _finite(value: float) -> float | None:
    return None if value == NEVER else value
