"""RoPE against complex rotation in float64; writes to the paged cache against a canary of NaN around them."""

import math

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.reference.cache import rope

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]
# Each half of the result is a sum of two products of rounded factors.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3 * 2.0**-8}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def angles(positions: list[int], head_dim: int, theta: float = 10000.0) -> Tensor:
    """[T, D/2] in float64."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies


def cos_sin(positions: list[int], head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    turns = angles(positions, head_dim)
    return torch.cat((turns.cos(), turns.sin()), dim=-1).to(device=device, dtype=dtype)


def rotate_complex(x_TND: Tensor, positions: list[int]) -> Tensor:
    """Dimension i and i + D/2 are the real and imaginary part of one number, turned by position times frequency."""
    low, high = x_TND.double().cpu().chunk(2, dim=-1)
    turned = torch.complex(low, high) * torch.exp(1j * angles(positions, x_TND.shape[-1]))[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def assert_rotated(ours: Tensor, x: Tensor, positions: list[int]) -> None:
    exact = rotate_complex(x, positions)
    low, high = exact.chunk(2, dim=-1)
    radius = torch.cat((torch.hypot(low, high),) * 2, dim=-1)
    assert ours.dtype == x.dtype
    assert ((ours.double().cpu() - exact).abs() <= TOLERANCE[x.dtype] * radius).all()


@each_dtype
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
@pytest.mark.parametrize("tokens", [1, 19])
def test_rope_is_a_complex_rotation(tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    positions = [(7 * i) ** 2 for i in range(tokens)]
    x = random(tokens, 3, head_dim, dtype=dtype, device=device)
    before = x.clone()
    assert_rotated(rope(x, cos_sin(positions, head_dim, dtype, device)), x, positions)
    assert torch.equal(x, before), "the input is only read"


def test_rope_of_position_zero_changes_nothing_and_keeps_lengths(device: str) -> None:
    x = random(19, 9, 64, dtype=torch.float32, device=device)
    assert torch.equal(rope(x, cos_sin([0] * 19, 64, torch.float32, device)), x)
    turned = rope(x, cos_sin(list(range(19)), 64, torch.float32, device))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))


def test_rope_turns_scores_by_the_distance_alone(device: str) -> None:
    q, k = (random(1, 1, 64, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))

    def score(q_position: int, k_position: int) -> float:
        turned_q = rope(q, cos_sin([q_position], 64, torch.float32, device))
        return float((turned_q * rope(k, cos_sin([k_position], 64, torch.float32, device))).sum())

    assert math.isclose(score(9, 2), score(507, 500), rel_tol=1e-3)
    assert not math.isclose(score(9, 2), score(9, 3), rel_tol=1e-3)


def nan_cache(blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((blocks, block_size, heads, head_dim), float("nan"), dtype=dtype, device=device)


def assert_only_written(cache: Tensor, expected: dict[int, Tensor]) -> None:
    """``cache`` holds ``expected`` at its slots, bit for bit, and is untouched everywhere else."""
    rows = cache.flatten(0, 1)
    for slot in range(len(rows)):
        if slot in expected:
            assert torch.equal(rows[slot], expected[slot]), f"slot {slot} holds something else"
        else:
            assert rows[slot].isnan().all(), f"slot {slot} was written"


@each_dtype
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_store_writes_its_slots_and_nothing_else(block_size: int, dtype: torch.dtype, device: str) -> None:
    k, v = (random(5, 3, 19, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    k_cache, v_cache = (nan_cache(20, block_size, 3, 19, dtype, device) for _ in range(2))
    slots = [17, 0, 20 * block_size - 1, 3, 4]
    ops.store_kvcache(k, v, k_cache, v_cache, torch.tensor(slots, device=device))
    assert_only_written(k_cache, {slot: k[i] for i, slot in enumerate(slots)})
    assert_only_written(v_cache, {slot: v[i] for i, slot in enumerate(slots)})


@each_dtype
@pytest.mark.parametrize("slots", [[-1, 5, -1, 0], [-1, -1, -1, -1], [7, -1, -1, -1]])
def test_slot_minus_one_writes_nothing(slots: list[int], dtype: torch.dtype, device: str) -> None:
    k, v = (random(4, 2, 6, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    k_cache, v_cache = (nan_cache(3, 8, 2, 6, dtype, device) for _ in range(2))
    ops.store_kvcache(k, v, k_cache, v_cache, torch.tensor(slots, device=device))
    assert_only_written(k_cache, {slot: k[i] for i, slot in enumerate(slots) if slot >= 0})
    assert_only_written(v_cache, {slot: v[i] for i, slot in enumerate(slots) if slot >= 0})


def test_store_takes_views_of_a_fused_tensor_and_of_one_layer(device: str) -> None:
    qkv = random(5, 15, 64, dtype=torch.float32, device=device)
    caches = torch.full((2, 2, 4, 8, 3, 64), float("nan"), device=device)
    slots = [9, 3, 31, 12, 13]
    ops.store_kvcache(qkv[:, 9:12], qkv[:, 12:], caches[1, 0], caches[1, 1], torch.tensor(slots, device=device))
    assert_only_written(caches[1, 0], {slot: qkv[i, 9:12] for i, slot in enumerate(slots)})
    assert_only_written(caches[1, 1], {slot: qkv[i, 12:] for i, slot in enumerate(slots)})
    assert caches[0].isnan().all()


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (4, 1), (2, 2)])
def test_rope_and_store(heads: int, kv_heads: int, dtype: torch.dtype, device: str) -> None:
    positions, slots, head_dim = [0, 1, 19, 99, 989], [2, -1, 30, 8, 0], 64
    qkv = random(5, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = (part.clone() for part in qkv.split((heads, kv_heads, kv_heads), dim=1))
    k_cache, v_cache = (nan_cache(4, 8, kv_heads, head_dim, dtype, device) for _ in range(2))
    factors = cos_sin(positions, head_dim, dtype, device)
    out = ops.rope_and_store(qkv, kv_heads, factors, k_cache, v_cache, torch.tensor(slots, device=device))
    assert out.shape == (5, heads, head_dim)
    assert_rotated(out, q, positions)
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    assert_rotated(k_cache.flatten(0, 1)[[slots[i] for i in kept]], k[kept], [positions[i] for i in kept])
    assert_only_written(v_cache, {slots[i]: v[i] for i in kept})
    unwritten = [slot for slot in range(32) if slot not in slots]
    assert k_cache.flatten(0, 1)[unwritten].isnan().all()


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 5)],
        [(0, 1), (1, 2), (2, 3)],
        [(3, 2), (2, 1), (1, 0)],
        [(4, 6), (6, 4)],
        [(1, 2), (1, 3), (1, 4)],
    ],
    ids=["one", "chain up", "chain down", "swap", "fan out"],
)
@each_dtype
def test_copy_blocks_reads_every_source_before_any_write(
    copies: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    cache = random(2, 2, 7, 8, 3, 6, dtype=dtype, device=device)
    before = cache.clone()
    sources, destinations = torch.tensor(copies, device=device).unbind(1)
    ops.copy_blocks(cache, sources, destinations)
    origin = {block: block for block in range(7)} | {destination: source for source, destination in copies}
    for block, source in origin.items():
        assert torch.equal(cache[:, :, block], before[:, :, source])


def test_copy_blocks_copies_nan_as_it_is(device: str) -> None:
    cache = random(1, 2, 3, 8, 1, 2, dtype=torch.float32, device=device)
    cache[:, :, 0, 5:] = float("nan")
    ops.copy_blocks(cache, torch.tensor([0], device=device), torch.tensor([2], device=device))
    assert cache[:, :, 2, 5:].isnan().all()
    assert torch.equal(cache[:, :, 2, :5], cache[:, :, 0, :5])
    assert not cache[:, :, 1].isnan().any()
