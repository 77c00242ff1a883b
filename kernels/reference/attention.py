"""Paged attention in plain torch.

Shapes: T tokens, B sequences, N query heads, K KV heads, G = N / K query heads per KV head, D head_dim,
S KV positions, M block-table width. Reads nothing past a sequence's length: unwritten KV may hold anything.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DecodeMeta:
    """One query token per sequence. ``block_tables`` int64 [B, M]; ``context_lens`` int64 [B], the new token included.

    ``max_context`` is the largest length, known to the host.
    """

    block_tables: Tensor
    context_lens: Tensor
    max_context: int
    block_size: int

    @cached_property
    def slots_and_mask(self) -> tuple[Tensor, Tensor | None]:
        """Slots [B, S] of every KV position and the additive mask [B, 1, 1, S]; made once a step, used by every layer.

        A position past a sequence's end reads that sequence's first slot, which is always written, and is masked.
        """
        positions_S = torch.arange(self.max_context, device=self.block_tables.device)
        blocks_BS = self.block_tables.index_select(1, positions_S // self.block_size)
        slots_BS = blocks_BS * self.block_size + positions_S % self.block_size
        if bool((self.context_lens == self.max_context).all()):
            return slots_BS, None
        valid_BS = positions_S < self.context_lens[:, None]
        slots_BS = torch.where(valid_BS, slots_BS, slots_BS[:, :1])
        mask = torch.zeros_like(valid_BS, dtype=torch.float32).masked_fill_(~valid_BS, float("-inf"))
        return slots_BS, mask[:, None, None, :]


@dataclass(frozen=True)
class PrefillSequence:
    """Query tokens ``[query_start, query_start + query_len)`` of the flat batch, the last ones of ``context_len``."""

    block_table: Tensor
    query_start: int
    query_len: int
    context_len: int
    block_size: int

    @cached_property
    def slots(self) -> Tensor:
        """Slots [S] of this sequence's KV positions."""
        positions_S = torch.arange(self.context_len, device=self.block_table.device)
        return self.block_table[positions_S // self.block_size] * self.block_size + positions_S % self.block_size

    @cached_property
    def mask(self) -> Tensor | None:
        """Bottom-right causal mask [query_len, S], or None where torch's own causal flag says the same."""
        if self.query_len == self.context_len or self.query_len == 1:
            return None
        device = self.block_table.device
        ends = torch.arange(self.context_len - self.query_len, self.context_len, device=device)
        return torch.arange(self.context_len, device=device) <= ends[:, None]


def paged_decode_attention(
    q_BND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: DecodeMeta, scale: float
) -> Tensor:
    """Softmax attention of one query token per sequence over its paged KV. Returns [B, N, D].

    The G query heads of a KV head are treated as G query positions, so K and V are never repeated.
    """
    B, N, D = q_BND.shape
    K = k_cache.shape[2]
    slots_BS, mask = meta.slots_and_mask
    k_BKSD = _gather(k_cache, slots_BS)
    v_BKSD = _gather(v_cache, slots_BS)
    if mask is not None:
        mask = mask.to(q_BND.dtype)
    out = F.scaled_dot_product_attention(q_BND.unflatten(1, (K, N // K)), k_BKSD, v_BKSD, attn_mask=mask, scale=scale)
    return out.reshape(B, N, D)


def paged_prefill_attention(
    q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, sequences: list[PrefillSequence], scale: float, out_TND: Tensor
) -> None:
    """Causal attention of each sequence's chunk over its cached prefix and itself; writes its rows of ``out_TND``."""
    K = k_cache.shape[2]
    G = q_TND.shape[1] // K
    for sequence in sequences:
        rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
        q_KGqD = q_TND[rows].unflatten(1, (K, G)).permute(1, 2, 0, 3)
        k_KGSD = _gather(k_cache, sequence.slots[None])[0][:, None].expand(-1, G, -1, -1)
        v_KGSD = _gather(v_cache, sequence.slots[None])[0][:, None].expand(-1, G, -1, -1)
        fresh = sequence.query_len == sequence.context_len and sequence.query_len > 1
        attended = F.scaled_dot_product_attention(
            q_KGqD, k_KGSD, v_KGSD, attn_mask=sequence.mask, is_causal=fresh, scale=scale
        )
        out_TND[rows] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _gather(cache: Tensor, slots_BS: Tensor) -> Tensor:
    """The KV rows of ``slots_BS`` as [B, K, S, D] (a view of the gathered [B, S, K, D])."""
    rows = cache.flatten(0, 1).index_select(0, slots_BS.flatten())
    return rows.unflatten(0, slots_BS.shape).transpose(1, 2)
