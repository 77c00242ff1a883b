"""RMSNorm in plain torch. Shapes: T tokens, H hidden (or head_dim)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rmsnorm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, accumulated in float32.

    Returns the weight's dtype; ``x`` may be wider. Zhang & Sennrich 2019, arXiv 1910.07467.
    """
    if weight_H.dtype == torch.float32:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    x = x_TH.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * scale).mul_(weight_H).to(weight_H.dtype)


def add_rmsnorm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual += x`` in place, then RMSNorm of it. Returns (normed, residual).

    The residual may be float32 where the model is not. ``x`` may be [S, T, H]: partial sums, added up here.
    """
    residual_TH.add_(x_TH.sum(0, dtype=torch.float32) if x_TH.dim() == 3 else x_TH)
    return rmsnorm(residual_TH, weight_H, eps), residual_TH
