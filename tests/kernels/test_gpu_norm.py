"""Triton norms and activation against their formulas in float64, with NaN around what is read, a canary around writes.

On a CPU the kernels run in Triton's interpreter.
"""

import os

import pytest
import torch
from torch import Tensor

from kernels.gpu.activation import silu_mul
from kernels.gpu.norm import add_rmsnorm, rmsnorm
from tests.kernels.test_reference_dense import EPS, SIZES, assert_near, random, rmsnorm_float64

pytestmark = pytest.mark.usefixtures("one_thread")

CANARY = 7.0
# The interpreter rounds to bfloat16 towards zero.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_size = pytest.mark.parametrize("size", [*SIZES, 64, 1536])


def within_nan(values: Tensor) -> Tensor:
    """The same values as a view of a tensor that is NaN before and after each row."""
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 12), float("nan"), dtype=values.dtype)
    view = wide.to(values.device)[..., 5 : 5 + values.shape[-1]]
    return view.copy_(values)


class Canary:
    """Rows to write between rows that must stay."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        self.all = torch.full((shape[0] + 4, *shape[1:]), CANARY, dtype=dtype, device=device)
        self.rows = self.all[2:-2]

    def check(self) -> None:
        assert (self.all[:2] == CANARY).all()
        assert (self.all[-2:] == CANARY).all()


@each_dtype
@each_size
@pytest.mark.parametrize("tokens", [1, 19])
def test_rmsnorm(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    x, weight = (random(*s, dtype=dtype, device=device) for s in ((tokens, size), (size,)))
    out = Canary((tokens, size), dtype, device)
    assert rmsnorm(within_nan(x), weight, EPS, out=out.rows) is out.rows
    assert_near(out.rows, rmsnorm_float64(x, weight, EPS))
    out.check()


@each_dtype
@pytest.mark.parametrize("size", [19, 8192])
def test_rmsnorm_of_float32_gives_the_dtype_of_the_weight(size: int, dtype: torch.dtype, device: str) -> None:
    x, weight = random(3, size, dtype=torch.float32, device=device), random(size, dtype=dtype, device=device)
    ours = rmsnorm(x, weight, EPS)
    assert ours.dtype == dtype
    assert_near(ours, rmsnorm_float64(x, weight, EPS))


@each_dtype
def test_rmsnorm_adds_eps_to_the_mean_square(dtype: torch.dtype, device: str) -> None:
    x, weight = random(5, 99, dtype=dtype, device=device) * 1e-3, random(99, dtype=dtype, device=device)
    for eps in (1e-6, 1e-2):
        assert_near(rmsnorm(x, weight, eps), rmsnorm_float64(x, weight, eps))
    assert torch.equal(rmsnorm(torch.zeros_like(x), weight, EPS), torch.zeros_like(x))


@each_dtype
def test_rmsnorm_accumulates_in_float32(dtype: torch.dtype, device: str) -> None:
    x = torch.full((3, 989), 300.0, dtype=dtype, device=device)
    assert_near(rmsnorm(x, torch.ones(989, dtype=dtype, device=device), EPS), torch.ones_like(x).double())


@each_dtype
@pytest.mark.parametrize("head_dim", [64, 6])
def test_rmsnorm_of_some_heads_of_a_wider_tensor(head_dim: int, dtype: torch.dtype, device: str) -> None:
    heads = random(7, 15, head_dim, dtype=dtype, device=device)[:, 9:12]
    weight = random(head_dim, dtype=dtype, device=device)
    ours = rmsnorm(heads, weight, EPS)
    assert ours.shape == heads.shape
    assert_near(ours, rmsnorm_float64(heads, weight, EPS))


def fixed_order_sum(parts_STH: Tensor) -> Tensor:
    total = parts_STH[0].float()
    for part in parts_STH[1:]:
        total = total + part.float()
    return total


@pytest.mark.parametrize("residual_dtype", [torch.float32, None], ids=["float32 residual", "residual"])
@pytest.mark.parametrize("x_dtype", [torch.float32, None], ids=["float32 x", "x"])
@pytest.mark.parametrize("parts", [None, 1, 5])
@pytest.mark.parametrize("size", [64, 99, 989])
@each_dtype
def test_add_rmsnorm(
    size: int,
    parts: int | None,
    x_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    """The residual bit for bit: partial sums are added up in order, then to it, and rounded once."""
    shape = (3, size) if parts is None else (parts, 3, size)
    x = within_nan(random(*shape, dtype=x_dtype or dtype, device=device, seed=1))
    weight = random(size, dtype=dtype, device=device, seed=3)
    wide = torch.full((3, size + 12), CANARY, dtype=residual_dtype or dtype, device=device)
    residual = wide[:, 5:-7].copy_(random(3, size, dtype=dtype, device=device, seed=2))
    total = (residual.float() + (x.float() if parts is None else fixed_order_sum(x))).to(residual.dtype)
    out = Canary((3, size), dtype, device)

    normed, returned = add_rmsnorm(x, residual, weight, EPS, out=out.rows)
    assert returned is residual
    assert normed is out.rows
    assert torch.equal(residual, total)
    assert (wide[:, :5] == CANARY).all()
    assert (wide[:, -7:] == CANARY).all()
    assert_near(normed, rmsnorm_float64(total, weight, EPS))
    out.check()


def test_the_order_of_partial_sums_shows(device: str) -> None:
    """What the test above compares would differ in another order."""
    x = random(5, 3, 989, dtype=torch.float32, device=device, seed=1)
    assert not torch.equal(fixed_order_sum(x), fixed_order_sum(x.flip(0)))


def test_a_wide_row_and_no_rows(device: str) -> None:
    x, residual = (random(2, 8192, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    weight, total = random(8192, dtype=torch.float32, device=device), x + residual
    normed, _ = add_rmsnorm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert_near(normed, rmsnorm_float64(total, weight, EPS))
    assert add_rmsnorm(x[:0], residual[:0], weight, EPS)[0].shape == (0, 8192)
    assert rmsnorm(x[:0], weight, EPS).shape == (0, 8192)
    assert silu_mul(x[:0]).shape == (0, 4096)


@each_dtype
@each_size
@pytest.mark.parametrize("tokens", [1, 19])
def test_silu_mul(tokens: int, size: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 3 * random(tokens, 2 * size, dtype=dtype, device=device)
    gate, up = gate_up.double().split(size, dim=-1)
    out = Canary((tokens, size), dtype, device)
    assert silu_mul(within_nan(gate_up), out=out.rows) is out.rows
    assert_near(out.rows, gate / (1 + (-gate).exp()) * up)
    out.check()


@each_dtype
def test_silu_mul_of_a_strided_input(dtype: torch.dtype, device: str) -> None:
    gate_up = random(19, 3 * 198, dtype=dtype, device=device)[:, 198:594][:, ::2]
    gate, up = gate_up.double().split(99, dim=-1)
    assert_near(silu_mul(gate_up), gate * gate.sigmoid() * up)


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, in the interpreter
def test_silu_of_large_gates(device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=device)
    assert torch.equal(silu_mul(gate_up), torch.tensor([[0.0, 600.0, 0.0]], device=device))


def test_rows_lie_more_than_2_to_31_elements_apart(device: str) -> None:
    """The strides themselves are below 2^31: their products are not."""
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + 100, dtype=torch.float16, device=device)
    rows = memory.as_strided((3, 40), (stride, 1))
    values = random(3, 40, dtype=torch.float16, device=device)
    weight = random(40, dtype=torch.float16, device=device, seed=1)

    rows.copy_(values)
    assert_near(rmsnorm(rows, weight, EPS), rmsnorm_float64(values, weight, EPS))
    assert_near(rmsnorm(memory.as_strided((1, 3, 40), (1, stride, 1)), weight, EPS)[0], rmsnorm(values, weight, EPS))
    gate, up = values.double().split(20, dim=-1)
    assert_near(silu_mul(rows), gate * gate.sigmoid() * up)
    doubled = values + values
    normed, _ = add_rmsnorm(values, rows, weight, EPS)
    assert torch.equal(rows, doubled)
    assert_near(normed, rmsnorm_float64(doubled, weight, EPS))
    residual = values.clone()
    add_rmsnorm(rows, residual, weight, EPS)
    assert torch.equal(residual, values + doubled)

    parts, residual = rows.view(3, 1, 40), torch.zeros(1, 40, device=device)
    add_rmsnorm(parts, residual, weight, EPS)
    assert torch.equal(residual, fixed_order_sum(doubled[:, None]))


@each_dtype
def test_dependent_launches_give_the_same(dtype: torch.dtype, device: str) -> None:
    """A chain in a graph: every kernel waits for the one before."""
    if device != "cuda":
        pytest.skip("programmatic dependent launch needs a GPU")
    parts, weight = random(3, 19, 989, dtype=torch.float32, device=device), random(989, dtype=dtype, device=device)

    def chain(pdl: bool) -> list[Tensor]:
        residual = torch.ones(19, 989, device=device)
        outs = []
        for _ in range(20):
            normed, _ = add_rmsnorm(parts, residual, weight, EPS, pdl=pdl)
            outs.append(rmsnorm(normed, weight, EPS, pdl=pdl))
        return [residual, *outs]

    plain = chain(pdl=False)
    chain(pdl=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(pdl=True)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        for ours, expected in zip(captured, plain, strict=True):
            assert torch.equal(ours, expected)
