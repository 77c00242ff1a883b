"""Paged attention in plain torch.

Shapes: T tokens, B sequences, N query heads, K KV heads, G = N / K query heads per KV head, D head_dim,
S KV positions, M block-table width. Reads nothing past a sequence's length: unwritten KV may hold anything.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# Contexts up to 2^7 tokens are one group.
SMALLEST_GROUP_BITS = 7


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Rows of like length that are attended together: ``rows`` int64 [b], or None for all of them in order.

    ``slots`` int64 [b, S]: where every KV position lies; a position past a row's end names that row's first slot,
    which is always written, and is masked. ``mask`` [b, 1, 1, S] is additive, None when no row is shorter than S.
    """

    rows: Tensor | None
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Which query heads share a KV head: global query head h reads KV head ``h // size``.

    A rank of a tensor parallel group holds query heads from ``first`` on, and the KV heads they need; so its first
    and last KV head may serve fewer than ``size`` of its query heads.
    """

    size: int
    first: int = 0

    def kv_head(self, query_head: int) -> int:
        """The local KV head of a local query head."""
        return (self.first + query_head) // self.size - self.first // self.size


@dataclass(frozen=True, eq=False)
class DecodeMeta:
    """One query token per sequence. ``block_tables`` int [B, M]; ``context_lens`` int [B], the new token included.

    ``host_lens`` are the same lengths on the host; the reference needs them, a kernel does not. With ``table_rows``
    (int [B]) sequence b uses row ``table_rows[b]`` of ``block_tables``, and a row of -1 is padding: its output is
    undefined, and nothing of it is read. ``heads`` None: every KV head serves N / K query heads.
    """

    block_tables: Tensor
    context_lens: Tensor
    host_lens: tuple[int, ...] | None
    block_size: int
    table_rows: Tensor | None = None
    heads: HeadGroups | None = None

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        """Rows by length, so that padding at most doubles the work; made once a step, used by every layer."""
        assert self.host_lens is not None, "the reference groups rows by their lengths on the host"
        tables = self.block_tables
        if self.table_rows is not None:
            tables = tables[self.table_rows.clamp(min=0).long()]
        by_size: dict[int, list[int]] = {}
        for row, length in enumerate(self.host_lens):
            if length > 0:
                by_size.setdefault(max((length - 1).bit_length(), SMALLEST_GROUP_BITS), []).append(row)
        if len(by_size) == 1 and 0 not in self.host_lens:
            return [self._group(None, tables, self.context_lens, max(self.host_lens))]
        groups = []
        for members in by_size.values():
            rows = torch.tensor(members, device=tables.device)
            longest = max(self.host_lens[row] for row in members)
            groups.append(self._group(rows, tables[rows], self.context_lens[rows], longest))
        return groups

    def _group(self, rows: Tensor | None, tables: Tensor, lens: Tensor, longest: int) -> DecodeGroup:
        positions_S = torch.arange(longest, device=tables.device)
        slots = (
            tables.index_select(1, positions_S // self.block_size).long() * self.block_size
            + positions_S % self.block_size
        )
        valid = positions_S < lens[:, None]
        if bool(valid.all()):
            return DecodeGroup(rows, slots, None)
        mask = torch.zeros(valid.shape, device=tables.device).masked_fill_(~valid, float("-inf"))
        return DecodeGroup(rows, torch.where(valid, slots, slots[:, :1]), mask[:, None, None, :])


@dataclass(frozen=True, eq=False)
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
        blocks_S = self.block_table[positions_S // self.block_size].long()
        return blocks_S * self.block_size + positions_S % self.block_size

    @cached_property
    def mask(self) -> Tensor | None:
        """Bottom-right causal mask [query_len, S], or None where torch's own causal flag says the same."""
        if self.query_len == self.context_len or self.query_len == 1:
            return None
        device = self.block_table.device
        ends = torch.arange(self.context_len - self.query_len, self.context_len, device=device)
        return torch.arange(self.context_len, device=device) <= ends[:, None]


