"""Matrix products of the model in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``. Returns [T, O]."""
    return F.linear(x_TI, weight_OI, bias_O)


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight.T`` in float32 [T, O], for logits.

    Half types are not rounded on the way where torch can (cuda): bfloat16 logits near 20 are 0.125 apart, which makes
    ties of what is none. Elsewhere the product is rounded to the inputs' dtype first.
    """
    if x_TI.device.type == "cuda" and x_TI.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)
    return linear(x_TI, weight_OI).float()
