"""Per-slot sampling state on the device. Shapes: S slots (seats of the batch), V vocabulary.

Each running output owns one slot from admission to its end. The sampler writes ``last_token[slot]`` and the next step
reads it, so a token need not visit the host before it is fed back.
"""

import torch
from torch import Tensor

from engine.request import Output
from engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from kernels.reference.sampling import signed64, sub_seed

# Any smaller temperature draws the same tokens, and divides logits out of float32's range.
SMALLEST_TEMPERATURE = 1e-30


class SamplingState:
    """Owns every per-slot tensor. A slot's content is only meaningful between `admit` calls for it."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        self._eos = eos_token_ids
        self._device = device
        self._vocab_size = vocab_size
        self.last_token_S = filled(0, torch.int64)
        self.seed_S = filled(0, torch.int64)
        self.temperature_S = filled(1, torch.float32)
        self.top_k_S = filled(0, torch.int64)
        self.top_p_S = filled(1, torch.float32)
        self.min_p_S = filled(0, torch.float32)
        self.repetition_S = filled(1, torch.float32)
        self.frequency_S = filled(0, torch.float32)
        self.presence_S = filled(0, torch.float32)
        self.bias_ids = filled(0, torch.int64, MAX_LOGIT_BIAS)
        self.bias_values = filled(0, torch.float32, MAX_LOGIT_BIAS)
        self.stop_ids = filled(0, torch.int64, MAX_STOP_TOKEN_IDS + len(eos_token_ids))
        self.counts_SV = filled(0, torch.int32, vocab_size)
        self.in_prompt_SV = filled(0, torch.bool, vocab_size)

    def admit(self, output: Output) -> None:
        """Write an output's state to its slot; penalty counts are rebuilt from its ids."""
        slot, params = output.slot, output.request.params
        self.seed_S[slot] = signed64(sub_seed(output.request.seed, output.index))
        # Greedy rows divide by 1, which changes nothing.
        self.temperature_S[slot] = max(params.temperature, SMALLEST_TEMPERATURE) if params.temperature else 1.0
        self.top_k_S[slot] = params.top_k
        self.top_p_S[slot] = params.top_p
        self.min_p_S[slot] = params.min_p
        self.repetition_S[slot] = params.repetition_penalty
        self.frequency_S[slot] = params.frequency_penalty
        self.presence_S[slot] = params.presence_penalty
        self.last_token_S[slot] = (output.token_ids or output.request.prompt)[-1]
        if params.logit_bias:
            self._write_bias(slot, params.logit_bias)
        if params.min_tokens and (stops := stop_ids(output, self._eos)):
            padding = self.stop_ids.shape[1] - len(stops)
            self.stop_ids[slot] = torch.tensor(stops + stops[:1] * padding, device=self._device)
        if has_penalties(output):
            self._count(slot, output)

    def _write_bias(self, slot: int, bias: tuple[tuple[int, float], ...]) -> None:
        ids, values = zip(*bias, strict=True)
        self.bias_ids[slot].zero_()
        self.bias_values[slot].zero_()
        self.bias_ids[slot, : len(ids)] = torch.tensor(ids, device=self._device)
        self.bias_values[slot, : len(ids)] = torch.tensor(values, dtype=torch.float32, device=self._device)

    def _count(self, slot: int, output: Output) -> None:
        generated = torch.tensor(output.token_ids, dtype=torch.int64, device=self._device)
        self.counts_SV[slot] = torch.bincount(generated, minlength=self._vocab_size)
        self.in_prompt_SV[slot].zero_()
        self.in_prompt_SV[slot, torch.tensor(output.request.prompt, device=self._device)] = True


def stop_ids(output: Output, eos_token_ids: tuple[int, ...]) -> list[int]:
    """The ids that end this output, and that min_tokens holds back."""
    params = output.request.params
    return [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]


def has_penalties(output: Output) -> bool:
    params = output.request.params
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def has_filters(output: Output) -> bool:
    """Whether the allowed set is smaller than the vocabulary. Greedy rows take the best token in any case."""
    params = output.request.params
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
