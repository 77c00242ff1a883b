"""Matrix products of 2 to 64 tokens: the weights are the large operand, tokens are padded to 16, 32 or 64 columns.

A product this narrow is a stream of weights. So that all multiprocessors read, the inner dimension is split where
there are few rows; the float32 partial sums [S, M, O] are added by the kernel that needs them anyway
(`rope_and_store`, `add_rmsnorm`), always in the order s = 0 .. S-1. PDL as in `kernels.gpu.gemv`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import pdl_options, wait_for_earlier_kernels

MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """``rows`` of the weight per program, ``k`` columns a stage, ``splits`` of the inner dimension, ``stages``; so
    many tiles of weights ``ahead`` are loaded to registers before the wait for the kernels before."""

    rows: int
    k: int
    splits: int
    stages: int
    warps: int = 4
    ahead: int = 1


def skinny_gemm(
    a_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_SMO: Tensor,
    tile: SkinnyTile,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """Partial sums of ``a @ weight.T + bias``: ``out[s]`` is the product over the s-th part of I.

    The bias is in ``out[0]``. ``out`` has its own dtype. With ``norm_I`` the product is of RMSNorm(a), computed on the
    way from a float32 ``a``; with ``add`` the product is added to what ``out`` holds; both without splits.
    """
    assert tile.splits == 1 or (norm_I is None and not add)
    (M, I), O = a_MI.shape, weight_OI.shape[0]  # noqa: E741
    assert out_SMO.shape == (tile.splits, M, O)
    _skinny_gemm[(triton.cdiv(O, tile.rows), tile.splits)](
        a_MI, norm_I, weight_OI, bias_O, out_SMO, eps, M, O, a_MI.stride(0), weight_OI.stride(0), out_SMO.stride(0),
        out_SMO.stride(1), I=I, SPAN=_span(I, tile), BK=tile.k, AHEAD=min(tile.ahead, _span(I, tile) // tile.k),
        ROWS=tile.rows, TOKENS=padded_tokens(M), HAS_BIAS=bias_O is not None, NORM=norm_I is not None, ADD=add, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(pdl),
    )  # fmt: skip


def skinny_gate_up_silu(
    a_MH: Tensor,
    gate_up_2IH: Tensor,
    bias_2I: Tensor | None,
    out_MI: Tensor,
    tile: SkinnyTile,
    *,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """``silu(a @ gate.T + bias) * (a @ up.T + bias)``; ``tile.rows`` rows of each per program, no splits.

    With ``norm_H`` of RMSNorm(a), as in `skinny_gemm`.
    """
    (M, H), I = a_MH.shape, out_MI.shape[1]  # noqa: E741
    assert tile.splits == 1
    _skinny_gate_up_silu[(triton.cdiv(I, tile.rows),)](
        a_MH, norm_H, gate_up_2IH, bias_2I, out_MI, eps, M, I, a_MH.stride(0), gate_up_2IH.stride(0), out_MI.stride(0),
        H=H, BK=tile.k, AHEAD=min(tile.ahead, triton.cdiv(H, tile.k)), ROWS=tile.rows, TOKENS=padded_tokens(M),
        HAS_BIAS=bias_2I is not None, NORM=norm_H is not None, PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(pdl),
    )  # fmt: skip


def padded_tokens(tokens: int) -> int:
    """Columns of the product: `tl.dot` wants at least 16, and a power of two."""
    return max(16, triton.next_power_of_2(tokens))


def _span(inner: int, tile: SkinnyTile) -> int:
    """Columns of one split, a multiple of ``tile.k``."""
    return triton.cdiv(triton.cdiv(inner, tile.splits), tile.k) * tile.k


@triton.jit
def _weight_tile(rows, k, r_ok, K: tl.constexpr):
    """[ROWS, BK] weights; each is read once, so the cache may give it up first."""
    mask = r_ok[:, None] & (k < K)[None, :]
    return tl.load(rows + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _token_tile(columns, k, m_ok, K: tl.constexpr):
    """[BK, TOKENS] activations."""
    return tl.load(columns + k[:, None], mask=(k < K)[:, None] & m_ok[None, :], other=0.0)


@triton.jit
def _normed_tile(columns, norm, k, m_ok, K: tl.constexpr, dtype: tl.constexpr):
    """The same from float32, times the norm's weights, and the sum of the squares of each token."""
    a = _token_tile(columns, k, m_ok, K).to(tl.float32)
    gamma = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    return (a * gamma[:, None]).to(dtype), tl.sum(a * a, 0)


