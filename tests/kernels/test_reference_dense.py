"""Norms, activation and linear against their formulas in float64, on sizes that fit no tile."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [1, 19, 99, 989]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
# One rounding of the result for half precision; float32 accumulates over up to 989 terms.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_size = pytest.mark.parametrize("size", SIZES)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def rmsnorm_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_near(ours: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """Within ``roundings`` roundings of the dtype, relative to the value and, near zero, to the row's size."""
    tolerance = roundings * TOLERANCE[ours.dtype]
    bound = tolerance * (exact.abs() + 0.01 * exact.abs().amax())
    wrong = (ours.double() - exact).abs() > bound
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off"


@each_dtype
@each_size
@pytest.mark.parametrize("tokens", [1, 19])
def test_rmsnorm(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    x, weight = (random(*s, dtype=dtype, device=device) for s in ((tokens, size), (size,)))
    before = x.clone()
    ours = ops.rmsnorm(x, weight, EPS)
    assert ours.dtype == dtype
    assert torch.equal(x, before), "the input is only read"
    assert_near(ours, rmsnorm_float64(x, weight, EPS))


@each_dtype
def test_rmsnorm_adds_eps_to_the_mean_square(dtype: torch.dtype, device: str) -> None:
    x, weight = random(5, 99, dtype=dtype, device=device) * 1e-3, random(99, dtype=dtype, device=device)
    for eps in (1e-6, 1e-2):
        assert_near(ops.rmsnorm(x, weight, eps), rmsnorm_float64(x, weight, eps))
    assert torch.equal(ops.rmsnorm(torch.zeros_like(x), weight, EPS), torch.zeros_like(x))


@each_dtype
def test_rmsnorm_accumulates_in_float32(dtype: torch.dtype, device: str) -> None:
    """Squares of 300 overflow float16, and 989 equal terms lose all precision when summed in bfloat16."""
    x = torch.full((3, 989), 300.0, dtype=dtype, device=device)
    assert_near(ops.rmsnorm(x, torch.ones(989, dtype=dtype, device=device), EPS), torch.ones_like(x).double())


@each_dtype
def test_rmsnorm_of_some_heads_of_a_wider_tensor(dtype: torch.dtype, device: str) -> None:
    """q and k norms get a view of the fused qkv tensor."""
    qkv, weight = random(19, 15, 64, dtype=dtype, device=device), random(64, dtype=dtype, device=device)
    heads = qkv[:, 9:12]
    assert not heads.is_contiguous()
    assert_near(ops.rmsnorm(heads, weight, EPS), rmsnorm_float64(heads, weight, EPS))


@each_dtype
@each_size
def test_add_rmsnorm_updates_the_residual_in_place(size: int, dtype: torch.dtype, device: str) -> None:
    x, residual = (random(19, size, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = random(size, dtype=dtype, device=device)
    total = (x.double() + residual.double()).to(dtype)
    normed, returned = ops.add_rmsnorm(x, residual, weight, EPS)
    assert returned.data_ptr() == residual.data_ptr()
    assert torch.equal(residual, total)
    assert_near(normed, rmsnorm_float64(total, weight, EPS))


@each_dtype
@each_size
@pytest.mark.parametrize("tokens", [1, 19])
def test_silu_mul(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 3 * random(tokens, 2 * size, dtype=dtype, device=device)
    gate, up = gate_up.double().split(size, dim=-1)
    ours = ops.silu_mul(gate_up)
    assert ours.shape == (tokens, size)
    assert_near(ours, gate / (1 + (-gate).exp()) * up, roundings=2)


@each_dtype
def test_silu_mul_of_a_strided_input(dtype: torch.dtype, device: str) -> None:
    gate_up = random(19, 3 * 198, dtype=dtype, device=device)[:, 198:594][:, ::2]
    gate, up = gate_up.double().split(99, dim=-1)
    assert_near(ops.silu_mul(gate_up), gate * gate.sigmoid() * up, roundings=2)


def assert_linear_near(ours: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The error of a sum is relative to the sum of the absolute terms.

    Half types get two roundings: cuBLAS may round the sum once before it adds the bias, or a part of it.
    """
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    assert ours.dtype == x.dtype
    partial = 0 if x.dtype == torch.float32 or x.device.type == "cpu" else TOLERANCE[x.dtype] * size / 16
    assert ((ours.double() - exact).abs() <= TOLERANCE[x.dtype] * exact.abs() + 2e-6 * size + partial).all()


@each_dtype
@pytest.mark.parametrize(("tokens", "width", "out"), [(1, 1, 1), (1, 989, 99), (19, 99, 989), (99, 19, 1), (3, 1, 19)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(tokens: int, width: int, out: int, with_bias: bool, dtype: torch.dtype, device: str) -> None:
    x, weight = (
        random(tokens, width, dtype=dtype, device=device),
        random(out, width, dtype=dtype, device=device, seed=1),
    )
    bias = random(out, dtype=dtype, device=device, seed=2) if with_bias else None
    for form in (weight, ops.pack_weight(weight)):
        ours = ops.linear(x, form, bias)
        assert ours.shape == (tokens, out)
        assert_linear_near(ours, x, weight, bias)


@each_dtype
def test_linear_of_strided_inputs(dtype: torch.dtype, device: str) -> None:
    x = random(99, 19, dtype=dtype, device=device).T
    weight = random(40, 198, dtype=dtype, device=device, seed=1)[::2, ::2]
    assert not x.is_contiguous()
    assert not weight.is_contiguous()
    assert_linear_near(ops.linear(x, weight), x, weight, None)


@each_dtype
def test_rows_of_a_linear_do_not_mix(dtype: torch.dtype, device: str) -> None:
    x, weight = random(19, 99, dtype=dtype, device=device), random(99, 99, dtype=dtype, device=device, seed=1)
    x[7] = float("nan")
    others = [row for row in range(19) if row != 7]
    ours = ops.linear(x, weight)
    assert ours[7].isnan().all()
    assert_linear_near(ours[others], x[others], weight, None)


@each_dtype
def test_linear_float32(dtype: torch.dtype, device: str) -> None:
    """On cuda half types keep float32's precision; on cpu they are rounded to their own once."""
    x, weight = random(19, 99, dtype=dtype, device=device), random(989, 99, dtype=dtype, device=device, seed=1)
    for form in (weight, ops.pack_weight(weight)):
        ours = ops.linear_float32(x, form)
        assert ours.dtype == torch.float32
        exact = F.linear(x.double(), weight.double())
        size = F.linear(x.double().abs(), weight.double().abs())
        rounding = TOLERANCE[dtype] if device == "cpu" else 0.0
        assert ((ours.double() - exact).abs() <= rounding * exact.abs() + 2e-6 * size).all()
