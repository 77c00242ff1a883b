"""Prefill attention for CPUs: query blocks whose scores stay in the cache, products by oneDNN.

Shapes as in `kernels.reference.attention`. torch's own CPU attention reaches about half of this on long chunks
(docs/decisions.md has the figures), and is better on short ones.
"""

import torch
from torch import Tensor

from kernels.cpu_linear import linear
from kernels.reference import attention as reference

# Query tokens of a block. Its scores, G x 256 rows of the context in float32, stay within the second-level cache.
BLOCK = 256
SHORTEST_CHUNK = 192


def paged_prefill_attention(
    q_TND: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: reference.PrefillMeta,
    scale: float,
    out_TND: Tensor,
) -> None:
    """As the reference, for what `kernels.cpu_linear` handles. The reference does short chunks and uneven heads."""
    if meta.heads is not None:
        reference.paged_prefill_attention(q_TND, k_cache, v_cache, meta, scale, out_TND)
        return
    group = q_TND.shape[1] // k_cache.shape[2]
    for sequence in meta.sequences:
        if sequence.query_len < SHORTEST_CHUNK:
            reference.attend_sequence(q_TND, k_cache, v_cache, sequence, scale, out_TND)
            continue
        rows = slice(sequence.query_start, sequence.query_start + sequence.query_len)
        k_SKD = k_cache.flatten(0, 1).index_select(0, sequence.slots)
        v_SKD = v_cache.flatten(0, 1).index_select(0, sequence.slots)
        for head in range(k_cache.shape[2]):
            heads = slice(head * group, (head + 1) * group)
            _attend_head(q_TND[rows, heads], k_SKD[:, head], v_SKD[:, head], scale, out_TND[rows, heads])


def _attend_head(q_qGD: Tensor, k_SD: Tensor, v_SD: Tensor, scale: float, out_qGD: Tensor) -> None:
    """The query heads of one KV head, block by block; scores and softmax in float32.

    A block sees the context up to its own end, and within its own tokens only the earlier ones.
    """
    group, dim = q_qGD.shape[1:]
    queries, k_SD = q_qGD.transpose(0, 1).float() * scale, k_SD.float().contiguous()
    v_DS = v_SD.t().contiguous()
    first = len(k_SD) - len(q_qGD)
    for start in range(0, len(q_qGD), BLOCK):
        stop = min(start + BLOCK, len(q_qGD))
        length, end = stop - start, first + stop
        scores = linear(queries[:, start:stop].reshape(-1, dim), k_SD[:end]).view(group, length, end)
        scores[:, :, end - length :] += torch.full((length, length), float("-inf")).triu_(1)
        weights = scores.softmax(-1).to(v_DS.dtype)
        attended = linear(weights.view(-1, end), v_DS[:, :end].contiguous())
        out_qGD[start:stop] = attended.view(group, length, dim).transpose(0, 1)