@triton.jit
def _skinny_gemm(
    a, norm, w, bias, out, eps, num_tokens, num_rows, stride_a, stride_w, stride_os, stride_om,
    I: tl.constexpr, SPAN: tl.constexpr,  # noqa: E741
    BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.program_id(1)
    m, k = tl.arange(0, TOKENS), s * SPAN + tl.arange(0, BK)
    r_ok, m_ok = r < num_rows, m < num_tokens
    w_rows = w + r.to(tl.int64)[:, None] * stride_w
    a_columns = a + m.to(tl.int64)[None, :] * stride_a
    first = ()
    for j in tl.static_range(AHEAD):
        first += (_weight_tile(w_rows, k + j * BK, r_ok, I),)
    wait_for_earlier_kernels(PDL)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    dtype: tl.constexpr = w.dtype.element_ty
    squares = tl.zeros((TOKENS,), tl.float32)
    for j in tl.static_range(AHEAD):
        if NORM:
            at, more = _normed_tile(a_columns, norm, k + j * BK, m_ok, I, dtype)
            squares += more
        else:
            at = _token_tile(a_columns, k + j * BK, m_ok, I)
        acc = tl.dot(first[j], at, acc, input_precision="ieee")
    for k0 in range(AHEAD * BK, SPAN, BK):
        wt = _weight_tile(w_rows, k + k0, r_ok, I)
        if NORM:
            at, more = _normed_tile(a_columns, norm, k + k0, m_ok, I, dtype)
            squares += more
        else:
            at = _token_tile(a_columns, k + k0, m_ok, I)
        acc = tl.dot(wt, at, acc, input_precision="ieee")
    if NORM:
        acc *= tl.rsqrt(squares / I + eps)[None, :]
    if HAS_BIAS and s == 0:
        acc += tl.load(bias + r, mask=r_ok, other=0.0).to(tl.float32)[:, None]
    o = out + s.to(tl.int64) * stride_os + m.to(tl.int64)[None, :] * stride_om + r[:, None]
    mask = r_ok[:, None] & m_ok[None, :]
    if ADD:
        acc += tl.load(o, mask=mask, other=0.0).to(tl.float32)
    tl.store(o, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _skinny_gate_up_silu(
    a, norm, w, bias, out, eps, num_tokens, num_rows, stride_a, stride_w, stride_om,
    H: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m, k = tl.arange(0, TOKENS), tl.arange(0, BK)
    r_ok, m_ok = r < num_rows, m < num_tokens
    w_gate = w + r.to(tl.int64)[:, None] * stride_w
    w_up = w + (r + num_rows).to(tl.int64)[:, None] * stride_w
    a_columns = a + m.to(tl.int64)[None, :] * stride_a
    first_gate, first_up = (), ()
    for j in tl.static_range(AHEAD):
        first_gate += (_weight_tile(w_gate, k + j * BK, r_ok, H),)
        first_up += (_weight_tile(w_up, k + j * BK, r_ok, H),)
    if HAS_BIAS:
        bias_gate = tl.load(bias + r, mask=r_ok, other=0.0).to(tl.float32)
        bias_up = tl.load(bias + num_rows + r, mask=r_ok, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)
    gate, up = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
    dtype: tl.constexpr = w.dtype.element_ty
    squares = tl.zeros((TOKENS,), tl.float32)
    for j in tl.static_range(AHEAD):
        if NORM:
            at, more = _normed_tile(a_columns, norm, k + j * BK, m_ok, H, dtype)
            squares += more
        else:
            at = _token_tile(a_columns, k + j * BK, m_ok, H)
        gate = tl.dot(first_gate[j], at, gate, input_precision="ieee")
        up = tl.dot(first_up[j], at, up, input_precision="ieee")
    for k0 in range(AHEAD * BK, H, BK):
        g, u = _weight_tile(w_gate, k + k0, r_ok, H), _weight_tile(w_up, k + k0, r_ok, H)
        if NORM:
            at, more = _normed_tile(a_columns, norm, k + k0, m_ok, H, dtype)
            squares += more
        else:
            at = _token_tile(a_columns, k + k0, m_ok, H)
        gate = tl.dot(g, at, gate, input_precision="ieee")
        up = tl.dot(u, at, up, input_precision="ieee")
    if NORM:
        rstd = tl.rsqrt(squares / H + eps)
        gate, up = gate * rstd[None, :], up * rstd[None, :]
    if HAS_BIAS:
        gate, up = gate + bias_gate[:, None], up + bias_up[:, None]
    y = gate * tl.sigmoid(gate) * up
    o = out + m.to(tl.int64)[None, :] * stride_om + r[:, None]
    tl.store(o, y.to(out.dtype.element_ty), mask=r_ok[:, None] & m_ok[None, :])
