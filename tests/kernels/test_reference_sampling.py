"""Sampling: bits against scalar Python, noise and draws against their distributions, filters against an oracle."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference.sampling import (
    NEVER,
    apply_penalties,
    filter_logits,
    gumbel_noise,
    random_bits,
    signed64,
    splitmix64,
    sub_seed,
)
from tests.kernels.filter_oracle import allowed_ids

pytestmark = pytest.mark.usefixtures("one_thread")

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1
GAMMA = 0.5772156649015329


# -- bits -------------------------------------------------------------------------------------------------------


def scalar_splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def scalar_lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)


def scalar_bits(seed: int, position: int, token_id: int) -> int:
    key = scalar_splitmix64(seed ^ scalar_splitmix64(position))
    spread = (token_id * 0x9E3779B1) & MASK_32
    return scalar_lowbias32(scalar_lowbias32(spread ^ (key & MASK_32)) ^ (key >> 32))


def bits_of(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: str) -> Tensor:
    """As unsigned values in int64 on the host."""
    seeds_R = torch.tensor([signed64(seed) for seed in seeds], device=device)
    bits = random_bits(seeds_R, torch.tensor(positions, device=device), vocab_size)
    assert bits.dtype == torch.int32
    return bits.cpu().long() & MASK_32


def test_splitmix64_gives_the_published_sequence() -> None:
    """Outputs of the generator seeded with 1234567; its state grows by the golden constant."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK_64 for i in range(3)]
    assert [splitmix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_sub_seeds() -> None:
    assert sub_seed(42, 0) == 42
    assert [sub_seed(42, i) for i in (1, 2)] == [scalar_splitmix64(43), scalar_splitmix64(44)]
    assert sub_seed(2**64 - 1, 1) == scalar_splitmix64(0)
    assert len({sub_seed(7, i) for i in range(16)}) == 16


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_signed64_keeps_the_bits(value: int) -> None:
    assert signed64(value) & MASK_64 == value
    assert -(2**63) <= signed64(value) < 2**63


def test_random_bits_equal_scalar_arithmetic(device: str) -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEF12345678]
    positions = [0, 1, 2, 511, 2**20, 131071, 7, 2**31 + 5]
    bits = bits_of(seeds, positions, 989, device)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token_id in (0, 1, 2, 3, 500, 987, 988):
            assert int(bits[row, token_id]) == scalar_bits(seed, position, token_id)
    assert int(bits_of([5], [9], 151_936, device)[0, -1]) == scalar_bits(5, 9, 151_935)


def test_bits_of_a_row_do_not_depend_on_batch_or_vocabulary(device: str) -> None:
    rng = random.Random(3)
    seeds, positions = [rng.getrandbits(64) for _ in range(64)], [rng.randrange(10_000) for _ in range(64)]
    together = bits_of(seeds, positions, 512, device)
    for row in (0, 31, 63):
        assert torch.equal(bits_of([seeds[row]], [positions[row]], 512, device)[0], together[row])
        assert torch.equal(bits_of([seeds[row]], [positions[row]], 2000, device)[0, :512], together[row])


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """As a number of standard deviations from its mean."""
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_bits_are_uniform(vary: str, shift: int, device: str) -> None:
    """256 bins of 8 bits, over neighbouring seeds, positions or token ids."""
    seeds = range(2000) if vary == "seed" else [77] * 2000
    positions = range(2000) if vary == "position" else [5] * 2000
    bits = bits_of([77], [5], 100_000, device) if vary == "token" else bits_of(seeds, positions, 50, device)
    counts = torch.bincount((bits.flatten() >> shift) & 255, minlength=256).double()
    assert abs(chi_square(counts, torch.full((256,), bits.numel() / 256, dtype=torch.float64))) < 5


def test_neighbouring_rows_share_no_bits(device: str) -> None:
    """Half of the bits differ between consecutive positions, seeds and token ids (to 5 standard deviations)."""
    rows = bits_of([9, 9, 10], [4, 5, 4], 4000, device)
    for one, other in ((rows[0], rows[1]), (rows[0], rows[2]), (rows[0][:-1], rows[0][1:])):
        differing = sum(int(word).bit_count() for word in (one ^ other).tolist())
        total = 32 * len(one)
        assert abs(differing - total / 2) < 5 * math.sqrt(total) / 2


