"""top_k, top_p and min_p in Triton, interpreted on a CPU or compiled for a GPU, against what they mean."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.gpu import sampling_filters, sampling_search
from kernels.reference.sampling import NEVER
from kernels.sampling_tensors import SamplingStages
from tests.kernels.sampling_cases import Slot, check_equal, normal, run, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Tensor], Tensor]
SHAPES: dict[str, Change] = {
    "normal": lambda x: x,
    "flat": lambda x: 0.02 * x,
    "few values": lambda x: x.round(),
    "many ties": lambda x: (4 * x).round() / 4,
    "all equal": lambda x: 0 * x + 2.5,
    "one far above": lambda x: torch.cat((x[:, :5], x[:, 5:6] + 60, x[:, 6:]), dim=1),
    "huge": lambda x: 1e30 * x,
    "some never": lambda x: x.masked_fill(x < 0, NEVER),
    "far apart": lambda x: x.exp().exp().clamp(max=1e38) - 1e4,
}
LIMITS = [(0, 0.9, 0.0), (40, 1.0, 0.0), (100, 0.7, 0.01), (5, 0.6, 0.0), (0, 1e-20, 0.0), (0, 1.0, 0.2)]


def check_filters(logits_RV: Tensor, limits: Sequence[tuple[int, float, float]], device: str) -> None:
    slots = [Slot(temperature=1.0, seed=i, top_k=k, top_p=p, min_p=m) for i, (k, p, m) in enumerate(limits)]
    check_equal(logits_RV, range(len(slots)), slots, SamplingStages(filters=True, noise=True), device)


@pytest.mark.parametrize("shape", SHAPES)
def test_filters_of_any_shape_of_logits(shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, a small head and short lists, so that 150 tokens go all the ways that 151,936 go."""
    monkeypatch.setattr(sampling_filters, "COLUMNS", 32)
    monkeypatch.setattr(sampling_filters, "HEAD", 8)
    monkeypatch.setattr(sampling_search, "BLOCK", 64)
    monkeypatch.setattr(sampling_search, "STEP", 32)
    monkeypatch.setattr(sampling_search, "MAX_FOUND", 16)
    monkeypatch.setattr(sampling_search, "PASSES", 2)
    check_filters(SHAPES[shape](normal(len(LIMITS), 150)), LIMITS, device)


@pytest.mark.parametrize("head", [1, 256])
def test_a_list_of_found_tokens_may_be_full(head: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_filters, "HEAD", head)
    monkeypatch.setattr(sampling_search, "MAX_FOUND", 16)
    check_filters(0.0 * normal(2, 16), [(0, 0.999, 0.0), (15, 1.0, 0.0)], device)


def test_filters_of_a_vocabulary_of_several_blocks(device: str) -> None:
    """At the sizes that are used; some rows need more than the head."""
    check_filters(0.5 * normal(2, 9000), [(50, 0.9, 0.0), (0, 0.95, 0.0)], device)


@pytest.mark.parametrize(("spread", "ties"), [(0.05, None), (1.0, 16), (4.0, None)])
def test_filters_of_a_large_vocabulary(spread: float, ties: int | None, device: str) -> None:
    if device != "cuda":
        pytest.skip("too slow in the interpreter")
    logits = normal(16, 151_936, seed=5, scale=spread)
    if ties:
        logits = (logits * ties).round() / ties
    limits = [*LIMITS, (256, 0.9, 0.0), (257, 0.9, 0.0), (5000, 0.5, 0.0), (100_000, 0.99, 0.0)]
    check_filters(logits[: len(limits)], limits, device)


def test_draws_follow_the_filtered_softmax(device: str) -> None:
    draws, V = 400, 12
    logits = normal(1, V).expand(draws, V)
    state = state_of([Slot(temperature=1.5, seed=r, top_k=5) for r in range(draws)], V)
    stages = SamplingStages(filters=True, noise=True)
    kind = "triton" if device == "cuda" else "torch"
    drawn = run(kind, logits, range(draws), [3] * draws, state, stages, device)
    probability = (logits[0] / 1.5).topk(5)
    expected = torch.zeros(V, dtype=torch.float64)
    expected[probability.indices] = draws * probability.values.double().softmax(0)
    counts = torch.bincount(drawn.out.tokens_R, minlength=V).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < 4 + 5 * math.sqrt(8)
