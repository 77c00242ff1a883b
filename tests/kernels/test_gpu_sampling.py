"""`sample` in Triton, interpreted on a CPU or compiled for a GPU, against the reference."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu import sampling
from kernels.reference.sampling import NEVER, gumbel_noise, signed64
from kernels.sampling_tensors import SamplingOut, SamplingStages
from tests.kernels.sampling_cases import (
    ALL,
    MAX_BIAS,
    MAX_STOPS,
    NAN,
    SAMPLES,
    TOLERANCE,
    Slot,
    check_equal,
    copied,
    normal,
    run,
    state_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# -- noise ------------------------------------------------------------------------------------------------------


@triton.jit
def write_noise(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, V: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = sampling.gumbel(tl.load(seeds + row), tl.load(positions + row), ids)
    tl.store(out + row * V + ids, noise, mask=ids < V)


def test_noise_has_the_bits_of_the_reference(device: str) -> None:
    """One wrong bit would change it altogether."""
    V = 20_000
    seeds = torch.tensor([signed64(seed) for seed in (0, 1, 2**32 + 5, 2**63, 2**64 - 1, 0xDEADBEEF12345678)])
    positions = torch.tensor([0, 1, 511, 131071, 2**31 + 5, 7])
    out = torch.full((6, V), NAN, device=device)
    write_noise[(6, triton.cdiv(V, 4096))](seeds.to(device), positions.to(device), out, V, BLOCK=4096)
    exact = gumbel_noise(seeds, positions, V)
    assert (out.cpu() - exact).abs().max() < TOLERANCE
    assert exact.max() > 10, "the series near u = 0 was not seen"


# -- stages -----------------------------------------------------------------------------------------------------

# Every stage, neutral rows between, greedy ones too.
WANTED = [
    Slot(),
    Slot(temperature=1.0, seed=1),
    Slot(temperature=0.6, seed=2, top_k=5, repetition=1.3, bias={0: 3.0}),
    Slot(temperature=1.7, seed=2**64 - 3, top_p=0.8, frequency=0.7, stops=(0, 3), stops_from=1000),
    Slot(top_k=2, top_p=0.1, min_p=0.5, presence=-0.6, stops=(1,), stops_from=10**12),
    Slot(temperature=1.0, seed=4, min_p=0.1, stops=(0,), stops_from=5),
    Slot(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition=0.7, frequency=-2.0, presence=2.0, seed=9),
    Slot(temperature=1e-30, top_p=0.9, repetition=3.0),
    Slot(temperature=0.8, top_k=10_000, bias={0: -100.0}, seed=2**63),
]


def fitting(slots: Sequence[Slot], vocab_size: int, rng: random.Random) -> list[Slot]:
    """The ids of ``slots`` moved into the vocabulary, and more of them; more than a program takes at once."""
    ids = range(vocab_size)
    return [
        dataclasses.replace(
            slot,
            stops=tuple(rng.sample(ids, min(MAX_STOPS, vocab_size - 1))) if slot.stops else (),
            bias={i: rng.uniform(-9, 9) for i in rng.sample(ids, min(MAX_BIAS, vocab_size))} if slot.bias else {},
        )
        for slot in slots
    ]


@pytest.mark.parametrize("vocab_size", [1, 19, 99, 1000, 4099])
@pytest.mark.parametrize(
    "stages",
    [
        SamplingStages(),
        SamplingStages(noise=True),
        SamplingStages(penalties=True),
        SamplingStages(bias=True),
        SamplingStages(stops=True),
        SamplingStages(filters=True, noise=True),
        ALL,
    ],
    ids=lambda stages: "+".join(f.name for f in dataclasses.fields(stages) if getattr(stages, f.name)) or "greedy",
)
def test_stages_equal_the_reference(stages: SamplingStages, vocab_size: int, device: str) -> None:
    """Rows in any order of slots, some padded; slots that are not in the batch stay as they are."""
    rng = random.Random(vocab_size)
    wanted = [*fitting(WANTED, vocab_size, rng), Slot(), Slot()]
    if vocab_size > 1000 and stages.filters:
        wanted, order = wanted[5:8], [1, -1, 2]  # the interpreter is slow
    else:
        order = [4, -1, 0, 8, 2, 6, 3, -1, 1, 7, 5]
    check_equal(normal(len(order), vocab_size, seed=vocab_size), order, wanted, stages, device)


@pytest.mark.parametrize("number", [1, 3])
def test_few_rows(number: int, device: str) -> None:
    wanted = fitting(WANTED, 99, random.Random(number))
    check_equal(normal(number, 99), [6, 3, 8][:number], wanted, ALL, device)


@pytest.mark.parametrize("kind", SAMPLES)
def test_no_rows_at_all(kind: str, device: str) -> None:
    drawn = run(kind, torch.empty(0, 9), [], [], state_of([Slot()], 9), ALL, device)
    assert drawn.state.last_token_S.tolist() == [-5]


@pytest.mark.parametrize("kind", SAMPLES)
def test_only_padded_rows(kind: str, device: str) -> None:
    drawn = run(kind, torch.full((2, 9), NAN), [-1, -1], [0, 0], state_of([Slot(temperature=1)], 9), ALL, device)
    assert drawn.out.tokens_R.tolist() == [-9, -9]
    assert drawn.state.last_token_S.tolist() == [-5]


@pytest.mark.parametrize("kind", SAMPLES)
def test_logits_are_only_read_without_stages_that_change_them(kind: str, device: str) -> None:
    logits = normal(2, 99)
    state = state_of([Slot(temperature=0.5), Slot()], 99)
    drawn = run(kind, logits, [0, 1], [3, 4], state, SamplingStages(noise=True), device)
    assert torch.equal(drawn.logits_RV, logits)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(("position", "expected"), [(19, 1), (20, 3), (21, 3)])
def test_stops_are_held_back_up_to_a_position(kind: str, position: int, expected: int, device: str) -> None:
    """A bias does not bring them back."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    state = state_of([Slot(stops=(2, 3), stops_from=20, bias={3: 5.0})], 4)
    drawn = run(kind, logits, [0], [position], state, SamplingStages(bias=True, stops=True), device)
    assert drawn.out.tokens_R.tolist() == [expected]


