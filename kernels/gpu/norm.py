"""RMSNorm in Triton: one program per row. Shapes as in `kernels.reference.norm`; sums are in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2, pdl_options, wait_for_earlier_kernels


def rmsnorm(x_TH: Tensor, weight_H: Tensor, eps: float, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """As `kernels.reference.norm.rmsnorm`, of a tensor [T, H] or [T, n, H] whose last dimension is dense.

    Returns the weight's dtype, in ``out`` (of x's shape, dense) where given. ``pdl``: see `kernels.gpu.launch`.
    """
    H = x_TH.shape[-1]
    inner, inner_stride = (x_TH.shape[1], x_TH.stride(1)) if x_TH.dim() == 3 else (1, 0)
    assert x_TH.dim() <= 3
    assert x_TH.stride(-1) == 1 or H == 1
    if out is None:
        out = torch.empty(x_TH.shape, dtype=weight_H.dtype, device=x_TH.device)
    assert out.is_contiguous()
    rows = x_TH.shape[0] * inner
    if rows:
        block, warps = _tile(H)
        _rmsnorm_kernel[(rows,)](
            x_TH, weight_H, out, eps, H, inner, x_TH.stride(0), inner_stride,
            BLOCK=block, PDL=pdl, num_warps=warps, **pdl_options(pdl),
        )  # fmt: skip
    return out


def add_rmsnorm(
    x: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float, *, out: Tensor | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.norm.add_rmsnorm`: ``residual += x`` in place, then RMSNorm. Returns (normed, residual).

    ``x`` [T, H] or partial sums [S, T, H], float32 or the model's dtype; partial sums are added in the order
    0 .. S - 1. The residual is rounded to its dtype first, and that is what is normed. Last dimensions are dense.
    ``out`` [T, H] of the weight's dtype, dense. ``pdl``: see `kernels.gpu.launch`.
    """
    T, H = residual_TH.shape
    parts, part_stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    assert x.shape[-2:] == residual_TH.shape
    assert (x.stride(-1) == 1 and residual_TH.stride(-1) == 1) or H == 1
    if out is None:
        out = torch.empty((T, H), dtype=weight_H.dtype, device=x.device)
    assert out.is_contiguous()
    if T:
        block, warps = _tile(H)
        _add_rmsnorm_kernel[(T,)](
            x, residual_TH, weight_H, out, eps, H, part_stride, x.stride(-2), residual_TH.stride(0),
            PARTS=parts, BLOCK=block, PDL=pdl, num_warps=warps, **pdl_options(pdl),
        )  # fmt: skip
    return out, residual_TH


def _tile(H: int) -> tuple[int, int]:
    """(elements, warps) of a program: all of a row, eight elements of it to a thread."""
    block = next_power_of_2(H)
    return block, min(max(block // 256, 1), 16)


@triton.jit
def _rmsnorm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    H: tl.tensor,
    inner: tl.tensor,
    x_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)
    x_row = x_ptr + (row // inner) * x_stride + (row % inner) * x_inner_stride
    x = tl.load(x_row + h, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    tl.store(out_ptr + row * H + h, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_rmsnorm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    H: tl.tensor,
    part_stride: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < H
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)
    x_row = x_ptr + row * x_stride + h
    residual_row = residual_ptr + row * residual_stride + h
    residual = tl.load(residual_row, mask=mask, other=0.0)
    added = tl.load(x_row, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        x_row += part_stride
        added += tl.load(x_row, mask=mask, other=0.0).to(tl.float32)
    total = (residual.to(tl.float32) + added).to(residual.dtype)
    tl.store(residual_row, total, mask=mask)
    x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / H + eps) * weight
    tl.store(out_ptr + row * H + h, y.to(out_ptr.dtype.element_ty), mask=mask)