@dataclass(frozen=True, eq=False)
class PrefillMeta:
    """Chunks of B sequences: sequence b's queries are the flat rows ``[query_starts[b], query_starts[b + 1])``.

    They are the last tokens of its context of ``context_lens[b]``. ``block_tables`` int [B, M], ``query_starts`` int
    [B + 1], ``context_lens`` int [B]; the host tuples say the same, and are None where a graph is captured: a kernel
    reads the device's. An empty sequence has equal starts.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    host_query_starts: tuple[int, ...] | None
    host_context_lens: tuple[int, ...] | None
    block_size: int
    heads: HeadGroups | None = None

    @cached_property
    def sequences(self) -> list[PrefillSequence]:
        """The same, one object for each sequence that is not empty."""
        assert self.host_query_starts is not None
        assert self.host_context_lens is not None
        starts, contexts = self.host_query_starts, self.host_context_lens
        return [
            PrefillSequence(self.block_tables[b], starts[b], starts[b + 1] - starts[b], context, self.block_size)
            for b, context in enumerate(contexts)
            if starts[b + 1] > starts[b]
        ]


def paged_decode_attention(q_BND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: DecodeMeta, scale: float) -> Tensor:
    """Softmax attention of one query token per sequence over its paged KV. Returns [B, N, D].

    The G query heads of a KV head are treated as G query positions, so K and V are never repeated.
    """
    groups, uneven = meta.groups, _uneven_heads(q_BND.shape[1], k_cache, meta.heads)
    if len(groups) == 1 and groups[0].rows is None:
        return _attend_group(q_BND, k_cache, v_cache, groups[0], scale, uneven)
    out_BND = torch.empty(q_BND.shape, dtype=q_BND.dtype, device=q_BND.device)
    for group in groups:
        out_BND[group.rows] = _attend_group(q_BND[group.rows], k_cache, v_cache, group, scale, uneven)
    return out_BND


def _uneven_heads(num_heads: int, k_cache: Tensor, heads: HeadGroups | None) -> Tensor | None:
    """The KV head of each query head, int64 [N]; None where all groups are of one size."""
    if heads is None:
        return None
    kv_heads = [heads.kv_head(head) for head in range(num_heads)]
    return torch.tensor(kv_heads, device=k_cache.device)


def _attend_group(
    q_bND: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scale: float, uneven: Tensor | None
) -> Tensor:
    K = k_cache.shape[2] if uneven is None else q_bND.shape[1]
    q_bKGD = q_bND.unflatten(1, (K, -1))
    k_bKSD, v_bKSD = _gather(k_cache, group.slots), _gather(v_cache, group.slots)
    if uneven is not None:
        k_bKSD, v_bKSD = k_bKSD[:, uneven], v_bKSD[:, uneven]
    mask = None if group.mask is None else group.mask.to(q_bND.dtype)
    return F.scaled_dot_product_attention(q_bKGD, k_bKSD, v_bKSD, attn_mask=mask, scale=scale).flatten(1, 2)


def paged_prefill_attention(
    q_TND: Tensor, k_cache: Tensor, v_cache: Tensor, meta: PrefillMeta, scale: float, out_TND: Tensor
) -> None:
    """Causal attention of each sequence's chunk over its cached prefix and itself; writes its rows of ``out_TND``."""
    uneven = _uneven_heads(q_TND.shape[1], k_cache, meta.heads)
    for sequence in meta.sequences:
        attend_sequence(q_TND, k_cache, v_cache, sequence, scale, out_TND, uneven)


def attend_sequence(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sequence: PrefillSequence,
    scale: float,
    out_TND: Tensor,
    uneven: Tensor | None = None,
) -> None:
    """One sequence of `paged_prefill_attention`; ``uneven`` as `HeadGroups.kv_head` of every query head."""
    k_KSD, v_KSD = _gather(k_cache, sequence.slots[None])[0], _gather(v_cache, sequence.slots[None])[0]
    if uneven is not None:
        k_KSD, v_KSD = k_KSD[uneven], v_KSD[uneven]
    K = k_KSD.shape[0]
    G = q_TND.shape[1] // K
    rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
    q_KGqD = q_TND[rows].unflatten(1, (K, G)).permute(1, 2, 0, 3)
    k_KGSD = k_KSD[:, None].expand(-1, G, -1, -1)
    v_KGSD = v_KSD[:, None].expand(-1, G, -1, -1)
    fresh = sequence.query_len == sequence.context_len and sequence.query_len > 1
    attended = F.scaled_dot_product_attention(
        q_KGqD, k_KGSD, v_KGSD, attn_mask=sequence.mask, is_causal=fresh, scale=scale
    )
    out_TND[rows] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _gather(cache: Tensor, slots_BS: Tensor) -> Tensor:
    """The KV rows of ``slots_BS`` as [B, K, S, D] (a view of the gathered [B, S, K, D])."""
    rows = cache.flatten(0, 1).index_select(0, slots_BS.flatten())
    return rows.unflatten(0, slots_BS.shape).transpose(1, 2)
