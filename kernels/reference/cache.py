"""Writing and copying paged KV, and RoPE, in plain torch.

A paged cache is [num_blocks, block_size, K, D] (K = KV heads, D = head_dim). A slot is
``block * block_size + offset``; slot -1 means "write nothing" (padding).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.norm import rmsnorm


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Qwen3's RMSNorm over each query and key head, before the rotation."""

    q_D: Tensor
    k_D: Tensor
    eps: float


def store_kvcache(k_TKD: Tensor, v_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """Write each token's K and V to its slot (int64). Rows with slot -1 write nothing."""
    if bool((slots_T < 0).any()):
        kept = slots_T >= 0
        k_TKD, v_TKD, slots_T = k_TKD[kept], v_TKD[kept], slots_T[kept]
    k_cache.flatten(0, 1).index_copy_(0, slots_T, k_TKD)
    v_cache.flatten(0, 1).index_copy_(0, slots_T, v_TKD)


def rope(x_TND: Tensor, cos_sin_TD: Tensor) -> Tensor:
    """Rotate heads by position, "rotate half" convention (dimension i pairs with i + D/2).

    ``cos_sin_TD`` holds each token's [cos | sin], D/2 each. Su et al. 2021, arXiv 2104.09864. Returns a new tensor.
    """
    cos, sin = cos_sin_TD.unsqueeze(1).to(x_TND.dtype).chunk(2, dim=-1)
    low, high = x_TND.chunk(2, dim=-1)
    out = torch.empty_like(x_TND, memory_format=torch.contiguous_format)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low)
    out_low.addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high)
    out_high.addcmul_(low, sin)
    return out


def rope_and_store(
    qkv_TAD: Tensor,
    num_kv_heads: int,
    cos_sin_TD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    """Normalise q and k where the model does, rotate them, store k and v in the paged cache. Returns q, [T, N, D].

    ``qkv_TAD`` holds each token's heads in the order N query, K key, K value (A = N + 2K). Rows with slot -1 store
    nothing.
    """
    qk_TAD = qkv_TAD[:, :-num_kv_heads]
    if head_norms is not None:
        q_TND, k_TKD = qk_TAD[:, :-num_kv_heads], qk_TAD[:, -num_kv_heads:]
        q_TND = rmsnorm(q_TND, head_norms.q_D, head_norms.eps)
        qk_TAD = torch.cat((q_TND, rmsnorm(k_TKD, head_norms.k_D, head_norms.eps)), dim=1)
    rotated = rope(qk_TAD, cos_sin_TD)
    store_kvcache(rotated[:, -num_kv_heads:], qkv_TAD[:, -num_kv_heads:], k_cache, v_cache, slots_T)
    return rotated[:, :-num_kv_heads]


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks of ``cache`` [L, 2, num_blocks, ...] at once; every source is read before any write."""
    cache.index_copy_(2, destinations, cache.index_select(2, sources))
