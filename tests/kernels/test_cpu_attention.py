"""The CPU's own prefill attention against the reference, on chunks long enough that it is used."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels import cpu_attention, ops
from kernels.reference import attention as reference

# (context, query): whole prompts and chunks after a cached prefix, around the block and the shortest chunk.
CHUNKS = [(192, 192), (255, 255), (256, 256), (257, 257), (600, 600), (197, 192), (900, 300), (513, 512), (300, 5)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attend(module: object, dtype: torch.dtype, heads: int, kv_heads: int, chunks: list[tuple[int, int]]) -> Tensor:
    """All ``chunks`` as one batch; every slot that must not be read is NaN."""
    generator = torch.Generator().manual_seed(0)
    block_size, dim = 16, 64
    needed = sum(-(-context // block_size) for context, _ in chunks)
    blocks = torch.randperm(needed + 5, generator=generator)
    caches = torch.full((2, needed + 5, block_size, kv_heads, dim), float("nan"))
    counts = [-(-context // block_size) for context, _ in chunks]
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int64)
    for row, part in enumerate(blocks[: sum(counts)].split(counts)):
        tables[row, : len(part)] = part
    contexts = tuple(context for context, _ in chunks)
    starts = tuple(accumulate((query for _, query in chunks), initial=0))
    meta = reference.PrefillMeta(tables, torch.tensor(starts), torch.tensor(contexts), starts, contexts, block_size)
    for sequence in meta.sequences:
        values = torch.randn(2, sequence.context_len, kv_heads, dim, generator=generator)
        caches.flatten(1, 2)[:, sequence.slots] = values
    start = starts[-1]
    q = 2 * torch.randn(start + 3, heads, dim, generator=generator)
    out = torch.full(q.shape, 7.0, dtype=dtype)
    k_cache, v_cache = caches.to(dtype)
    module.paged_prefill_attention(q.to(dtype), k_cache, v_cache, meta, 0.15, out)  # type: ignore[attr-defined]
    assert (out[start:] == 7).all(), "rows of nobody were written"
    return out[:start]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (4, 4), (8, 1)])
def test_it_equals_the_reference(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    ours = attend(cpu_attention, dtype, heads, kv_heads, CHUNKS)
    theirs = attend(reference, dtype, heads, kv_heads, CHUNKS)
    assert not theirs.isnan().any()
    assert (ours.float() - theirs.float()).abs().max() < TOLERANCE[dtype]


def test_dtypes_it_has_no_product_for_go_to_the_reference() -> None:
    ours = attend(ops, torch.float16, 4, 2, CHUNKS)
    assert torch.equal(ours, attend(reference, torch.float16, 4, 2, CHUNKS))


def test_it_is_what_the_engine_calls_on_a_cpu() -> None:
    ours = attend(ops, torch.float32, 9, 3, CHUNKS)
    assert torch.equal(ours, attend(cpu_attention, torch.float32, 9, 3, CHUNKS))