# -- ties, infinities, NaN --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_lowest_id_wins_a_tie(kind: str, device: str) -> None:
    """Across blocks, too; and zero has no sign."""
    V = 2500
    logits = torch.zeros(5, V)
    logits[0, [2400, 1100, 1700]] = 1.0
    logits[1] = -0.0
    logits[1, 700] = 0.0
    logits[2] = NEVER
    logits[3] = -3.0
    logits[3, 2499] = NEVER
    logits[4, 1030:] = 3e38
    drawn = run(kind, logits, range(5), range(5), state_of([Slot()] * 5, V), SamplingStages(), device)
    assert drawn.out.tokens_R.tolist() == [1100, 0, 0, 0, 1030]
    assert drawn.out.best_R.tolist() == pytest.approx([1.0, 0.0, NEVER, -3.0, 3e38])


@pytest.mark.parametrize("stages", [SamplingStages(), SamplingStages(noise=True), ALL], ids=["greedy", "noise", "all"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_nan_shows_and_stays_in_its_row(kind: str, stages: SamplingStages, device: str) -> None:
    V = 1100
    state = state_of([Slot(temperature=0.7 * (r > 1), top_k=3, top_p=0.5, min_p=0.2) for r in range(6)], V)
    logits = normal(6, V)
    clean = run(kind, logits, range(6), range(6), state, stages, device)
    logits[0, 0], logits[2, 1098], logits[4] = NAN, NAN, NAN
    drawn = run(kind, logits, range(6), range(6), state, stages, device)
    assert drawn.out.best_R.isnan().tolist() == [True, False, True, False, True, False]
    assert drawn.out.tokens_R[[0, 2]].tolist() == [0, 1098]
    assert 0 <= drawn.out.tokens_R[4] < V
    for row in (1, 3, 5):
        assert drawn.out.tokens_R[row] == clean.out.tokens_R[row]
        assert drawn.out.best_R[row] == clean.out.best_R[row]


@pytest.mark.parametrize("kind", SAMPLES)
def test_infinite_logits(kind: str, device: str) -> None:
    """Minus infinity is never drawn while there is anything else; filters leave it out, and count it as a token."""
    V = 600
    logits = torch.full((5, V), NEVER)
    logits[0, 500], logits[1, [7, 400]] = -2.0, 1.0
    logits[2, :] = NEVER
    logits[3, 599] = float("inf")
    logits[4, 3] = 1e38
    filtered = Slot(temperature=1.0, top_k=20, top_p=0.9, min_p=0.1)
    unfiltered = [dataclasses.replace(filtered, top_k=0), Slot(temperature=1.0)]
    wanted = [filtered, dataclasses.replace(filtered, top_k=500), filtered, *unfiltered]
    drawn = run(kind, logits, range(5), range(5), state_of(wanted, V), ALL, device)
    assert drawn.out.tokens_R[0] == 500
    assert int(drawn.out.tokens_R[1]) in (7, 400)
    assert drawn.out.best_R[2] == NEVER
    assert drawn.out.tokens_R[[2, 3, 4]].tolist() == [0, 599, 3]


# -- the batch and the graph --------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    wanted = [Slot(temperature=0.9, seed=r, top_k=20 * (r % 2), top_p=0.8) for r in range(4)]
    state, logits = state_of(wanted, 700), normal(4, 700)
    whole = run("triton", logits, range(4), range(4), state, ALL, device)
    for row in (0, 3):
        alone = run("triton", logits[row : row + 1], [row], [row], state, ALL, device)
        assert torch.equal(alone.out.tokens_R[0], whole.out.tokens_R[row])
        assert torch.equal(alone.out.best_R[0], whole.out.best_R[row])


def test_nothing_waits_and_a_graph_repeats_it(device: str) -> None:
    """A captured call does, with what is in its buffers when it is replayed, what the call itself would do."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    V, R = 151_936, 9
    wanted = fitting(WANTED, V, random.Random(3))
    state = copied(state_of(wanted, V), device)
    logits, slots = normal(R, V).to(device), torch.arange(R, device=device)
    static, positions = logits.clone(), torch.full((R,), 11, device=device)
    out = SamplingOut.allocate(R, torch.device(device))
    sampling.sample(static, slots, positions, state, ALL, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampling.sample(static, slots, positions, state, ALL, out)
    for step in range(3):
        fresh = normal(R, V, seed=step).to(device)
        static.copy_(fresh)
        positions.fill_(20 + step)
        eager = copied(state, device)
        expected = SamplingOut.allocate(R, torch.device(device))
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampling.sample(fresh, slots, positions, eager, ALL, expected)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert torch.equal(out.tokens_R, expected.tokens_R)
        assert torch.equal(out.best_R, expected.best_R)
        assert torch.equal(state.counts_SV, eager.counts_SV)
