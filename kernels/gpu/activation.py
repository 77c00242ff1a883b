"""The gated activation of the MLP in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` of a row [gate | up] of width 2I, in float32, rounded once.

    Any strides. Returns [T, I], in ``out`` (dense) where given; the input is only read.
    """
    T, width = gate_up_T2I.shape
    I = width // 2  # noqa: E741
    if out is None:
        out = torch.empty((T, I), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    assert out.is_contiguous()
    if T:
        grid = (T, -(-I // _BLOCK))
        _silu_mul_kernel[grid](gate_up_T2I, out, I, gate_up_T2I.stride(0), gate_up_T2I.stride(1), BLOCK=_BLOCK)
    return out


@triton.jit
def _silu_mul_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, x_stride: tl.tensor, x_step: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    x_row = x_ptr + row * x_stride
    gate = tl.load(x_row + i * x_step, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_row + (i + width) * x_step, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + i, y.to(out_ptr.dtype.element_ty), mask=mask)
