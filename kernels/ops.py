"""The operations the engine calls, one name each.

Every operation has a plain-torch reference with the same signature in `kernels.reference`; a faster
implementation for a device is chosen here, by where the tensors are, and nowhere else. What Triton has is imported
where it is called: without a GPU nothing needs it.
"""

from torch import Tensor

from kernels import cpu_attention, cpu_linear
from kernels.reference import activation, attention, cache, norm
from kernels.reference import linear as reference_linear
from kernels.reference import sampling as reference_sampling
from kernels.reference.attention import DecodeMeta, HeadGroups, PrefillMeta
from kernels.reference.cache import HeadNorms, copy_blocks
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


def rmsnorm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.norm.rmsnorm`."""
    if x_TH.is_cuda:
        from kernels.gpu import norm as gpu_norm

        return gpu_norm.rmsnorm(x_TH, weight_H, eps)
    return norm.rmsnorm(x_TH, weight_H, eps)


def add_rmsnorm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.norm.add_rmsnorm`."""
    if x_TH.is_cuda:
        from kernels.gpu import norm as gpu_norm

        return gpu_norm.add_rmsnorm(x_TH, residual_TH, weight_H, eps)
    return norm.add_rmsnorm(x_TH, residual_TH, weight_H, eps)


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """As `kernels.reference.activation.silu_mul`."""
    if gate_up_T2I.is_cuda:
        from kernels.gpu import activation as gpu_activation

        return gpu_activation.silu_mul(gate_up_T2I)
    return activation.silu_mul(gate_up_T2I)


def store_kvcache(k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """As `kernels.reference.cache.store_kvcache`."""
    if k_TKD.is_cuda:
        from kernels.gpu import cache as gpu_cache

        gpu_cache.store_kvcache(k_TKD, v_TKD, k_cache, v_cache, slots_T)
    else:
        cache.store_kvcache(k_TKD, v_TKD, k_cache, v_cache, slots_T)


def rope_and_store(
    qkv_TAD: Tensor,
    num_kv_heads: int,
    cos_sin_TD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    """As `kernels.reference.cache.rope_and_store`."""
    if qkv_TAD.is_cuda:
        from kernels.gpu import cache as gpu_cache

        return gpu_cache.rope_and_store(qkv_TAD, num_kv_heads, cos_sin_TD, k_cache, v_cache, slots_T, head_norms)
    return cache.rope_and_store(qkv_TAD, num_kv_heads, cos_sin_TD, k_cache, v_cache, slots_T, head_norms)


def paged_decode_attention(q_BND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: DecodeMeta, scale: float) -> Tensor:
    """As `kernels.reference.attention.paged_decode_attention`."""
    if q_BND.is_cuda:
        from kernels.gpu import decode_attention

        return decode_attention.paged_decode_attention(q_BND, k_cache, v_cache, meta, scale)
    return attention.paged_decode_attention(q_BND, k_cache, v_cache, meta, scale)


def paged_prefill_attention(
    q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: PrefillMeta, scale: float, out_TND: Tensor
) -> None:
    """As `kernels.reference.attention.paged_prefill_attention`."""
    if q_TND.is_cuda:
        from kernels.gpu import prefill_attention

        prefill_attention.paged_prefill_attention(q_TND, k_cache, v_cache, meta, scale, out_TND)
    else:
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
        from kernels.gpu import sampling

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
