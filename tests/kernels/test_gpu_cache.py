"""Triton RoPE and cache writes against complex rotation in float64; NaN around what is read, a canary around writes.

On a CPU the kernels run in Triton's interpreter.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.gpu.cache import rope_and_store, store_kvcache
from kernels.reference.cache import HeadNorms
from tests.kernels.test_gpu_norm import each_dtype
from tests.kernels.test_reference_cache import angles, cos_sin, random, rotate_complex
from tests.kernels.test_reference_dense import rmsnorm_float64

pytestmark = pytest.mark.usefixtures("one_thread")

# Relative to the length of the rotated pair: one rounding of the result, and float32's few.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
CANARY = 7.0
POSITIONS = [0, 1, 19, 99, 989]
SLOTS = [2, -1, 30, 8, 0]


@dataclass
class Layer:
    """K and V of one layer of three, all 7 until written."""

    caches: Tensor
    k: Tensor
    v: Tensor


def make_layer(blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Layer:
    caches = torch.full((3, 2, blocks, block_size, heads, head_dim), CANARY, dtype=dtype, device=device)
    return Layer(caches, caches[1, 0], caches[1, 1])


def take_slots(cache: Tensor, slots: list[int]) -> Tensor:
    """What lies in ``slots`` (those that are not -1), which are the canary afterwards."""
    block_size = cache.shape[1]
    rows = [cache[slot // block_size, slot % block_size] for slot in slots if slot >= 0]
    taken = torch.stack(rows)
    for row in rows:
        row.fill_(CANARY)
    return taken


def assert_turned(ours: Tensor, exact: Tensor) -> None:
    assert not ours.isnan().any(), "something was read that must not be"
    low, high = exact.chunk(2, dim=-1)
    radius = torch.cat((torch.hypot(low, high),) * 2, dim=-1)
    wrong = (ours.double().cpu() - exact).abs() > TOLERANCE[ours.dtype] * radius
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off"


def check_rope_and_store(
    qkv: Tensor,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    positions: list[int] = POSITIONS,
    slots: list[int] = SLOTS,
    exact: Tensor | None = None,
    bias: Tensor | None = None,
    norms: HeadNorms | None = None,
    block_size: int = 8,
    slot_dtype: torch.dtype = torch.int64,
) -> None:
    """``exact``: the heads [T, A, D] before norms and rotation in float64, where that is not qkv itself."""
    T, A, D = qkv.shape[-3:]
    heads, device = A - 2 * kv_heads, str(qkv.device)
    layer = make_layer(max(slots) // block_size + 3, block_size, kv_heads, D, dtype, device)
    wide = torch.full((T + 2, heads + 3, D), CANARY, dtype=dtype, device=device)
    out = wide[1:-1, 1:-2]
    factors = cos_sin(positions, D, torch.float32, device)
    given = rope_and_store(
        qkv, kv_heads, factors, layer.k, layer.v, torch.tensor(slots, dtype=slot_dtype, device=device), norms,
        out=out, bias_A=bias,
    )  # fmt: skip
    assert given is out

    q, k, v = (qkv.double() if exact is None else exact).cpu().split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (rmsnorm_float64(x, weight.cpu(), norms.eps) for x, weight in ((q, norms.q_D), (k, norms.k_D)))
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    assert_turned(out, rotate_complex(q, positions))
    assert_turned(take_slots(layer.k, slots), rotate_complex(k, positions)[kept])
    assert_turned(take_slots(layer.v, slots), v[kept])
    assert (layer.caches == CANARY).all(), "something else of the caches was written"
    out.fill_(CANARY)
    assert (wide == CANARY).all(), "something beside q was written"


def within_nan(qkv: Tensor) -> Tensor:
    """The same heads as a view of a wider tensor that is NaN elsewhere."""
    *lead, A, D = qkv.shape
    wide = torch.full((*lead, A + 3, D + 5), float("nan"), dtype=qkv.dtype, device=qkv.device)
    return wide[..., 1 : A + 1, 2 : D + 2].copy_(qkv)


def head_norms(head_dim: int, eps: float, dtype: torch.dtype, device: str) -> HeadNorms:
    q_D, k_D = (random(head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    return HeadNorms(q_D, k_D, eps)


@each_dtype
@pytest.mark.parametrize("head_dim", [2, 6, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (9, 3)])
def test_rope_and_store(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    qkv = within_nan(random(5, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device))
    check_rope_and_store(qkv, kv_heads, dtype)


@each_dtype
@pytest.mark.parametrize("head_dim", [6, 128])
def test_rope_and_store_with_head_norms(head_dim: int, dtype: torch.dtype, device: str) -> None:
    norms = head_norms(head_dim, 1e-2, dtype, device)
    qkv = within_nan(random(5, 9, head_dim, dtype=dtype, device=device))
    check_rope_and_store(qkv, 2, dtype, norms=norms)


@each_dtype
@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_bias_and_partial_sums(normed: bool, parts: int | None, dtype: torch.dtype, device: str) -> None:
    """Partial sums are float32 where the cache is not."""
    head_dim = 10
    shape = (5, 9, head_dim) if parts is None else (parts, 5, 9, head_dim)
    qkv = within_nan(random(*shape, dtype=dtype if parts is None else torch.float32, device=device))
    bias = random(9 * head_dim, dtype=dtype, device=device, seed=5)
    exact = qkv.double() if parts is None else qkv.double().sum(0)
    exact = exact + bias.double().view(9, head_dim)
    norms = head_norms(head_dim, 1e-6, dtype, device)
    check_rope_and_store(qkv, 2, dtype, exact=exact, bias=bias, norms=norms if normed else None)


def test_partial_sums_are_added_in_order(device: str) -> None:
    """V shows the sum itself, bit for bit; in another order it would be another one."""
    qkv, bias = (random(*s, dtype=torch.float32, device=device) for s in ((5, 4, 3, 64), (3 * 64,)))
    layer = make_layer(1, 4, 1, 64, torch.float32, device)
    factors, slots = cos_sin([0, 1, 2, 3], 64, torch.float32, device), torch.arange(4, device=device)
    rope_and_store(qkv, 1, factors, layer.k, layer.v, slots, bias_A=bias)
    expected = (((qkv[0] + qkv[1]) + qkv[2]) + qkv[3]) + qkv[4] + bias.view(3, 64)
    backwards = (((qkv[4] + qkv[3]) + qkv[2]) + qkv[1]) + qkv[0] + bias.view(3, 64)
    assert torch.equal(layer.v[0, :, 0], expected[:, 2])
    assert not torch.equal(layer.v[0, :, 0], backwards[:, 2])


@each_dtype
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"), [(32, 3, 1, 6), (33, 7, 2, 6), (35, 40, 1, 64), (99, 3, 1, 256)]
)
def test_many_tokens(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Programs of several heads, of which the last may have too few; block sizes that are no powers of two."""
    norms = head_norms(head_dim, 1e-5, dtype, device)
    qkv = within_nan(random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device))
    slots = torch.randperm(130, generator=torch.Generator().manual_seed(0))[:tokens].tolist()
    slots[3] = slots[-1] = -1
    positions = [(7 * i) % 1000 for i in range(tokens)]
    check_rope_and_store(qkv, kv_heads, dtype, positions=positions, slots=slots, norms=norms, block_size=5)