# -- noise and draws --------------------------------------------------------------------------------------------


def test_gumbel_noise_is_finite_with_the_right_moments(device: str) -> None:
    noise = gumbel_noise(torch.arange(200, device=device), torch.full((200,), 3, device=device), 10_000).double()
    assert noise.isfinite().all()
    count = noise.numel()
    variance = math.pi**2 / 6
    assert abs(float(noise.mean()) - GAMMA) < 5 * math.sqrt(variance / count)
    # The fourth central moment of a Gumbel variable is 27/5 of the variance squared.
    assert abs(float(noise.var()) - variance) < 5 * variance * math.sqrt((27 / 5 - 1) / count)


def test_gumbel_noise_equals_its_formula_in_float64(device: str) -> None:
    seeds, positions = torch.arange(50, device=device), torch.zeros(50, dtype=torch.int64, device=device)
    u = (bits_of(range(50), [0] * 50, 20_000, device).double() + 0.5) / 2**32
    exact = -torch.log(-torch.log1p(-u))
    ours = gumbel_noise(seeds, positions, 20_000).cpu().double()
    # 1 - u is rounded to 2^-24, which weighs most where the series ends, at u = 2^-10.
    assert (ours - exact)[u < 0.999].abs().max() < 2.0**-14
    assert (ours - exact)[u < 2.0**-10].abs().max() < 1e-6
    # Noise is smallest near u = 1, where float32 has steps of 2^-24: -log(-log(2^-24)) = -2.8.
    assert ours.min() >= -2.82
    assert ours.max() > 12


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_draws_follow_the_softmax(scale: float, device: str) -> None:
    draws = 60_000
    logits = scale * torch.randn(40, generator=torch.Generator().manual_seed(5))
    noise = gumbel_noise(torch.full((draws,), 123, device=device), torch.arange(draws, device=device), 40).cpu()
    counts = torch.bincount((logits + noise).argmax(dim=1), minlength=40).double()
    expected = draws * logits.double().softmax(dim=0)
    assert expected.min() > 5
    assert abs(chi_square(counts, expected)) < 5


# -- penalties --------------------------------------------------------------------------------------------------


def test_penalties_follow_the_formula(device: str) -> None:
    rng = random.Random(1)
    rows, vocab = 19, 99
    logits = [[rng.gauss(0, 3) if rng.random() < 0.9 else 0.0 for _ in range(vocab)] for _ in range(rows)]
    counts = [[rng.choice([0, 0, 0, 1, 7]) for _ in range(vocab)] for _ in range(rows)]
    in_prompt = [[rng.random() < 0.3 for _ in range(vocab)] for _ in range(rows)]
    repetition = [rng.choice([1.0, 0.5, 1.3, 10.0]) for _ in range(rows)]
    frequency = [rng.choice([0.0, -2.0, 0.7, 2.0]) for _ in range(rows)]
    presence = [rng.choice([0.0, -2.0, 0.3, 2.0]) for _ in range(rows)]
    logits_RV = torch.tensor(logits, device=device)
    before = logits_RV.clone()
    ours = apply_penalties(
        logits_RV,
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(in_prompt, device=device),
        *(torch.tensor(values, device=device) for values in (repetition, frequency, presence)),
    ).tolist()
    assert torch.equal(logits_RV, before), "the input is only read"
    for r in range(rows):
        for v in range(vocab):
            value = logits[r][v]
            if counts[r][v] or in_prompt[r][v]:
                value = value / repetition[r] if value > 0 else value * repetition[r]
            value -= frequency[r] * counts[r][v] + presence[r] * (counts[r][v] > 0)
            assert ours[r][v] == pytest.approx(value, abs=1e-5)


def test_neutral_penalties_change_no_bit(device: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)).to(device)
    counts, in_prompt = torch.full((3, 50), 4, dtype=torch.int32, device=device), logits > 0
    one, zero = torch.ones(3, device=device), torch.zeros(3, device=device)
    assert torch.equal(apply_penalties(logits, counts, in_prompt, one, zero, zero), logits)


