"""The plain-torch references under the names of `kernels.ops`: what `EngineConfig.kernels` "reference" runs."""

from torch import Tensor

from kernels.reference.activation import silu_mul
from kernels.reference.attention import paged_decode_attention, paged_prefill_attention
from kernels.reference.cache import copy_blocks, rope_and_store, store_kvcache
from kernels.reference.linear import linear, linear_float32
from kernels.reference.norm import add_rmsnorm, rmsnorm
from kernels.reference.sampling import sample


def pack_weight(weight_OI: Tensor) -> Tensor:
    """References read weights as they are."""
    return weight_OI


__all__ = [
    "add_rmsnorm",
    "copy_blocks",
    "linear",
    "linear_float32",
    "pack_weight",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rmsnorm",
    "rope_and_store",
    "sample",
    "silu_mul",
    "store_kvcache",
]
