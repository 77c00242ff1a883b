"""The gated activation of the MLP in plain torch."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """``silu(gate) * up`` of a row [gate | up] of width 2I. Returns [T, I]; the input may be overwritten."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
