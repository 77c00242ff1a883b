"""Matrix products of the model on whatever device the tensors are."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ONEDNN_DTYPES = (torch.float32, torch.bfloat16)


def _onednn_linear() -> Callable[..., Tensor] | None:
    """oneDNN's linear, where this torch build has it.

    ``F.linear`` in float32 goes to MKL, which is about half as fast on AMD processors
    (docs/decisions.md has the figures); oneDNN is the same arithmetic in another order.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    namespace = torch.ops.mkldnn
    return namespace._linear_pointwise.default if hasattr(namespace, "_linear_pointwise") else None


_linear_pointwise = _onednn_linear()


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``. Returns [T, O]."""
    if _linear_pointwise is not None and x_TI.device.type == "cpu" and x_TI.dtype in _ONEDNN_DTYPES:
        out: Tensor = _linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return out
    return F.linear(x_TI, weight_OI, bias_O)
