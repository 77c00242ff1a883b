"""Matrix products of the model on whatever device the tensors are.

On a CPU they go to oneDNN: ``F.linear`` in float32 goes to MKL, which is about half as fast on AMD processors, and
weights packed once in oneDNN's own layout save it reordering them in every call (docs/decisions.md has the figures).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN_DTYPES = (torch.float32, torch.bfloat16)
_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
# The layout is chosen for this many rows. Measured from 1 to 512 rows, it is the best or next to the best for all.
_PACKED_FOR_ROWS = 16


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``. ``weight_OI`` may be packed. Returns [T, O]."""
    if _uses_onednn(x_TI):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return out
    return F.linear(x_TI, weight_OI, bias_O)


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight.T`` in float32 [T, O], for logits.

    Half types are not rounded on the way where the device can: bfloat16 logits near 20 are 0.125 apart, which makes
    ties of what is none. oneDNN cannot: there the product is rounded to the inputs' dtype first.
    """
    if x_TI.device.type == "cuda" and x_TI.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_TI, weight_OI.t(), out_dtype=torch.float32)
    return linear(x_TI, weight_OI).float()


def pack_weight(weight_OI: Tensor) -> Tensor:
    """The weight in the layout that `linear` reads fastest here: an opaque tensor, or ``weight_OI`` itself."""
    if not _uses_onednn(weight_OI):
        return weight_OI
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS)
    return packed


def _uses_onednn(tensor: Tensor) -> bool:
    return _ONEDNN and tensor.device.type == "cpu" and tensor.dtype in _ONEDNN_DTYPES
