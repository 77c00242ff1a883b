"""What a batch of slots wants, and one call of either `sample` on it. The reference runs on the CPU.

Padded rows are NaN, and nothing of theirs may be read or written.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.gpu import sampling
from kernels.reference import sampling as reference
from kernels.reference.sampling import NEVER, gumbel_noise, signed64
from kernels.sampling_tensors import SamplingOut, SamplingStages, SamplingTensors
from tests.kernels.filter_oracle import allowed_ids

NAN = float("nan")
MAX_BIAS, MAX_STOPS = 300, 8
ALL = SamplingStages(penalties=True, bias=True, stops=True, filters=True, noise=True)
SAMPLES = {"torch": reference.sample, "triton": sampling.sample}
# Rounding of float32 at the size of a score, and in a sum of probabilities.
TOLERANCE, NEAR = 1e-5, 2e-5


@dataclass
class Slot:
    """What one slot wants."""

    seed: int = 7
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    stops: Sequence[int] = ()
    stops_from: int = 0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1, 0, 0)


def state_of(slots: Sequence[Slot], vocab_size: int, seed: int = 0) -> SamplingTensors:
    """On the CPU. Lists and counts that do not matter are full of what would be noticed."""
    state = SamplingTensors.allocate(len(slots), vocab_size, MAX_BIAS, MAX_STOPS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    state.counts_SV.copy_(torch.tensor([0, 0, 1, 7])[torch.randint(4, state.counts_SV.shape, generator=generator)])
    state.in_prompt_SV.copy_(torch.rand(state.counts_SV.shape, generator=generator) < 0.3)
    state.last_token_S.fill_(-5)
    state.bias_ids.fill_(vocab_size - 1)
    state.bias_values.fill_(1000.0)
    for s, slot in enumerate(slots):
        state.seed_S[s] = signed64(slot.seed)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "frequency", "presence", "stops_from"):
            getattr(state, f"{name}_S")[s] = getattr(slot, name)
        state.num_bias_S[s], state.num_stops_S[s] = len(slot.bias), len(slot.stops)
        state.bias_ids[s, : len(slot.bias)] = torch.tensor(list(slot.bias), dtype=torch.int64)
        state.bias_values[s, : len(slot.bias)] = torch.tensor(list(slot.bias.values()))
        state.stop_ids[s, : len(slot.stops)] = torch.tensor(slot.stops, dtype=torch.int64)
    return state


def copied(state: SamplingTensors, device: str) -> SamplingTensors:
    fields = {f.name: getattr(state, f.name).to(device, copy=True) for f in dataclasses.fields(state)}
    return SamplingTensors(**fields)


def normal(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Drawn:
    """All that a call left, on the CPU."""

    logits_RV: Tensor
    out: SamplingOut
    state: SamplingTensors


def run(
    kind: str,
    logits_RV: Tensor,
    slots: Sequence[int],
    positions: Sequence[int],
    state: SamplingTensors,
    stages: SamplingStages,
    device: str,
) -> Drawn:
    """Call one implementation on copies; Triton's on ``device``, with logits that are not dense and int32 slots."""
    where = device if kind == "triton" else "cpu"
    R, V = logits_RV.shape
    spaced = torch.full((R, 2 * V + 3), NAN, device=where)
    logits = spaced[:, 1 : 2 * V + 1 : 2]
    logits.copy_(logits_RV)
    own = copied(state, where)
    out = SamplingOut(torch.full((R,), -9, device=where), torch.full((R,), -9.0, device=where))
    slots_R = torch.tensor(slots, dtype=torch.int32, device=where)
    SAMPLES[kind](logits, slots_R, torch.tensor(positions, device=where), own, stages, out)
    assert spaced[:, ::2].isnan().all(), "written between the logits"
    return Drawn(logits.cpu(), SamplingOut(out.tokens_R.cpu(), out.best_R.cpu()), copied(own, "cpu"))


def share_of(logits_V: Tensor, ids: list[int]) -> float:
    """The probability of all ``ids`` together."""
    return float(logits_V.double().softmax(0)[ids].sum())


def check_equal(
    logits_RV: Tensor,
    slots: Sequence[int],
    wanted: Sequence[Slot],
    stages: SamplingStages,
    device: str,
    position: int = 11,
) -> None:
    """Triton leaves what the reference leaves, but for tokens at a cut that is too near to call."""
    V = logits_RV.shape[1]
    state = state_of(wanted, V)
    positions = [position + r for r in range(len(slots))]
    logits_RV = logits_RV.clone()
    for row, s in enumerate(slots):
        if s < 0:
            logits_RV[row] = NAN
    stages = dataclasses.replace(stages, processed=True)
    exact, ours = (run(kind, logits_RV, slots, positions, state, stages, device) for kind in SAMPLES)
    unfiltered = run("torch", logits_RV, slots, positions, state, dataclasses.replace(stages, filters=False), device)
    tokens = dict(enumerate(ours.state.last_token_S.tolist()))
    counts = state.counts_SV.clone()
    for row, s in enumerate(slots):
        if s < 0:
            assert int(ours.out.tokens_R[row]) == float(ours.out.best_R[row]) == -9, "a padded row was written"
            assert ours.logits_RV[row].isnan().all(), "a padded row was written"
            continue
        slot, token = wanted[s], int(ours.out.tokens_R[row])
        if stages.filters and slot.temperature:
            limits = (slot.top_k if slot.top_k < V else 0, slot.top_p, slot.min_p)
            kept, near = allowed_ids(unfiltered.logits_RV[row].tolist(), *limits)
            ours_kept = set((ours.logits_RV[row] > NEVER).nonzero().flatten().tolist())
            possible = {i for i in kept if unfiltered.logits_RV[row][i] > NEVER}
            other = list(ours_kept ^ possible)
            if near:
                assert share_of(unfiltered.logits_RV[row], other) < NEAR or slot.min_p, f"row {row}: {other} differ"
                exact.logits_RV[row, other] = ours.logits_RV[row, other]
            assert near or not other, f"row {row}: {len(ours_kept)} kept, {len(possible)} expected: {slot}"
        assert torch.equal(ours.logits_RV[row], exact.logits_RV[row]), f"processed logits of row {row}: {slot}"
        scores = exact.logits_RV[row].clone()
        if stages.noise and slot.temperature:
            scores += gumbel_noise(torch.tensor([signed64(slot.seed)]), torch.tensor([positions[row]]), V)[0]
        assert ours.out.best_R[row] == pytest.approx(float(scores.max()), abs=TOLERANCE)
        assert scores[token] >= scores.max() - TOLERANCE, f"row {row} drew {token}, not {int(scores.argmax())}"
        assert tokens.pop(s) == token
        counts[s, token] += stages.penalties and slot.has_penalties
    assert set(tokens.values()) <= {-5}, "the last token of a slot that is not in the batch was written"
    assert torch.equal(ours.state.counts_SV, counts)
