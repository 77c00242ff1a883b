"""What a sampling call reads and writes. Shapes: S slots, R rows to sample, V vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

INTEGERS = ("last_token_S", "seed_S", "top_k_S", "stops_from_S", "num_bias_S", "num_stops_S")
FLOATS = ("temperature_S", "top_p_S", "min_p_S", "repetition_S", "frequency_S", "presence_S")


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The state of every slot, on one device.

    The vectors [S] are rows of ``integers_FS`` (int64) and ``floats_FS`` (float32), in the order of `INTEGERS` and
    `FLOATS`, so that all of a slot can be written at once.

    ``seed_S``: the bits of the uint64 seed; ``temperature_S`` 0 = greedy; ``top_k_S`` 0 = all; ``stops_from_S``: the
    absolute position from which ``stop_ids`` may be sampled. Of ``bias_ids`` (distinct), ``bias_values`` and
    ``stop_ids`` the first ``num_bias_S`` and ``num_stops_S`` entries count. ``counts_SV`` int32, ``in_prompt_SV`` bool
    and the lists are only read for slots whose numbers say that they matter.
    """

    integers_FS: Tensor
    floats_FS: Tensor
    last_token_S: Tensor
    seed_S: Tensor
    top_k_S: Tensor
    stops_from_S: Tensor
    num_bias_S: Tensor
    num_stops_S: Tensor
    temperature_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    repetition_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    stop_ids: Tensor
    counts_SV: Tensor
    in_prompt_SV: Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, vocab_size: int, max_bias: int, max_stops: int, device: torch.device
    ) -> "SamplingTensors":
        """Greedy slots that want nothing."""
        integers_FS = torch.zeros((len(INTEGERS), num_slots), dtype=torch.int64, device=device)
        floats_FS = torch.zeros((len(FLOATS), num_slots), dtype=torch.float32, device=device)
        vectors = dict(zip((*INTEGERS, *FLOATS), (*integers_FS, *floats_FS), strict=True))
        vectors["top_p_S"].fill_(1)
        vectors["repetition_S"].fill_(1)
        return cls(
            integers_FS,
            floats_FS,
            **vectors,
            bias_ids=torch.zeros((num_slots, max_bias), dtype=torch.int64, device=device),
            bias_values=torch.zeros((num_slots, max_bias), dtype=torch.float32, device=device),
            stop_ids=torch.zeros((num_slots, max_stops), dtype=torch.int64, device=device),
            counts_SV=torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
            in_prompt_SV=torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device),
        )


@dataclass(frozen=True, slots=True)
class SamplingStages:
    """Which stages any row of a batch needs. One that is off is skipped for all rows.

    ``processed``: not a stage; the processed logits are wanted in place of the logits after the call.
    """

    penalties: bool = False
    bias: bool = False
    stops: bool = False
    filters: bool = False
    noise: bool = False
    processed: bool = False


@dataclass(frozen=True, slots=True)
class SamplingOut:
    """``tokens_R`` int64; ``best_R`` float32, the score each token won with: NaN where a logit is NaN. Both dense."""

    tokens_R: Tensor
    best_R: Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "SamplingOut":
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.float32, device=device),
        )