# -- filters ----------------------------------------------------------------------------------------------------


def check_filter(logits_RV: Tensor, rows: Sequence[tuple[int, float, float]], device: str) -> int:
    """Every row against the definition; returns how many were clear enough to compare."""
    logits_RV = logits_RV.to(device)
    top_k, top_p, min_p = zip(*rows, strict=True)
    ours = filter_logits(
        logits_RV,
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
    )
    compared = 0
    for row, parameters in enumerate(rows):
        kept = set((ours[row] > NEVER).nonzero().flatten().tolist())
        assert torch.equal(ours[row][list(kept)], logits_RV[row][list(kept)]), "kept logits are unchanged"
        expected, near = allowed_ids(logits_RV[row].tolist(), *parameters)
        if not near:
            assert kept == expected, f"row {row}: {len(kept)} kept, {len(expected)} expected, {parameters}"
            compared += 1
    return compared


top_ks = st.sampled_from([0, 0, 1, 2, 5, 19, 40, 10_000])
top_ps = st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])
min_ps = st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    values=st.integers(1, 60).flatmap(lambda v: st.lists(st.sampled_from(range(-8, 9)), min_size=v, max_size=v)),
    rows=st.lists(st.tuples(top_ks, top_ps, min_ps), min_size=1, max_size=5),
)
def test_filters_of_small_vocabularies_with_many_ties(values: list[int], rows: list[tuple[int, float, float]]) -> None:
    check_filter(torch.tensor([values] * len(rows)) * 0.73, rows, "cpu")


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.01, 0.5, 3.0]),
    ties=st.sampled_from([None, 1, 50]),
    rows=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 1000, 1023, 1024, 1025, 2000, 4999, 5000, 9999]), top_ps, min_ps),
        min_size=1,
        max_size=2,
    ),
)
def test_filters_of_a_vocabulary_larger_than_the_head(
    seed: int, spread: float, ties: int | None, rows: list[tuple[int, float, float]]
) -> None:
    """Flat rows need more than the head; rounded ones have ties that cross its end."""
    logits = spread * torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(seed))
    check_filter(logits if ties is None else (logits * ties).round() / ties, rows, "cpu")


def test_top_p_is_a_share_of_what_a_large_top_k_left(device: str) -> None:
    """The cut lies in the head, but where depends on the probability of all top_k, of which the head has a part."""
    logits = 0.2 * torch.randn(3, 5000, generator=torch.Generator().manual_seed(8))
    assert check_filter(logits, [(2000, 0.1, 0.0), (1025, 0.2, 0.0), (0, 0.1, 0.0)], device) == 3


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0, 1]), (0.25, [0]), (0.500001, [0, 1, 2]), (1.0, [0, 1, 2, 3])])
def test_top_p_stops_as_soon_as_it_is_reached(top_p: float, kept: list[int], device: str) -> None:
    logits = torch.full((1, 4), 2.5, device=device)
    zero = torch.zeros(1, device=device)
    ours = filter_logits(logits, zero.long(), torch.tensor([top_p], device=device), zero)
    assert (ours[0] > NEVER).nonzero().flatten().tolist() == kept


def test_top_p_one_cuts_nothing_however_unlikely(device: str) -> None:
    """Next to a logit of 50, float32 sums of the others' probabilities do not grow."""
    logits = torch.full((1, 2000), -50.0, device=device)
    logits[0, 9] = 50.0
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    ours = filter_logits(logits, torch.tensor([3], device=device), one, zero)
    assert (ours[0] > NEVER).nonzero().flatten().tolist() == [0, 1, 9]
    assert torch.equal(filter_logits(logits, zero.long(), one, zero), logits)


def test_nan_is_not_filtered_away(device: str) -> None:
    """The sampler must see it."""
    logits = torch.zeros(1, 3000, device=device)
    logits[0, 7] = float("nan")
    top_k, top_p = torch.tensor([5], device=device), torch.tensor([0.9], device=device)
    assert filter_logits(logits, top_k, top_p, torch.tensor([0.1], device=device)).max().isnan()