@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_slots_of_both_integer_types(slot_dtype: torch.dtype, block_size: int, device: str) -> None:
    qkv = random(5, 5, 6, dtype=torch.float32, device=device)
    check_rope_and_store(qkv, 1, torch.float32, block_size=block_size, slot_dtype=slot_dtype)


@each_dtype
def test_factors_of_the_model_dtype_and_an_own_output(dtype: torch.dtype, device: str) -> None:
    qkv, factors = random(5, 5, 64, dtype=dtype, device=device), cos_sin(POSITIONS, 64, dtype, device)
    layer = make_layer(4, 8, 1, 64, dtype, device)
    q = rope_and_store(qkv, 1, factors, layer.k, layer.v, torch.tensor(SLOTS, device=device))
    assert q.shape == (5, 3, 64)
    assert q.dtype == dtype
    cos, sin = factors.double().chunk(2, dim=-1)
    turned = torch.view_as_complex(torch.stack(qkv[:, :3].double().chunk(2, dim=-1), dim=-1))
    turned = turned * torch.complex(cos, sin)[:, None]
    assert_turned(q, torch.cat((turned.real, turned.imag), dim=-1).cpu())


def test_position_zero_changes_nothing_and_rows_of_no_slot_are_rotated(device: str) -> None:
    qkv = random(3, 4, 64, dtype=torch.float32, device=device)
    layer = make_layer(1, 8, 1, 64, torch.float32, device)
    slots = torch.full((3,), -1, device=device)
    same = rope_and_store(qkv, 1, cos_sin([0] * 3, 64, torch.float32, device), layer.k, layer.v, slots)
    assert torch.equal(same, qkv[:, :2])
    turned = rope_and_store(qkv, 1, cos_sin([5] * 3, 64, torch.float32, device), layer.k, layer.v, slots)
    assert_turned(turned, rotate_complex(qkv[:, :2], [5] * 3))
    assert (layer.caches == CANARY).all()
    assert rope_and_store(qkv[:0], 1, angles([], 64).float(), layer.k, layer.v, slots[:0]).shape == (0, 2, 64)


@each_dtype
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 19), (1, 128), (2, 1)])
def test_store(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str) -> None:
    """K and V are views of one tensor; slot -1 stores nothing."""
    kv = random(6, 2 * kv_heads + 3, head_dim, dtype=dtype, device=device)
    k, v = kv[:, 1 : kv_heads + 1], kv[:, kv_heads + 2 : 2 * kv_heads + 2]
    slots = [17, -1, 0, 3, -1, 20 * block_size - 1 if block_size > 1 else 19]
    layer = make_layer(20, block_size, kv_heads, head_dim, dtype, device)
    store_kvcache(k, v, layer.k, layer.v, torch.tensor(slots, device=device))
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    assert torch.equal(take_slots(layer.k, slots), k[kept])
    assert torch.equal(take_slots(layer.v, slots), v[kept])
    assert (layer.caches == CANARY).all()
    store_kvcache(k[:0], v[:0], layer.k, layer.v, torch.tensor(slots[:0], device=device))


