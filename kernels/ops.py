"""The operations the engine calls, one name each.

Every operation has a plain-torch reference with the same signature in `kernels.reference`; a faster
implementation for a device is chosen here, by where the tensors are, and nowhere else.
"""

from torch import Tensor

from kernels import cpu_attention
from kernels.reference import attention
from kernels.reference.activation import silu_mul
from kernels.reference.attention import DecodeMeta, PrefillSequence, paged_decode_attention
from kernels.reference.cache import copy_blocks, rope_and_store, store_kvcache
from kernels.reference.linear import linear, linear_float32, pack_weight
from kernels.reference.norm import add_rmsnorm, rmsnorm


def paged_prefill_attention(
    q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, sequences: list[PrefillSequence], scale: float, out_TND: Tensor
) -> None:
    """As `kernels.reference.attention.paged_prefill_attention`."""
    module = cpu_attention if q_TND.device.type == "cpu" else attention
    module.paged_prefill_attention(q_TND, k_cache, v_cache, sequences, scale, out_TND)


__all__ = [
    "DecodeMeta",
    "PrefillSequence",
    "add_rmsnorm",
    "copy_blocks",
    "linear",
    "linear_float32",
    "pack_weight",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rmsnorm",
    "rope_and_store",
    "silu_mul",
    "store_kvcache",
]
