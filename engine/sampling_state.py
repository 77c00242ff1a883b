"""Per-slot sampling state on the device. Shapes: S slots (seats of the batch), V vocabulary.

Each running output owns one slot from admission to its end. The sampler writes ``last_token[slot]`` and the next step
reads it, so a token need not visit the host before it is fed back.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.plan import Sample
from engine.request import Output
from engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from kernels.reference.sampling import signed64, sub_seed
from kernels.sampling_tensors import FLOATS, INTEGERS, SamplingStages, SamplingTensors

# Any smaller temperature draws the same tokens, and divides logits out of float32's range.
SMALLEST_TEMPERATURE = 1e-30
# What an output may need, one bit each; a batch needs what any of its rows does.
PENALTIES, BIAS, STOPS, FILTERS, NOISE, PROCESSED = (1 << bit for bit in range(6))
_STAGES = [SamplingStages(*(bool(bits >> bit & 1) for bit in range(6))) for bits in range(64)]


class SamplingState:
    """Owns every per-slot tensor. A slot's content is only meaningful once an output was admitted to it."""

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos = eos_token_ids
        self._device = device
        self._vocab_size = vocab_size
        self._needs = [0] * num_slots  # bits, by slot
        max_stops = MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        self.tensors = SamplingTensors.allocate(num_slots, vocab_size, MAX_LOGIT_BIAS, max_stops, device)

    @property
    def last_token_S(self) -> Tensor:
        return self.tensors.last_token_S

    def admit(self, output: Output) -> None:
        """`admit_all` of one output."""
        self.admit_all([output])

    def admit_all(self, outputs: Sequence[Output]) -> None:
        """Write the outputs' state to their slots; penalty counts are rebuilt from their ids.

        Waits for nothing. All numbers travel in one copy, and so do the lists of each output that has any.
        """
        if not outputs:
            return
        slots_N, integers_NF, floats_NF = upload(
            [
                np.array([output.slot for output in outputs], dtype=np.int64),
                np.array([self._integers(output) for output in outputs], dtype=np.int64),
                np.array([_floats(output) for output in outputs], dtype=np.float32),
            ],
            self._device,
        )
        self.tensors.integers_FS.index_copy_(1, slots_N, integers_NF.T)
        self.tensors.floats_FS.index_copy_(1, slots_N, floats_NF.T)
        for output in outputs:
            needs = self._needs[output.slot] = _needs(output)
            if needs & BIAS:
                self._write_bias(output)
            if output.request.params.min_tokens and (stops := stop_ids(output, self._eos)):
                (ids,) = upload([np.array(stops, dtype=np.int64)], self._device)
                self.tensors.stop_ids[output.slot, : len(stops)] = ids
            if needs & PENALTIES:
                self._count(output)

    def stages(self, samples: Sequence[Sample], processed: bool = False) -> SamplingStages:
        """What a batch of ``samples`` needs. ``processed``: see `SamplingStages`."""
        needs = PROCESSED if processed else 0
        for sample in samples:
            needs |= self._needs[sample.slot] | (STOPS if sample.suppress_stops else 0)
        return _STAGES[needs]

    def _integers(self, output: Output) -> list[int]:
        """In the order of `INTEGERS`."""
        params, prompt = output.request.params, output.request.prompt
        num_stops = len(stop_ids(output, self._eos)) if params.min_tokens else 0
        values = {
            "last_token_S": (output.token_ids or prompt)[-1],
            "seed_S": signed64(sub_seed(output.request.seed, output.index)),
            "top_k_S": min(params.top_k, self._vocab_size),
            "stops_from_S": min(len(prompt) + params.min_tokens, 2**62) if num_stops else 0,
            "num_bias_S": len(_bias(output)),
            "num_stops_S": num_stops,
        }
        return [values[name] for name in INTEGERS]

    def _write_bias(self, output: Output) -> None:
        bias = _bias(output)
        ids, values = upload(
            [np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)], self._device
        )
        self.tensors.bias_ids[output.slot, : len(bias)] = ids
        self.tensors.bias_values[output.slot, : len(bias)] = values

    def _count(self, output: Output) -> None:
        prompt, generated = upload(
            [np.array(output.request.prompt, dtype=np.int64), np.array(output.token_ids, dtype=np.int64)], self._device
        )
        counts_V = self.tensors.counts_SV[output.slot].zero_()
        counts_V.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        self.tensors.in_prompt_SV[output.slot].zero_().index_fill_(0, prompt, True)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on ``device``, moved in one copy that nothing waits for."""
    starts = np.cumsum([0] + [-(-array.nbytes // 16) * 16 for array in arrays]).tolist()
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for start, array in zip(starts, arrays, strict=False):
        view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # torch gives the pinned memory to nobody else before the copy is done.
    moved = host.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


_TORCH_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


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


def _needs(output: Output) -> int:
    params = output.request.params
    wanted = {
        PENALTIES: has_penalties(output),
        BIAS: bool(params.logit_bias),
        FILTERS: has_filters(output),
        NOISE: params.temperature > 0,
    }
    return sum(bit for bit, is_wanted in wanted.items() if is_wanted)


def _floats(output: Output) -> list[float]:
    """In the order of `FLOATS`."""
    params = output.request.params
    values = {
        "temperature_S": max(params.temperature, SMALLEST_TEMPERATURE) if params.temperature else 0.0,
        "top_p_S": params.top_p,
        "min_p_S": params.min_p,
        "repetition_S": params.repetition_penalty,
        "frequency_S": params.frequency_penalty,
        "presence_S": params.presence_penalty,
    }
    return [values[name] for name in FLOATS]


def _bias(output: Output) -> dict[int, float]:
    """The bias of each token; those of a token named twice are added."""
    total: dict[int, float] = {}
    for token, bias in output.request.params.logit_bias:
        total[token] = total.get(token, 0.0) + bias
    return total