def assert_written(cache: Tensor, slots: list[int], expected_TKD: Tensor) -> None:
    """Rows of the slots, without a look at all of a cache that is too large for it."""
    rows = torch.stack([cache[slot // cache.shape[1], slot % cache.shape[1]] for slot in slots])
    assert_turned(rows, expected_TKD.double().cpu())


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("far", ["blocks", "places in a block", "heads"])
def test_offsets_beyond_2_to_31_elements(far: str, slot_dtype: torch.dtype, device: str) -> None:
    """Strides below 2^31 whose products are not. The blocks' case is also a pool of more than 4 GiB."""
    stride = 2**30 + 128
    memory = torch.empty(2 * stride + 2**13, dtype=torch.float16, device=device)
    block, place, head = {"blocks": (stride, 192, 64), "heads": (512, 64, stride)}.get(far, (512, stride, 64))
    caches = memory.as_strided((2, 3, 3, 3, 64), (2048, block, place, head, 1))
    qkv, slots = random(2, 8, 64, dtype=torch.float16, device=device), [8, 1]
    factors, slots_T = cos_sin([3, 4], 64, torch.float32, device), torch.tensor(slots, dtype=slot_dtype, device=device)
    rope_and_store(qkv, 3, factors, caches[0], caches[1], slots_T)
    assert_written(caches[0], slots, rotate_complex(qkv[:, 2:5], [3, 4]))
    assert_written(caches[1], slots, qkv[:, 5:])
    store_kvcache(qkv[:, :3], qkv[:, 1:4], caches[0], caches[1], slots_T)
    assert_written(caches[0], slots, qkv[:, :3])
    assert_written(caches[1], slots, qkv[:, 1:4])


def test_inputs_beyond_2_to_31_elements(device: str) -> None:
    """Tokens, parts and outputs that far apart."""
    stride = 2**30 + 128
    memory = torch.empty(2 * stride + 2**12, dtype=torch.float16, device=device)
    values = random(3, 5, 64, dtype=torch.float16, device=device)
    factors, slots = cos_sin([3, 4, 5], 64, torch.float32, device), [8, 1, 2]
    layer = make_layer(2, 8, 1, 64, torch.float16, device)
    qkv, out = memory.as_strided((3, 5, 64), (stride, 64, 1)), memory[1024:].as_strided((3, 3, 64), (stride, 64, 1))
    qkv.copy_(values)
    rope_and_store(qkv, 1, factors, layer.k, layer.v, torch.tensor(slots, device=device), out=out)
    assert_turned(out, rotate_complex(values[:, :3], [3, 4, 5]))
    assert_written(layer.v, slots, values[:, 4:])
    store_kvcache(qkv[:, :1], qkv[:, 1:2], layer.k, layer.v, torch.tensor(slots, device=device))
    assert_written(layer.k, slots, values[:, :1])
    rope_and_store(qkv[:, None], 1, factors[:1], layer.k, layer.v, torch.tensor([3], device=device))
    assert_written(layer.v, [3], values.double().sum(0, keepdim=True)[:, 4:])


def test_a_slot_beyond_2_to_31(device: str) -> None:
    memory = torch.empty(2**31 + 64, dtype=torch.int8, device=device)
    cache, slot = memory.view(-1, 16, 1, 1), 2**31 + 40
    k, v = (torch.tensor([[[value]]], dtype=torch.int8, device=device) for value in (3, 5))
    for value in (k, v):
        store_kvcache(value, value, cache, cache, torch.tensor([slot], device=device))
        assert memory[slot] == value.item()


@each_dtype
def test_dependent_launches_give_the_same(dtype: torch.dtype, device: str) -> None:
    if device != "cuda":
        pytest.skip("programmatic dependent launch needs a GPU")
    qkv, bias = random(3, 5, 16, 128, dtype=torch.float32, device=device), random(2048, dtype=dtype, device=device)
    factors, slots = cos_sin(POSITIONS, 128, torch.float32, device), torch.tensor(SLOTS, device=device)
    layer = make_layer(4, 8, 1, 128, dtype, device)

    def chain(pdl: bool) -> list[Tensor]:
        """Each takes the q of the one before for its qkv."""
        outs = [rope_and_store(qkv, 1, factors, layer.k, layer.v, slots, bias_A=bias, pdl=pdl)]
        while outs[-1].shape[1] > 2:
            outs.append(rope_and_store(outs[-1], 1, factors, layer.k, layer.v, slots, pdl=pdl))
        return [layer.caches, *outs]

    plain = [out.clone() for out in chain(pdl=False)]
    chain(pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(pdl=True)
    for _ in range(10):
        layer.caches.fill_(CANARY)
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(captured, plain, strict=True):
            assert torch.equal(ours, expected)
