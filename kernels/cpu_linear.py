"""Matrix products for CPUs, by oneDNN. `handles` says for which tensors.

``F.linear`` in float32 goes to MKL, which is about half as fast on AMD processors, and weights packed once in oneDNN's
own layout save it reordering them in every call (docs/decisions.md has the figures).
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
_AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)
# The layout is chosen for this many rows. Measured from 1 to 512 rows, it is the best or next to the best for all.
_PACKED_FOR_ROWS = 16


def handles(tensor: Tensor) -> bool:
    return _AVAILABLE and tensor.device.type == "cpu" and tensor.dtype in DTYPES


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As the reference; ``weight_OI`` may be what `pack_weight` returned."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return out


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As the reference; oneDNN rounds to the inputs' dtype first."""
    return linear(x_TI, weight_OI).float()


def pack_weight(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's layout: an opaque tensor that only `linear` can read."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS)
    return packed
