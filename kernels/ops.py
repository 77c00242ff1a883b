"""The operations the engine calls, one name each.

Every operation has a plain-torch reference with the same signature in `kernels.reference`; a faster
implementation for a device is chosen here, by where the tensors are, and nowhere else.
"""

from torch import Tensor

from kernels import cpu_attention, cpu_linear
from kernels.reference import attention
from kernels.reference import linear as reference_linear
from kernels.reference import sampling as reference_sampling
from kernels.reference.activation import silu_mul
from kernels.reference.attention import DecodeMeta, HeadGroups, PrefillMeta, paged_decode_attention
from kernels.reference.cache import HeadNorms, copy_blocks, rope_and_store, store_kvcache
from kernels.reference.norm import add_rmsnorm, rmsnorm
from kernels.sampling_tensors import SamplingOut, SamplingStages, SamplingTensors


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As `kernels.reference.linear.linear`; ``weight_OI`` may be what `pack_weight` returned."""
    module = cpu_linear if cpu_linear.handles(x_TI) else reference_linear
    return module.linear(x_TI, weight_OI, bias_O)


def linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `kernels.reference.linear.linear_float32`; ``weight_OI`` may be what `pack_weight` returned."""
    module = cpu_linear if cpu_linear.handles(x_TI) else reference_linear
    return module.linear_float32(x_TI, weight_OI)


def pack_weight(weight_OI: Tensor) -> Tensor:
    """The weight in the layout that `linear` reads fastest where it is: an opaque tensor, or ``weight_OI`` itself."""
    return cpu_linear.pack_weight(weight_OI) if cpu_linear.handles(weight_OI) else weight_OI


def paged_prefill_attention(
    q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: PrefillMeta, scale: float, out_TND: Tensor
) -> None:
    """As `kernels.reference.attention.paged_prefill_attention`."""
    module = cpu_attention if cpu_linear.handles(q_TND) else attention
    module.paged_prefill_attention(q_TND, k_cache, v_cache, meta, scale, out_TND)


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    positions_R: Tensor,
    state: SamplingTensors,
    stages: SamplingStages,
    out: SamplingOut,
) -> None:
    """As `kernels.reference.sampling.sample`."""
    if logits_RV.is_cuda:
        from kernels.gpu import sampling  # without a GPU nothing needs Triton

        sampling.sample(logits_RV, slots_R, positions_R, state, stages, out)
    else:
        reference_sampling.sample(logits_RV, slots_R, positions_R, state, stages, out)


__all__ = [
    "DecodeMeta",
    "HeadGroups",
    "HeadNorms",
    "PrefillMeta",
    "SamplingOut",
    "SamplingStages",
    "SamplingTensors",
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
