"""The Triton kernels of a decode step against the plain reference: in the interpreter on a CPU, compiled on a GPU.

Whatever must not be read is NaN; whatever must not be written is looked at afterwards.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu import decode_attention, gemv, skinny_gemm, step
from kernels.gpu.decode_attention import DecodePlan
from kernels.gpu.gemv import GemvTile
from kernels.gpu.skinny_gemm import SkinnyTile
from kernels.reference import cache as reference_cache
from kernels.reference import step as reference_step
from kernels.reference.attention import DecodeMeta, HeadGroups
from kernels.reference.norm import rmsnorm
from kernels.reference.step import DecodeInputs, DecodeRows
from tests.kernels.test_reference_attention import UNEVEN, decode_meta, dense, make_paged, random_q

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["float32", "half"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """float32, and the half type that the device's products take: bfloat16 is wrong in Triton's interpreter."""
    if request.param == "float32":
        return torch.float32
    return torch.bfloat16 if device == "cuda" else torch.float16


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(device=device, dtype=dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's rounding of the largest value. NaN fails."""
    assert not ours.isnan().any(), "something was read that must not be, or was not written"
    bound = TOLERANCE[dtype] * max(float(exact.abs().max()), 1.0)
    worst = float((ours.double() - exact.double()).abs().max())
    assert worst <= bound, f"off by {worst:.2e}, allowed {bound:.2e}"


# -- attention --------------------------------------------------------------------------------------------------

LENGTHS = [1, 16, 17, 33, 130, 64]


@pytest.mark.parametrize("shape", [(9, 3, 64), (6, 2, 16), (4, 4, 20), (20, 1, 32)], ids=str)
@pytest.mark.parametrize(
    "plan", [DecodePlan(1, 16, 32), DecodePlan(4, 16, 32), DecodePlan(16, 16, 64), DecodePlan(2, 32, 64)], ids=str
)
def test_decode_attention(shape: tuple[int, int, int], plan: DecodePlan, dtype: torch.dtype, device: str) -> None:
    heads, kv_heads, dim = shape
    paged = make_paged(LENGTHS, kv_heads, dim, 8, dtype, device)
    q = random_q(len(LENGTHS), heads, dim, dtype, device)
    meta = replace(decode_meta(paged, LENGTHS, device, extra_width=1), host_lens=None)
    ours = decode_attention.paged_decode_attention(q, paged.k_cache, paged.v_cache, meta, 0.2, plan=plan)
    exact = [dense(q[i : i + 1], paged.k[i], paged.v[i], n - 1, 0.2) for i, n in enumerate(LENGTHS)]
    assert_close(ours.cpu(), torch.cat(exact), dtype)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_decode_attention_with_any_block_size_rows_strides_and_padding(block_size: int, device: str) -> None:
    """Rows name their tables, some are padding; q and out are views; the caches are one layer of a larger tensor."""
    lengths = [70, 9, 33]
    paged = make_paged(lengths, 3, 64, block_size, torch.float32, device)
    layers = torch.full((2, 2, *paged.k_cache.shape), float("nan"), device=device)
    layers[1, 0], layers[1, 1] = paged.k_cache, paged.v_cache
    full = decode_meta(paged, lengths, device)
    rows = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32, device=device)
    lens = torch.tensor([33, 0, 70, 9, 5], dtype=torch.int32, device=device)
    meta = DecodeMeta(full.block_tables.int(), lens, None, block_size, rows)
    q = random_q(5, 15, 64, torch.float32, device)[:, :9]
    out = torch.full((5, 11, 64), 7.0, device=device)
    plan = DecodePlan(4, 16, 32)
    decode_attention.paged_decode_attention(q, layers[1, 0], layers[1, 1], meta, 0.125, out=out[:, 1:10], plan=plan)
    assert (out[[1, 4]] == 7).all(), "padded rows were written"
    assert (out[:, 0] == 7).all()
    assert (out[:, 10] == 7).all()
    for row, sequence in ((0, 2), (2, 0), (3, 1)):
        exact = dense(q[row : row + 1], paged.k[sequence], paged.v[sequence], lengths[sequence] - 1, 0.125)
        assert_close(out[row : row + 1, 1:10].cpu(), exact, torch.float32)


