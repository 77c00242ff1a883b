"""RoPE and writing paged KV in Triton. Shapes and slots as in `kernels.reference.cache`.

A cache is [num_blocks, block_size, K, D], usually one layer of a larger tensor: any strides, but D is dense.

There is no kernel for `copy_blocks`: copies are rare (copy on write), and one step may hand out a block as destination
that is the source of another copy, because its last other reader was preempted. torch's gather, then scatter, reads
every source before any write; one kernel could not, without a barrier across programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2, pdl_options, wait_for_earlier_kernels
from kernels.reference.cache import HeadNorms

# Up to so many tokens a program of `rope_and_store` has one head, for the latency; beyond, many, for the throughput.
FEW_TOKENS = 32
# Elements of a program that has many heads.
_TILE = 2048


def store_kvcache(k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """As `kernels.reference.cache.store_kvcache`."""
    T, K, D = k_TKD.shape
    _check_caches(k_cache, v_cache)
    assert D == 1 or (k_TKD.stride(2) == 1 and v_TKD.stride(2) == 1)
    if T:
        _store_kernel[(T,)](
            k_TKD, v_TKD, k_cache, v_cache, slots_T, K, k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0),
            v_TKD.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            BLOCK_SIZE=k_cache.shape[1], D=D, HEADS=next_power_of_2(K), BLOCK_D=next_power_of_2(D), num_warps=4,
        )  # fmt: skip


def rope_and_store(
    qkv_TAD: Tensor,
    num_kv_heads: int,
    cos_sin_TD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    head_norms: HeadNorms | None = None,
    *,
    out: Tensor | None = None,
    bias_A: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `kernels.reference.cache.rope_and_store`, in float32 until a value is written. Returns q [T, N, D].

    ``qkv_TAD`` may be partial sums [S, T, A, D], which are added in the order 0 .. S - 1, and ``bias_A`` [A * D] after
    them. ``cos_sin_TD`` may be float32 or the model's dtype. q has the cache's dtype, in ``out`` where given. A row of
    slot -1 stores nothing; its q is rotated all the same. The last dimensions are dense, D is even and at most 256.
    ``pdl``: see `kernels.gpu.launch`; bias and norms are read before the wait.
    """
    T, A, D = qkv_TAD.shape[-3:]
    N = A - 2 * num_kv_heads
    parts, part_stride = (qkv_TAD.shape[0], qkv_TAD.stride(0)) if qkv_TAD.dim() == 4 else (1, 0)
    _check_caches(k_cache, v_cache)
    assert D % 2 == 0
    assert qkv_TAD.stride(-1) == 1
    assert cos_sin_TD.stride(-1) == 1
    assert bias_A is None or bias_A.is_contiguous()
    if out is None:
        out = torch.empty((T, N, D), dtype=k_cache.dtype, device=qkv_TAD.device)
    assert out.stride(-1) == 1
    if T:
        half = next_power_of_2(D // 2)
        heads = 1 if T <= FEW_TOKENS else min(next_power_of_2(A), max(_TILE // (2 * half), 1))
        q_norm, k_norm, eps = (head_norms.q_D, head_norms.k_D, head_norms.eps) if head_norms else (None, None, 0.0)
        _rope_and_store_kernel[(T, -(-A // heads))](
            qkv_TAD, bias_A, cos_sin_TD, q_norm, k_norm, out, k_cache, v_cache, slots_T, eps, part_stride,
            qkv_TAD.stride(-3), qkv_TAD.stride(-2), cos_sin_TD.stride(0), out.stride(0), out.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            N=N, K=num_kv_heads, D=D, PARTS=parts, BLOCK_SIZE=k_cache.shape[1], HEADS=heads, BLOCK_HALF=half, PDL=pdl,
            num_warps=1 if heads == 1 else 4, **pdl_options(pdl),
        )  # fmt: skip
    return out


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    assert k_cache.stride() == v_cache.stride(), "K and V of a layer are laid out alike"
    assert k_cache.stride(3) == 1 or k_cache.shape[3] == 1


@triton.jit
def _slot_offset(
    slot: tl.tensor, block_stride: tl.tensor, slot_stride: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Where a slot's row begins in a cache, in elements: far beyond 2^31 in a large pool."""
    slot = slot.to(tl.int64)
    return (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride


@triton.jit
def _store_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    K: tl.tensor,
    k_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_stride: tl.tensor,
    v_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < K) & (d < D)
    to = _slot_offset(slot, block_stride, slot_stride, BLOCK_SIZE) + head * head_stride + d
    k = tl.load(k_ptr + token * k_stride + head * k_head_stride + d, mask=mask)
    v = tl.load(v_ptr + token * v_stride + head * v_head_stride + d, mask=mask)
    tl.store(k_cache_ptr + to, k, mask=mask)
    tl.store(v_cache_ptr + to, v, mask=mask)


@triton.jit
def _rope_and_store_kernel(
    qkv_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    eps: tl.tensor,
    part_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per token and HEADS of its heads; dimensions i and i + D/2 are loaded as two tiles."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < N + 2 * K) & (i < HALF)
    is_q, is_v = head < N, head >= N + K
    if bias_ptr is not None:
        bias_low = tl.load(bias_ptr + head * D + i, mask=mask, other=0.0).to(tl.float32)
        bias_high = tl.load(bias_ptr + head * D + HALF + i, mask=mask, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        norm_ptr = tl.where(is_q, q_norm_ptr, k_norm_ptr) + i
        norm_low = tl.load(norm_ptr, mask=mask, other=0.0).to(tl.float32)
        norm_high = tl.load(norm_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    wait_for_earlier_kernels(PDL)

    slot = tl.load(slots_ptr + token)
    cos_row = cos_sin_ptr + token * cos_sin_stride + i
    cos = tl.load(cos_row, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(cos_row + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    x = qkv_ptr + token * token_stride + head.to(tl.int64) * head_stride + i
    low = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        x += part_stride
        low += tl.load(x, mask=mask, other=0.0).to(tl.float32)
        high += tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        low += bias_low
        high += bias_high

    rotated_low, rotated_high = low, high
    if q_norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1, keep_dims=True) / D + eps)
        rotated_low, rotated_high = low * scale * norm_low, high * scale * norm_high
    rotated_low, rotated_high = rotated_low * cos - rotated_high * sin, rotated_high * cos + rotated_low * sin

    q_row = q_ptr + token * q_stride + head.to(tl.int64) * q_head_stride + i
    dtype = q_ptr.dtype.element_ty
    tl.store(q_row, rotated_low.to(dtype), mask=mask & is_q)
    tl.store(q_row + HALF, rotated_high.to(dtype), mask=mask & is_q)
    to = _slot_offset(slot, block_stride, slot_stride, BLOCK_SIZE) + i
    kept = mask & (slot >= 0)
    dtype = k_cache_ptr.dtype.element_ty
    k_row = k_cache_ptr + to + (head - N).to(tl.int64) * kv_head_stride
    tl.store(k_row, rotated_low.to(dtype), mask=kept & (head >= N) & (head < N + K))
    tl.store(k_row + HALF, rotated_high.to(dtype), mask=kept & (head >= N) & (head < N + K))
    v_row = v_cache_ptr + to + (head - N - K).to(tl.int64) * kv_head_stride
    tl.store(v_row, low.to(dtype), mask=kept & is_v)
    tl.store(v_row + HALF, high.to(dtype), mask=kept & is_v)
