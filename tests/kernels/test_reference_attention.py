"""Paged attention against a dense loop over single tokens in float64.

Whatever must not be read holds NaN: free blocks, the rest of each sequence's last block, and the blocks that padded
entries of a block table name. One NaN that is read makes the output NaN.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
HEADS = [(9, 3, 64), (12, 2, 128), (14, 2, 64), (4, 1, 32), (6, 6, 16)]
BLOCK_SIZES = [8, 16, 32, 64]
# Several groups of like length, both sides of every block boundary, and the shortest possible.
MIXED_LENGTHS = [1, 700, 7, 8, 9, 128, 129, 63, 64, 65, 256, 257, 330, 2, 512, 513]

each_shape = pytest.mark.parametrize("shape", HEADS, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}")
each_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


@dataclass
class Paged:
    """Sequences of KV laid out in scrambled blocks; everything else is NaN. ``tables[i]`` are sequence i's blocks."""

    k_cache: Tensor
    v_cache: Tensor
    k: list[Tensor]
    v: list[Tensor]
    tables: list[list[int]]
    poison_block: int
    block_size: int


def make_paged(
    lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Paged:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 5
    order = torch.randperm(num_blocks, generator=generator).tolist()
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    tables, keys, values = [], [], []
    for length, count in zip(lengths, needed, strict=True):
        table, order = order[:count], order[count:]
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length):
            block, offset = table[position // block_size], position % block_size
            caches[0, block, offset], caches[1, block, offset] = k[position], v[position]
        tables.append(table)
        keys.append(k)
        values.append(v)
    k_cache, v_cache = caches.to(device)
    return Paged(k_cache, v_cache, keys, values, tables, order[0], block_size)


def random_q(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return (2 * torch.randn(tokens, heads, head_dim, generator=generator)).to(device=device, dtype=dtype)


def attend_one_token(q_ND: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float) -> Tensor:
    """One query token over all of ``k`` and ``v``, head by head: query head n reads KV head n // (N / K)."""
    group = q_ND.shape[0] // k_SKD.shape[1]
    out = []
    for head, query in enumerate(q_ND):
        weights = torch.softmax(k_SKD[:, head // group] @ query * scale, dim=0)
        out.append(weights @ v_SKD[:, head // group])
    return torch.stack(out)


def dense(q_TND: Tensor, k: Tensor, v: Tensor, first_position: int, scale: float) -> Tensor:
    """Causal attention of tokens at ``first_position``... in float64, one token at a time."""
    q_TND, k, v = q_TND.double().cpu(), k.double(), v.double()
    ends = range(first_position + 1, first_position + 1 + len(q_TND))
    return torch.stack([attend_one_token(q, k[:end], v[:end], scale) for q, end in zip(q_TND, ends, strict=True)])


def assert_near(ours: Tensor, exact: Tensor) -> None:
    """Outputs are averages of V, whose entries are near 1. NaN fails too."""
    assert not ours.isnan().any(), "something was read that must not be"
    worst = float((ours.double().cpu() - exact).abs().max())
    assert worst <= TOLERANCE[ours.dtype], f"off by {worst:.2e}"


def decode_meta(paged: Paged, lengths: list[int], device: str, extra_width: int = 0) -> ops.DecodeMeta:
    """Tables padded with a block of NaN."""
    width = max(map(len, paged.tables)) + extra_width
    rows = [table + [paged.poison_block] * (width - len(table)) for table in paged.tables]
    tables = torch.tensor(rows, device=device)
    return ops.DecodeMeta(tables, torch.tensor(lengths, device=device), tuple(lengths), paged.block_size)


def check_decode(
    lengths: list[int],
    shape: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    device: str,
    extra_width: int = 0,
) -> None:
    heads, kv_heads, head_dim = shape
    paged = make_paged(lengths, kv_heads, head_dim, block_size, dtype, device)
    q, scale = random_q(len(lengths), heads, head_dim, dtype, device), 1.5 * head_dim**-0.5
    meta = decode_meta(paged, lengths, device, extra_width)
    ours = ops.paged_decode_attention(q, paged.k_cache, paged.v_cache, meta, scale)
    assert ours.shape == q.shape
    assert ours.dtype == dtype
    exact = [dense(q[i : i + 1], paged.k[i], paged.v[i], length - 1, scale) for i, length in enumerate(lengths)]
    assert_near(ours, torch.cat(exact))


@each_block_size
@each_shape
def test_decode_of_mixed_lengths(shape: tuple[int, int, int], block_size: int, device: str) -> None:
    check_decode(MIXED_LENGTHS, shape, block_size, torch.float32, device)


@each_shape
def test_decode_in_bfloat16(shape: tuple[int, int, int], device: str) -> None:
    check_decode(MIXED_LENGTHS, shape, 16, torch.bfloat16, device)


@pytest.mark.parametrize(
    "lengths", [[1], [700], [16], [17], [50, 50, 50], [128, 1, 127], [129, 200, 256], [1] * 19], ids=str
)
def test_decode_of_one_group(lengths: list[int], device: str) -> None:
    check_decode(lengths, (9, 3, 64), 16, torch.float32, device)


def test_decode_with_a_table_wider_than_any_sequence(device: str) -> None:
    check_decode([5, 40, 300], (4, 2, 32), 16, torch.float32, device, extra_width=7)


def test_a_decode_row_does_not_depend_on_its_neighbours(device: str) -> None:
    paged = make_paged([40, 39, 3, 400], 2, 32, 8, torch.float32, device)
    q, scale = random_q(4, 4, 32, torch.float32, device), 0.3
    together = ops.paged_decode_attention(
        q, paged.k_cache, paged.v_cache, decode_meta(paged, [40, 39, 3, 400], device), scale
    )
    for i, length in enumerate([40, 39, 3, 400]):
        table = torch.tensor([paged.tables[i]], device=device)
        meta = ops.DecodeMeta(table, torch.tensor([length], device=device), (length,), 8)
        alone = ops.paged_decode_attention(q[i : i + 1], paged.k_cache, paged.v_cache, meta, scale)
        assert torch.allclose(alone[0], together[i], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_of_strided_inputs(dtype: torch.dtype, device: str) -> None:
    """q is a view of the fused qkv; the caches are one layer of a tensor that holds K and V of all."""
    paged = make_paged([30, 5, 200], 3, 64, 16, dtype, device)
    layers = torch.full((2, 2, *paged.k_cache.shape), float("nan"), dtype=dtype, device=device)
    layers[1, 0], layers[1, 1] = paged.k_cache, paged.v_cache
    q = random_q(3, 15, 64, dtype, device)[:, :9]
    assert not q.is_contiguous()
    ours = ops.paged_decode_attention(q, layers[1, 0], layers[1, 1], decode_meta(paged, [30, 5, 200], device), 0.125)
    exact = [dense(q[i : i + 1], paged.k[i], paged.v[i], n - 1, 0.125) for i, n in enumerate([30, 5, 200])]
    assert_near(ours, torch.cat(exact))


# (context_len, query_len) of each sequence: whole prompts, chunks over a cached prefix, and single tokens.
CHUNKS = [(1, 1), (37, 37), (64, 64), (65, 1), (200, 9), (150, 149), (16, 15), (330, 3), (17, 16)]


def prefill(
    paged: Paged,
    q: Tensor,
    chunks: list[tuple[int, int]],
    scale: float,
    first_row: int = 0,
    spare_blocks: int = 0,
    heads: ops.HeadGroups | None = None,
) -> Tensor:
    """Runs every chunk; rows of the output that belong to none stay as they were (7)."""
    starts = tuple(accumulate((query for _, query in chunks), initial=first_row))
    contexts = tuple(context for context, _ in chunks)
    width = max(map(len, paged.tables)) + spare_blocks
    tables = [table + [paged.poison_block] * (width - len(table)) for table in paged.tables]
    block_tables, query_starts, context_lens = (
        torch.tensor(values, device=q.device) for values in (tables, starts, contexts)
    )
    meta = ops.PrefillMeta(block_tables, query_starts, context_lens, starts, contexts, paged.block_size, heads)
    out = torch.full(q.shape, 7.0, dtype=q.dtype, device=q.device)
    ops.paged_prefill_attention(q, paged.k_cache, paged.v_cache, meta, scale, out)
    return out


def exact_prefill(paged: Paged, q: Tensor, chunks: list[tuple[int, int]], scale: float) -> Tensor:
    rows, start = [], 0
    for k, v, (context, query) in zip(paged.k, paged.v, chunks, strict=True):
        rows.append(dense(q[start : start + query], k, v, context - query, scale))
        start += query
    return torch.cat(rows)


def check_prefill(shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: str) -> None:
    heads, kv_heads, head_dim = shape
    paged = make_paged([context for context, _ in CHUNKS], kv_heads, head_dim, block_size, dtype, device)
    q = random_q(sum(query for _, query in CHUNKS), heads, head_dim, dtype, device)
    scale = 1.5 * head_dim**-0.5
    assert_near(prefill(paged, q, CHUNKS, scale), exact_prefill(paged, q, CHUNKS, scale))


@each_block_size
@each_shape
def test_prefill_of_whole_prompts_and_chunks(shape: tuple[int, int, int], block_size: int, device: str) -> None:
    check_prefill(shape, block_size, torch.float32, device)


@each_shape
def test_prefill_in_bfloat16(shape: tuple[int, int, int], device: str) -> None:
    check_prefill(shape, 16, torch.bfloat16, device)


def test_prefill_writes_its_own_rows_only(device: str) -> None:
    """Decode rows stand before the chunks of a step, and blocks for later tokens are already in the table."""
    chunks = [(20, 20), (90, 7)]
    paged = make_paged([20, 90], 2, 32, 8, torch.float32, device)
    q = random_q(3 + 27 + 2, 4, 32, torch.float32, device)
    out = prefill(paged, q, chunks, 0.2, first_row=3, spare_blocks=4)
    assert (out[:3] == 7).all()
    assert (out[30:] == 7).all()
    assert_near(out[3:30], exact_prefill(paged, q[3:30], chunks, 0.2))


@pytest.mark.parametrize("chunk", [1, 7, 16, 99])
def test_prefill_in_chunks_equals_prefill_at_once(chunk: int, device: str) -> None:
    """Later tokens' KV are in the cache already: a chunk must not look past its own context."""
    length = 150
    paged = make_paged([length], 3, 64, 16, torch.float32, device)
    q = random_q(length, 9, 64, torch.float32, device)
    whole = exact_prefill(paged, q, [(length, length)], 0.125)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        ours = prefill(paged, q[start:end], [(end, end - start)], 0.125)
        assert_near(ours, whole[start:end])


def test_prefill_of_strided_inputs(device: str) -> None:
    paged = make_paged([40, 90], 3, 64, 16, torch.float32, device)
    layers = torch.full((2, 2, *paged.k_cache.shape), float("nan"), device=device)
    layers[1, 0], layers[1, 1] = paged.k_cache, paged.v_cache
    paged.k_cache, paged.v_cache = layers[1, 0], layers[1, 1]
    q = random_q(50, 15, 64, torch.float32, device)[:, :9]
    chunks = [(40, 40), (90, 10)]
    assert_near(prefill(paged, q, chunks, 0.125), exact_prefill(paged, q, chunks, 0.125))


def test_a_decode_row_is_a_prefill_chunk_of_one(device: str) -> None:
    paged = make_paged([77], 3, 64, 8, torch.float32, device)
    q = random_q(1, 9, 64, torch.float32, device)
    meta = decode_meta(paged, [77], device)
    decoded = ops.paged_decode_attention(q, paged.k_cache, paged.v_cache, meta, 0.125)
    assert torch.allclose(prefill(paged, q, [(77, 1)], 0.125), decoded, atol=1e-6)


# (query heads, size of a group, first query head of the rank): ranks of 9/3 on 2 and 4, of 14/2 on 4, of 12/2 on 5.
UNEVEN = [(4, 3, 0), (5, 3, 4), (2, 3, 2), (3, 7, 3), (4, 7, 10), (2, 6, 4), (3, 6, 9)]


@pytest.mark.parametrize(("num_heads", "size", "first"), UNEVEN)
def test_heads_of_a_rank(num_heads: int, size: int, first: int, device: str) -> None:
    """A rank's query heads may begin and end within a group: each head still reads its own KV head."""
    heads = ops.HeadGroups(size, first)
    kv_heads = [heads.kv_head(head) for head in range(num_heads)]
    assert kv_heads == [(first + i) // size - first // size for i in range(num_heads)]
    chunks = [(40, 40), (90, 10)]
    paged = make_paged([40, 90], kv_heads[-1] + 1, 64, 16, torch.float32, device)
    expanded = replace(paged, k=[k[:, kv_heads] for k in paged.k], v=[v[:, kv_heads] for v in paged.v])
    q = random_q(50, num_heads, 64, torch.float32, device)
    assert_near(prefill(paged, q, chunks, 0.125, heads=heads), exact_prefill(expanded, q, chunks, 0.125))
    meta = replace(decode_meta(paged, [40, 90], device), heads=heads)
    decoded = ops.paged_decode_attention(q[:2], paged.k_cache, paged.v_cache, meta, 0.125)
    exact = [dense(q[i : i + 1], expanded.k[i], expanded.v[i], n - 1, 0.125) for i, n in enumerate([40, 90])]
    assert_near(decoded, torch.cat(exact))


def test_rows_name_their_tables(device: str) -> None:
    """Sequences of a batch may use any rows of a larger table; -1 is a padded row."""
    paged = make_paged([40, 90, 7], 3, 64, 16, torch.float32, device)
    q = random_q(4, 9, 64, torch.float32, device)
    full = decode_meta(paged, [40, 90, 7], device)
    rows = torch.tensor([2, -1, 0, 1], device=device)
    lengths = (7, 0, 40, 90)
    meta = ops.DecodeMeta(full.block_tables, torch.tensor(lengths, device=device), lengths, 16, rows)
    ours = ops.paged_decode_attention(q, paged.k_cache, paged.v_cache, meta, 0.125)
    for i, (sequence, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        if sequence >= 0:
            exact = dense(q[i : i + 1], paged.k[sequence], paged.v[sequence], length - 1, 0.125)
            assert_near(ours[i : i + 1], exact)
