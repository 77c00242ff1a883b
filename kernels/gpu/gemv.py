"""The matrix kernels of a decode step for one token: four per layer and the head.

One token's step reads every weight once and does little else, so these are streams of weights with everything else
folded in: RMSNorm in the prologue (the sum of squares grows in the same loop over K), bias, RoPE, the KV store,
SiLU and the residual in the epilogue. The residual stream ``x_H`` is float32 and updated in place.

Under programmatic dependent launch (``pdl=True``, `kernels.gpu.launch`) a program asks for its first weights before it
waits for the kernels before it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import pdl_options, wait_for_earlier_kernels


@dataclass(frozen=True, slots=True)
class GemvTile:
    """``rows`` of the weight per program, ``k`` of its columns at a time, ``warps``; tiles of weights are loaded
    ``ahead``, so many of them before the wait for the kernels before."""

    rows: int
    k: int
    warps: int
    ahead: int = 1


def norm_qkv_rope_store(
    x_H: Tensor,
    norm_H: Tensor,
    eps: float,
    qkv_OH: Tensor,
    bias_O: Tensor | None,
    cos_sin_D: Tensor,
    q_ND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot: Tensor,
    tile: GemvTile,
    *,
    pdl: bool = False,
) -> None:
    """RMSNorm, QKV product, bias, RoPE, and the store of K and V to ``slot`` (int64 [1]; -1 stores nothing).

    ``qkv_OH`` stacks the rows of N query, K key and K value heads. ``tile.rows`` pairs of rows, i and i + D/2 of a
    head, belong to one program; it must divide D/2.
    """
    H, (N, D) = x_H.shape[0], q_ND.shape
    K = k_cache.shape[2]
    assert (D // 2) % tile.rows == 0
    _norm_qkv_rope_store[((N + 2 * K) * (D // 2 // tile.rows),)](
        x_H, norm_H, qkv_OH, bias_O, cos_sin_D, q_ND, k_cache, v_cache, slot, eps, qkv_OH.stride(0),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1),
        v_cache.stride(2), H=H, BK=tile.k, AHEAD=_ahead(H, tile), PAIRS=tile.rows, N=N, K=K, D=D,
        BLOCK_SIZE=k_cache.shape[1], HAS_BIAS=bias_O is not None, PDL=pdl, num_warps=tile.warps, **pdl_options(pdl),
    )  # fmt: skip


def gemv_add(
    a_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, x_O: Tensor, tile: GemvTile, *, pdl: bool = False
) -> None:
    """``x += weight @ a + bias`` in float32, in place."""
    O, I = weight_OI.shape  # noqa: E741
    _gemv_add[(triton.cdiv(O, tile.rows),)](
        a_I, weight_OI, bias_O, x_O, O, weight_OI.stride(0), I=I, BK=tile.k, AHEAD=_ahead(I, tile), ROWS=tile.rows,
        EVEN=O % tile.rows == 0, HAS_BIAS=bias_O is not None, PDL=pdl, num_warps=tile.warps, **pdl_options(pdl),
    )  # fmt: skip


def norm_gate_up_silu(
    x_H: Tensor,
    norm_H: Tensor,
    eps: float,
    gate_up_2IH: Tensor,
    bias_2I: Tensor | None,
    out_I: Tensor,
    tile: GemvTile,
    *,
    pdl: bool = False,
) -> None:
    """RMSNorm, both MLP products, ``silu(gate) * up``. ``tile.rows`` rows of gate and as many of up per program."""
    I, H = out_I.shape[0], x_H.shape[0]  # noqa: E741
    _norm_gate_up_silu[(triton.cdiv(I, tile.rows),)](
        x_H, norm_H, gate_up_2IH, bias_2I, out_I, eps, I, gate_up_2IH.stride(0), H=H, BK=tile.k,
        AHEAD=_ahead(H, tile), ROWS=tile.rows,
        EVEN=I % tile.rows == 0, HAS_BIAS=bias_2I is not None, PDL=pdl, num_warps=tile.warps, **pdl_options(pdl),
    )  # fmt: skip


def norm_head(
    x_H: Tensor, norm_H: Tensor, eps: float, head_VH: Tensor, logits_V: Tensor, tile: GemvTile, *, pdl: bool = False
) -> None:
    """The final RMSNorm and the logits in float32."""
    V, H = head_VH.shape
    _norm_head[(triton.cdiv(V, tile.rows),)](
        x_H, norm_H, head_VH, logits_V, eps, V, head_VH.stride(0), H=H, BK=tile.k, AHEAD=_ahead(H, tile),
        ROWS=tile.rows, EVEN=V % tile.rows == 0, PDL=pdl, num_warps=tile.warps, **pdl_options(pdl),
    )  # fmt: skip


def _ahead(inner: int, tile: GemvTile) -> int:
    return min(tile.ahead, triton.cdiv(inner, tile.k))


# In static loops (a + b - 1) // b stands for `tl.cdiv`, which is no constant to Triton 3.6.


@triton.jit
def _weights(w, r_ok, k0, K: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """A tile of weights at ``w`` (pointers to [ROWS, BK] at column k0); they are read once, so they go first."""
    k = k0 + tl.arange(0, BK)
    if EVEN and K % BK == 0:
        return tl.load(w + k0, eviction_policy="evict_first")
    return tl.load(w + k0, mask=r_ok[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(x, k0, K: tl.constexpr, BK: tl.constexpr):
    k = k0 + tl.arange(0, BK)
    if K % BK == 0:
        return tl.load(x + k).to(tl.float32)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _normed_products(
    x, norm, w_a, w_b, r_ok, eps,
    H: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Two products of RMSNorm(x), with the rows at ``w_a`` and at ``w_b``: [ROWS] each. The wait for x is in here."""
    a, b, gamma = (), (), ()
    for j in tl.static_range(AHEAD):
        a += (_weights(w_a, r_ok, j * BK, H, BK, EVEN),)
        b += (_weights(w_b, r_ok, j * BK, H, BK, EVEN),)
        gamma += (_inputs(norm, j * BK, H, BK),)
    wait_for_earlier_kernels(PDL)
    acc_a, acc_b = tl.zeros((ROWS, BK), tl.float32), tl.zeros((ROWS, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for j in tl.static_range((H + BK - 1) // BK):
        if (j + AHEAD) * BK < H:
            a += (_weights(w_a, r_ok, (j + AHEAD) * BK, H, BK, EVEN),)
            b += (_weights(w_b, r_ok, (j + AHEAD) * BK, H, BK, EVEN),)
            gamma += (_inputs(norm, (j + AHEAD) * BK, H, BK),)
        xv = _inputs(x, j * BK, H, BK)
        squares += xv * xv
        xg = (xv * gamma[j])[None, :]
        acc_a += a[j].to(tl.float32) * xg
        acc_b += b[j].to(tl.float32) * xg
    rstd = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    return tl.sum(acc_a, 1) * rstd, tl.sum(acc_b, 1) * rstd


@triton.jit
def _norm_qkv_rope_store(
    x, norm, w, bias, cos_sin, q_out, k_cache, v_cache, slot_p, eps, stride_w,
    stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh,
    H: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PAIRS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    HALF: tl.constexpr = D // 2
    head = pid // (HALF // PAIRS)
    i = (pid % (HALF // PAIRS)) * PAIRS + tl.arange(0, PAIRS)
    low, high = head * D + i, head * D + HALF + i
    k = tl.arange(0, BK)
    w_low = w + low.to(tl.int64)[:, None] * stride_w + k[None, :]
    w_high = w + high.to(tl.int64)[:, None] * stride_w + k[None, :]
    if HAS_BIAS:
        bias_low, bias_high = tl.load(bias + low).to(tl.float32), tl.load(bias + high).to(tl.float32)
    ya, yb = _normed_products(x, norm, w_low, w_high, i < HALF, eps, H, BK, AHEAD, PAIRS, True, PDL)
    if HAS_BIAS:
        ya, yb = ya + bias_low, yb + bias_high
    if head < N + K:
        cos, sin = tl.load(cos_sin + i).to(tl.float32), tl.load(cos_sin + HALF + i).to(tl.float32)
        ya, yb = ya * cos - yb * sin, yb * cos + ya * sin
    dtype = q_out.dtype.element_ty
    if head < N:
        tl.store(q_out + head * D + i, ya.to(dtype))
        tl.store(q_out + head * D + HALF + i, yb.to(dtype))
    else:
        slot = tl.load(slot_p).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        stored = (i < HALF) & (slot >= 0)
        if head < N + K:
            at_k = k_cache + block * stride_kb + offset * stride_kp + (head - N) * stride_kh + i
            tl.store(at_k, ya.to(dtype), mask=stored)
            tl.store(at_k + HALF, yb.to(dtype), mask=stored)
        else:
            at_v = v_cache + block * stride_vb + offset * stride_vp + (head - N - K) * stride_vh + i
            tl.store(at_v, ya.to(dtype), mask=stored)
            tl.store(at_v + HALF, yb.to(dtype), mask=stored)


@triton.jit
def _gemv_add(
    a, w, bias, x, num_rows, stride_w,
    I: tl.constexpr,  # noqa: E741
    BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r_ok = r < num_rows
    rows = w + r.to(tl.int64)[:, None] * stride_w + tl.arange(0, BK)[None, :]
    wt = ()
    for j in tl.static_range(AHEAD):
        wt += (_weights(rows, r_ok, j * BK, I, BK, EVEN),)
    if HAS_BIAS:
        b = tl.load(bias + r, mask=r_ok, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)
    acc = tl.zeros((ROWS, BK), tl.float32)
    residual = tl.load(x + r, mask=r_ok, other=0.0).to(tl.float32)
    for j in tl.static_range((I + BK - 1) // BK):
        if (j + AHEAD) * BK < I:
            wt += (_weights(rows, r_ok, (j + AHEAD) * BK, I, BK, EVEN),)
        acc += wt[j].to(tl.float32) * _inputs(a, j * BK, I, BK)[None, :]
    y = tl.sum(acc, 1) + residual
    if HAS_BIAS:
        y += b
    tl.store(x + r, y.to(x.dtype.element_ty), mask=r_ok)


@triton.jit
def _norm_gate_up_silu(
    x, norm, w, bias, out, eps, num_rows, stride_w,
    H: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r_ok = r < num_rows
    k = tl.arange(0, BK)
    w_gate = w + r.to(tl.int64)[:, None] * stride_w + k[None, :]
    w_up = w + (r + num_rows).to(tl.int64)[:, None] * stride_w + k[None, :]
    if HAS_BIAS:
        bias_gate = tl.load(bias + r, mask=r_ok, other=0.0).to(tl.float32)
        bias_up = tl.load(bias + num_rows + r, mask=r_ok, other=0.0).to(tl.float32)
    gate, up = _normed_products(x, norm, w_gate, w_up, r_ok, eps, H, BK, AHEAD, ROWS, EVEN, PDL)
    if HAS_BIAS:
        gate, up = gate + bias_gate, up + bias_up
    tl.store(out + r, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=r_ok)


@triton.jit
def _norm_head(
    x, norm, w, logits, eps, num_rows, stride_w,
    H: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r_ok = r < num_rows
    rows = w + r.to(tl.int64)[:, None] * stride_w + tl.arange(0, BK)[None, :]
    wt, gamma = (), ()
    for j in tl.static_range(AHEAD):
        wt += (_weights(rows, r_ok, j * BK, H, BK, EVEN),)
        gamma += (_inputs(norm, j * BK, H, BK),)
    wait_for_earlier_kernels(PDL)
    acc = tl.zeros((ROWS, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for j in tl.static_range((H + BK - 1) // BK):
        if (j + AHEAD) * BK < H:
            wt += (_weights(rows, r_ok, (j + AHEAD) * BK, H, BK, EVEN),)
            gamma += (_inputs(norm, (j + AHEAD) * BK, H, BK),)
        xv = _inputs(x, j * BK, H, BK)
        squares += xv * xv
        acc += wt[j].to(tl.float32) * (xv * gamma[j])[None, :]
    rstd = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    tl.store(logits + r, tl.sum(acc, 1) * rstd, mask=r_ok)