@pytest.mark.parametrize(("num_heads", "size", "first"), UNEVEN)
def test_decode_attention_of_a_rank(num_heads: int, size: int, first: int, device: str) -> None:
    heads = HeadGroups(size, first)
    kv_heads = [heads.kv_head(head) for head in range(num_heads)]
    paged = make_paged([40, 19], kv_heads[-1] + 1, 32, 16, torch.float32, device)
    q = random_q(2, num_heads, 32, torch.float32, device)
    meta = replace(decode_meta(paged, [40, 19], device), heads=heads)
    plan = DecodePlan(2, 16, 32)
    ours = decode_attention.paged_decode_attention(q, paged.k_cache, paged.v_cache, meta, 0.2, plan=plan)
    exact = [
        dense(q[i : i + 1], paged.k[i][:, kv_heads], paged.v[i][:, kv_heads], n - 1, 0.2)
        for i, n in enumerate([40, 19])
    ]
    assert_close(ours.cpu(), torch.cat(exact), torch.float32)


def test_decode_attention_does_not_depend_on_the_workspace(device: str) -> None:
    """Splits past a length are not written, so what was there must not matter."""
    paged = make_paged([40, 3], 2, 32, 16, torch.float32, device)
    q, meta = random_q(2, 4, 32, torch.float32, device), decode_meta(paged, [40, 3], device)
    plan = DecodePlan(16, 16, 32)
    floats = decode_attention.workspace_floats(2, 4, 32, plan)
    results = [
        decode_attention.paged_decode_attention(
            q, paged.k_cache, paged.v_cache, meta, 0.2, plan=plan, workspace=torch.full((floats,), fill, device=device)
        )
        for fill in (float("nan"), float("inf"), 0.0)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# -- large pools and long contexts ------------------------------------------------------------------------------


@pytest.fixture
def large_pool(device: str) -> Tensor:
    """K and V of a layer, [2, blocks, 16, 8, 128] in bfloat16: more than 2^31 elements each, 9.1 GB in all."""
    if device == "cpu":
        pytest.skip("a pool this large is for a GPU")
    return torch.zeros(2, 140_000, 16, 8, 128, dtype=torch.bfloat16, device=device)


def test_decode_attention_and_store_beyond_two_to_the_31(large_pool: Tensor, device: str) -> None:
    k_cache, v_cache = large_pool
    assert k_cache.numel() > 2**31
    last, dim = len(k_cache) - 1, 128
    k_cache[last - 1 :], v_cache[last - 1 :] = torch.randn(2, 2, 16, 8, dim, device=device).bfloat16()
    table = torch.tensor([[last, last - 1]], device=device)
    q = random(1, 16, dim, dtype=torch.bfloat16, device=device)
    meta = DecodeMeta(table, torch.tensor([20], device=device), (20,), 16)
    ours = decode_attention.paged_decode_attention(q, k_cache, v_cache, meta, 0.1)
    k = torch.cat((k_cache[last], k_cache[last - 1]))[:20].cpu()
    v = torch.cat((v_cache[last], v_cache[last - 1]))[:20].cpu()
    assert_close(ours.cpu(), dense(q, k, v, 19, 0.1), torch.bfloat16)
    x, norm = random(64, dtype=torch.float32, device=device), torch.ones(64, dtype=torch.bfloat16, device=device)
    weight = random(18 * dim, 64, dtype=torch.bfloat16, device=device, seed=2, scale=0.1)
    slot = torch.tensor([last * 16 + 15], device=device)
    turns = random(dim, dtype=torch.float32, device=device, seed=4)
    heads = torch.empty(2, dim, dtype=torch.bfloat16, device=device)
    gemv.norm_qkv_rope_store(
        x, norm, 1e-5, weight, None, turns, heads, k_cache, v_cache, slot, GemvTile(4, 64, 4), pdl=False
    )
    assert (v_cache[last, 15] != 0).all()
    assert not v_cache[0].any(), "a store wrapped around"


@pytest.mark.parametrize("length", [8192, 32_768])
def test_decode_attention_of_long_contexts(length: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("a context this long is for a GPU")
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, length, 2, 128, generator=generator).bfloat16().to(device)
    table = torch.randperm(length // 16, generator=generator).to(device)
    caches = torch.empty(2, length // 16, 16, 2, 128, dtype=torch.bfloat16, device=device)
    caches[0, table], caches[1, table] = k.view(-1, 16, 2, 128), v.view(-1, 16, 2, 128)
    q = random_q(1, 12, 128, torch.bfloat16, device)
    meta = DecodeMeta(table[None], torch.tensor([length], device=device), (length,), 16)
    ours = decode_attention.paged_decode_attention(q, caches[0], caches[1], meta, 0.05)
    assert_close(ours.cpu(), dense(q, k.cpu(), v.cpu(), length - 1, 0.05), torch.bfloat16)


# -- products of one token --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "hidden"), [(4, 2, 32, 64), (3, 1, 64, 100), (2, 2, 16, 300)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("slot", [5, -1])
def test_norm_qkv_rope_store(
    heads: int, kv_heads: int, dim: int, hidden: int, bias: bool, slot: int, dtype: torch.dtype, device: str
) -> None:
    rows = (heads + 2 * kv_heads) * dim
    x = random(hidden, dtype=torch.float32, device=device)
    norm = 1 + random(hidden, dtype=dtype, device=device, seed=1, scale=0.1)
    weight = random(rows, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5)
    bias_O = random(rows, dtype=dtype, device=device, seed=3) if bias else None
    turns = random(dim, dtype=torch.float32, device=device, seed=4)
    caches = torch.full((2, 3, 4, kv_heads + 1, dim), 7.0, dtype=dtype, device=device)
    k_cache, v_cache = caches[0, :, :, :kv_heads], caches[1, :, :, :kv_heads]
    q = poisoned(heads, dim, dtype=dtype, device=device)
    slot_1 = torch.tensor([slot], device=device)
    gemv.norm_qkv_rope_store(x, norm, 1e-5, weight, bias_O, turns, q, k_cache, v_cache, slot_1, GemvTile(4, 64, 4))
    exact = weight.double() @ rmsnorm(x.double(), norm.double(), 1e-5)
    exact = (exact + (bias_O.double() if bias_O is not None else 0)).view(1, -1, dim)
    expected = torch.full(caches.shape, 7.0, dtype=torch.float64, device=device)
    expected_q = reference_cache.rope_and_store(
        exact, kv_heads, turns.double()[None], expected[0, :, :, :kv_heads], expected[1, :, :, :kv_heads], slot_1
    )
    assert_close(q, expected_q[0], dtype)
    assert_close(caches, expected, dtype)
    assert torch.equal(caches == 7, expected == 7), "something else was written"


@pytest.mark.parametrize(("rows", "inner"), [(64, 128), (37, 100), (1, 19), (130, 1000)])
@pytest.mark.parametrize(("bias", "ahead"), [(True, 1), (False, 3), (True, 9)])
def test_gemv_add(rows: int, inner: int, bias: bool, ahead: int, dtype: torch.dtype, device: str) -> None:
    a = random(inner, dtype=dtype, device=device)
    padded = poisoned(rows + 3, inner + 5, dtype=dtype, device=device)
    padded[:rows, :inner] = random(rows, inner, dtype=dtype, device=device, seed=1, scale=inner**-0.5)
    weight = padded[:rows, :inner]
    bias_O = random(rows, dtype=dtype, device=device, seed=2) if bias else None
    x = torch.full((rows + 4,), 7.0, device=device)
    x[:rows] = random(rows, dtype=torch.float32, device=device, seed=3)
    exact = x[:rows].double() + weight.double() @ a.double() + (bias_O.double() if bias_O is not None else 0)
    gemv.gemv_add(a, weight, bias_O, x[:rows], GemvTile(4, 64, 4, ahead))
    assert_close(x[:rows], exact, torch.float32 if dtype == torch.float32 else dtype)
    assert (x[rows:] == 7).all()


@pytest.mark.parametrize(("rows", "hidden"), [(64, 128), (37, 100), (130, 300)])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_gate_up_silu(rows: int, hidden: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    x = random(hidden, dtype=torch.float32, device=device)
    norm = 1 + random(hidden, dtype=dtype, device=device, seed=1, scale=0.1)
    weight = random(2 * rows, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5)
    bias_2I = random(2 * rows, dtype=dtype, device=device, seed=3) if bias else None
    out = torch.full((rows + 4,), 7.0, dtype=dtype, device=device)
    gemv.norm_gate_up_silu(x, norm, 1e-5, weight, bias_2I, out[:rows], GemvTile(4, 64, 4, 2 if bias else 9))
    both = weight.double() @ rmsnorm(x.double(), norm.double(), 1e-5)
    gate, up = (both + (bias_2I.double() if bias_2I is not None else 0)).chunk(2)
    assert_close(out[:rows], torch.nn.functional.silu(gate) * up, dtype)
    assert (out[rows:] == 7).all()


@pytest.mark.parametrize(("vocab", "hidden"), [(64, 128), (99, 100)])
def test_norm_head(vocab: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x = random(hidden, dtype=torch.float32, device=device)
    norm = 1 + random(hidden, dtype=dtype, device=device, seed=1, scale=0.1)
    head = random(vocab, hidden, dtype=dtype, device=device, seed=2, scale=hidden**-0.5)
    logits = torch.full((vocab + 4,), 7.0, device=device)
    gemv.norm_head(x, norm, 1e-5, head, logits[:vocab], GemvTile(8, 64, 4))
    assert_close(logits[:vocab], head.double() @ rmsnorm(x.double(), norm.double(), 1e-5), torch.float32)
    assert (logits[vocab:] == 7).all()


# -- products of few tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 16, 19, 64])
@pytest.mark.parametrize(("rows", "inner", "splits"), [(64, 128, 1), (70, 200, 3), (130, 90, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_skinny_gemm(
    tokens: int, rows: int, inner: int, splits: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    a = random(tokens, inner + 3, dtype=dtype, device=device)[:, :inner]
    weight = random(rows, inner, dtype=dtype, device=device, seed=1, scale=inner**-0.5)
    bias_O = random(rows, dtype=dtype, device=device, seed=2) if bias else None
    out = torch.full((splits, tokens + 2, rows), 7.0, device=device)
    tile = SkinnyTile(64, 32, splits, 2, ahead=3 if bias else 1)
    skinny_gemm.skinny_gemm(a, weight, bias_O, out[:, :tokens], tile)
    exact = a.double() @ weight.double().T + (bias_O.double() if bias_O is not None else 0)
    assert_close(out[:, :tokens].double().sum(0), exact, torch.float32)
    assert (out[:, tokens:] == 7).all()


@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize("add", [True, False])
def test_skinny_gemm_with_norm_or_addition(tokens: int, add: bool, dtype: torch.dtype, device: str) -> None:
    """The norm from a float32 input; the sum into what is there."""
    inner, rows = 90, 40
    a = random(tokens, inner, dtype=dtype if add else torch.float32, device=device)
    norm = 1 + random(inner, dtype=dtype, device=device, seed=3, scale=0.1)
    weight = random(rows, inner, dtype=dtype, device=device, seed=1, scale=inner**-0.5)
    bias = random(rows, dtype=dtype, device=device, seed=2)
    out = random(1, tokens + 2, rows, dtype=torch.float32, device=device, seed=4)
    before = out.clone()
    exact = (a.double() if add else rmsnorm(a.double(), norm.double(), 1e-5)) @ weight.double().T + bias.double()
    if add:
        exact += before[0, :tokens].double()
    options: dict[str, Any] = {"add": True} if add else {"norm_I": norm, "eps": 1e-5}
    skinny_gemm.skinny_gemm(a, weight, bias, out[:, :tokens], SkinnyTile(16, 32, 1, 2), **options)
    assert_close(out[0, :tokens], exact, torch.float32 if add else dtype)
    assert torch.equal(out[:, tokens:], before[:, tokens:])


@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize(("rows", "hidden"), [(64, 128), (70, 90)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_skinny_gate_up_silu(
    tokens: int, rows: int, hidden: int, bias: bool, normed: bool, dtype: torch.dtype, device: str
) -> None:
    a = random(tokens, hidden, dtype=torch.float32 if normed else dtype, device=device)
    norm = 1 + random(hidden, dtype=dtype, device=device, seed=3, scale=0.1)
    weight = random(2 * rows, hidden, dtype=dtype, device=device, seed=1, scale=hidden**-0.5)
    bias_2I = random(2 * rows, dtype=dtype, device=device, seed=2) if bias else None
    out = torch.full((tokens + 2, rows + 3), 7.0, dtype=dtype, device=device)
    tile = SkinnyTile(32, 32, 1, 2, ahead=2 if bias else 1)
    options: dict[str, Any] = {"norm_H": norm, "eps": 1e-5} if normed else {}
    skinny_gemm.skinny_gate_up_silu(a, weight, bias_2I, out[:tokens, :rows], tile, **options)
    inputs = rmsnorm(a.double(), norm.double(), 1e-5) if normed else a.double()
    both = inputs @ weight.double().T + (bias_2I.double() if bias_2I is not None else 0)
    gate, up = both.chunk(2, dim=1)
    assert_close(out[:tokens, :rows], torch.nn.functional.silu(gate) * up, dtype)
    assert (out[tokens:] == 7).all()
    assert (out[:, rows:] == 7).all()


# -- the first kernel of a step ---------------------------------------------------------------------------------


def test_begin_decode(device: str) -> None:
    rows = DecodeRows(
        row_slots_B=torch.tensor([3, -1, 0, 2], dtype=torch.int32, device=device),
        positions_S=torch.tensor([7, 100, 0, 9, 5], dtype=torch.int32, device=device),
        block_tables_SM=torch.arange(100, 120, dtype=torch.int32, device=device).view(5, 4),
        last_token_S=torch.tensor([4, 5, 6, 7, 8], device=device),
        block_size=4,
    )
    twin = replace(rows, positions_S=rows.positions_S.clone())
    embedding = random(10, 1100, dtype=torch.float16, device=device)
    cos_sin = random(16, 6, dtype=torch.float32, device=device)

    def inputs() -> DecodeInputs:
        return DecodeInputs(
            x_BH=poisoned(4, 1100, dtype=torch.float32, device=device),
            cos_sin_BD=poisoned(4, 6, dtype=torch.float32, device=device),
            kv_slots_B=torch.full((4,), -7, device=device),
            context_lens_B=torch.full((4,), -7, dtype=torch.int32, device=device),
            next_positions_B=torch.full((4,), -7, device=device),
        )

    ours, theirs = inputs(), inputs()
    step.begin_decode(rows, embedding, cos_sin, ours)
    reference_step.begin_decode(twin, embedding, cos_sin, theirs)
    assert theirs.kv_slots_B.tolist() == [114 * 4 + 1, -1, 101 * 4 + 3, 108 * 4]
    assert theirs.context_lens_B.tolist() == [10, 0, 8, 1]
    assert rows.positions_S.tolist() == twin.positions_S.tolist() == [8, 100, 1, 10, 5]
    live = [0, 2, 3]
    for name in ("x_BH", "cos_sin_BD", "kv_slots_B", "context_lens_B", "next_positions_B"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(mine[live], other[live]), name
    assert torch.equal(ours.x_BH, theirs.x_BH)
    assert ours.kv_slots_B.tolist() == theirs.kv_slots_B.tolist()
    assert ours.context_lens_B.tolist() == theirs.context_lens_B.tolist()
