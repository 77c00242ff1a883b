"""Triton prefill attention against a dense loop over single tokens in float64; NaN wherever nothing may be read.

On a CPU the kernel runs in Triton's interpreter, with small tiles so that a few tokens make many of them.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.gpu import prefill_attention
from kernels.gpu.prefill_attention import (
    FLOAT32_TILE,
    HALF_TILES,
    PrefillTile,
    choose_splits,
    choose_tile,
    paged_prefill_attention,
)
from tests.kernels.test_gpu_norm import INTERPRETED, each_dtype
from tests.kernels.test_reference_attention import (
    CHUNKS,
    UNEVEN,
    Paged,
    exact_prefill,
    make_paged,
    prefill,
    random_q,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Weights and outputs are rounded to the dtype; outputs are averages of V, whose entries are near 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}
# Keys in a tile: fewer than a block, as many, and more.
SMALL = [PrefillTile(16, 16, 4, 2), PrefillTile(32, 16, 4, 3), PrefillTile(16, 64, 4, 2)]
A_FEW = [(1, 1), (37, 37), (65, 1), (50, 9), (40, 33), (16, 16)]


@pytest.fixture(autouse=True)
def kernel_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper `prefill` calls the kernel, with the smallest tile unless a test asks for another."""
    use_tile(monkeypatch, SMALL[0])


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: PrefillTile, splits: int = 1) -> None:
    monkeypatch.setattr(ops, "paged_prefill_attention", partial(paged_prefill_attention, tile=tile, splits=splits))


def assert_near(ours: Tensor, exact: Tensor) -> None:
    assert not ours.isnan().any(), "something was read that must not be"
    worst = float((ours.double().cpu() - exact).abs().max())
    assert worst <= TOLERANCE[ours.dtype], f"off by {worst:.2e}"


def check_prefill(
    chunks: list[tuple[int, int]], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, head_dim = shape
    paged = make_paged([context for context, _ in chunks], kv_heads, head_dim, block_size, dtype, device)
    q, scale = random_q(sum(query for _, query in chunks), heads, head_dim, dtype, device), 1.5 * head_dim**-0.5
    assert_near(prefill(paged, q, chunks, scale), exact_prefill(paged, q, chunks, scale))


@each_dtype
@pytest.mark.parametrize("tile", SMALL, ids=lambda tile: f"{tile.queries}x{tile.keys}")
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_sizes_and_tiles(
    block_size: int, tile: PrefillTile, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tile(monkeypatch, tile)
    check_prefill(A_FEW, (2, 1, 16), block_size, dtype, device)


@each_dtype
@pytest.mark.parametrize(
    "shape", [(3, 1, 64), (4, 2, 32), (6, 6, 16), (2, 1, 128), (2, 2, 80), (1, 1, 6), (2, 1, 2)], ids=str
)
def test_head_shapes(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    check_prefill([(37, 37), (50, 9)], shape, 8, dtype, device)


@each_dtype
@pytest.mark.parametrize("block_size", [1, 5, 24])
def test_block_sizes_that_are_no_powers_of_two(block_size: int, dtype: torch.dtype, device: str) -> None:
    check_prefill([(37, 37), (50, 9), (48, 20)], (2, 1, 16), block_size, dtype, device)


def test_whole_prompts_and_chunks(device: str) -> None:
    check_prefill(CHUNKS, (2, 1, 16), 16, torch.float32, device)


@each_dtype
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("few", [False, True])
def test_the_tiles_of_a_gpu(
    few: bool, head_dim: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = FLOAT32_TILE if dtype == torch.float32 else HALF_TILES[head_dim][few]
    use_tile(monkeypatch, tile)
    chunks = [(150, 149), (70, 5)] if INTERPRETED else [*CHUNKS, (1000, 1000), (999, 300)]
    check_prefill(chunks, (2, 1, head_dim), 16, dtype, device)


def test_the_choice_of_a_tile() -> None:
    large, small = HALF_TILES[128]
    assert choose_tile(torch.bfloat16, 8192, 12, 128) == large
    assert choose_tile(torch.bfloat16, 8192, 12, 80) == large
    assert choose_tile(torch.float16, 35, 12, 128) == small
    assert choose_tile(torch.float16, 35, 12, 2) == HALF_TILES[16][1]
    assert choose_tile(torch.float32, 8192, 12, 128) == FLOAT32_TILE
    assert choose_splits(large, 8192, 12) == 1
    assert choose_splits(small, 512, 12) == 2
    assert choose_splits(small, 35, 12) == 8
    assert choose_splits(small, 64, 64) == 4


@each_dtype
@pytest.mark.parametrize("tile", SMALL[:1] + SMALL[2:], ids=lambda tile: f"{tile.queries}x{tile.keys}")
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_programs_that_share_a_tile(
    splits: int, tile: PrefillTile, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have nothing to do, and some of their queries see nothing of what they have."""
    use_tile(monkeypatch, tile, splits)
    monkeypatch.setattr(prefill_attention, "_MIN_SPLIT", 16)
    check_prefill([(200, 9), (1, 1), (61, 61), (130, 20)], (2, 1, 16), 8, dtype, device)


def test_a_share_is_not_too_small(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, SMALL[2], 4)
    check_prefill([(600, 5), (100, 10), (257, 3)], (2, 1, 16), 16, torch.float32, device)


def test_shared_tiles_write_only_rows_of_a_sequence(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, SMALL[0], 3)
    monkeypatch.setattr(prefill_attention, "_MIN_SPLIT", 16)
    chunks = [(20, 20), (90, 7)]
    paged = make_paged([20, 90], 2, 32, 8, torch.float32, device)
    q = random_q(3 + 27 + 5, 4, 32, torch.float32, device)
    q[:3], q[30:] = float("nan"), float("nan")
    out = prefill(paged, q, chunks, 0.2, first_row=3, spare_blocks=4)
    assert (out[:3] == 7).all()
    assert (out[30:] == 7).all()
    assert_near(out[3:30], exact_prefill(paged, q[3:30], chunks, 0.2))


def test_only_rows_of_a_sequence_are_written(device: str) -> None:
    """Decode rows stand before the chunks, padding after them; blocks for later tokens are already in the table."""
    chunks = [(20, 20), (90, 7)]
    paged = make_paged([20, 90], 2, 32, 8, torch.float32, device)
    q = random_q(3 + 27 + 20, 4, 32, torch.float32, device)
    q[:3], q[30:] = float("nan"), float("nan")
    out = prefill(paged, q, chunks, 0.2, first_row=3, spare_blocks=4)
    assert (out[:3] == 7).all()
    assert (out[30:] == 7).all()
    assert_near(out[3:30], exact_prefill(paged, q[3:30], chunks, 0.2))


@pytest.mark.parametrize(
    "queries", [[0, 20, 0, 0, 31, 0], [16, 0, 16], [0, 0, 3], [5] * 17, [17, 1, 16, 15, 1, 32, 2]], ids=str
)
def test_empty_sequences_and_many(queries: list[int], device: str) -> None:
    """Any mixture finds all its tiles within the default number of them. An empty sequence may have no context."""
    contexts = [query + 3 * (i % 3) if query else 0 for i, query in enumerate(queries)]
    chunks = list(zip(contexts, queries, strict=True))
    paged = make_paged(contexts, 1, 16, 8, torch.float32, device)
    q = random_q(sum(queries), 2, 16, torch.float32, device)
    kept = [i for i, query in enumerate(queries) if query]
    some = replace(paged, k=[paged.k[i] for i in kept], v=[paged.v[i] for i in kept])
    assert_near(prefill(paged, q, chunks, 0.3), exact_prefill(some, q, [chunks[i] for i in kept], 0.3))


def meta_on_device(paged: Paged, chunks: list[tuple[int, int]], dtype: torch.dtype, device: str) -> ops.PrefillMeta:
    """Nothing of it is on the host, as in a graph."""
    width = max(map(len, paged.tables))
    tables = [table + [paged.poison_block] * (width - len(table)) for table in paged.tables]
    starts = [0]
    for _, query in chunks:
        starts.append(starts[-1] + query)
    contexts = [context for context, _ in chunks]
    tables_BM, starts_B, contexts_B = (torch.tensor(v, dtype=dtype, device=device) for v in (tables, starts, contexts))
    return ops.PrefillMeta(tables_BM, starts_B, contexts_B, None, None, paged.block_size)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_both_integer_types_and_a_given_number_of_tiles(dtype: torch.dtype, device: str) -> None:
    """A padded batch: more rows and sequences than there are. The number of tiles may follow the true rows."""
    chunks = [(40, 40), (33, 5), (0, 0), (0, 0)]
    paged = make_paged([40, 33, 0, 0], 1, 16, 8, torch.float32, device)
    q = random_q(200, 2, 16, torch.float32, device)
    exact = exact_prefill(replace(paged, k=paged.k[:2], v=paged.v[:2]), q, chunks[:2], 0.3)
    meta = meta_on_device(paged, chunks, dtype, device)
    for num_tiles in (None, 45 // 16 + 4, 30):
        out = torch.full_like(q, 7.0)
        paged_prefill_attention(
            q, paged.k_cache, paged.v_cache, meta, 0.3, out, num_tiles=num_tiles, tile=SMALL[0], splits=1
        )
        assert_near(out[:45], exact)
        assert (out[45:] == 7).all()


@pytest.mark.parametrize("chunk", [7, 16, 61])
def test_prefill_in_chunks_equals_prefill_at_once(chunk: int, device: str) -> None:
    """Later tokens' KV are in the cache already: a chunk must not look past its own context."""
    length = 61
    paged = make_paged([length], 1, 16, 16, torch.float32, device)
    q = random_q(length, 2, 16, torch.float32, device)
    whole = exact_prefill(paged, q, [(length, length)], 0.3)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        assert_near(prefill(paged, q[start:end], [(end, end - start)], 0.3), whole[start:end])


@pytest.mark.parametrize("splits", [1, 3])
def test_strided_inputs_and_output(splits: int, device: str) -> None:
    """q is a view of the fused qkv, the caches are a layer of a tensor of all, the output a part of a wider one."""
    paged = make_paged([40, 50], 3, 16, 16, torch.float32, device)
    layers = torch.full((2, 2, *paged.k_cache.shape), float("nan"), device=device)
    layers[1, 0], layers[1, 1] = paged.k_cache, paged.v_cache
    q, chunks = random_q(50, 15, 16, torch.float32, device)[:, :9], [(40, 40), (50, 10)]
    out = torch.full((50, 11, 16), 7.0, device=device)
    meta = meta_on_device(paged, chunks, torch.int64, device)
    paged_prefill_attention(q, layers[1, 0], layers[1, 1], meta, 0.25, out[:, 1:-1], tile=SMALL[0], splits=splits)
    assert_near(out[:, 1:-1], exact_prefill(paged, q, chunks, 0.25))
    assert (out[:, 0] == 7).all()
    assert (out[:, -1] == 7).all()


@pytest.mark.parametrize(("num_heads", "size", "first"), UNEVEN)
def test_heads_of_a_rank(num_heads: int, size: int, first: int, device: str) -> None:
    heads = ops.HeadGroups(size, first)
    kv_heads = [heads.kv_head(head) for head in range(num_heads)]
    chunks = [(20, 20), (40, 10)]
    paged = make_paged([20, 40], kv_heads[-1] + 1, 16, 16, torch.float32, device)
    expanded = replace(paged, k=[k[:, kv_heads] for k in paged.k], v=[v[:, kv_heads] for v in paged.v])
    q = random_q(30, num_heads, 16, torch.float32, device)
    assert_near(prefill(paged, q, chunks, 0.25, heads=heads), exact_prefill(expanded, q, chunks, 0.25))


@each_dtype
def test_scores_far_apart(dtype: torch.dtype, device: str) -> None:
    """Neither overflows nor loses the weight of the highest score, wherever it stands."""
    paged = make_paged([70], 1, 16, 8, dtype, device)
    q = 20 * random_q(20, 2, 16, dtype, device)
    assert_near(prefill(paged, q, [(70, 20)], 1.0), exact_prefill(paged, q, [(70, 20)], 1.0))
    assert_near(prefill(paged, 0 * q, [(70, 20)], 1.0), exact_prefill(paged, 0 * q, [(70, 20)], 1.0))


@pytest.mark.parametrize("tile", SMALL[1:], ids=lambda tile: f"{tile.queries}x{tile.keys}")
@pytest.mark.parametrize("far", ["blocks", "places in a block", "heads"])
def test_offsets_beyond_2_to_31_elements(far: str, tile: PrefillTile, device: str) -> None:
    """Strides below 2^31 whose products are not: a pool of more than 4 GiB."""
    paged = make_paged([40], 3, 16, 16, torch.float16, device)
    apart = {"blocks": 0, "places in a block": 1, "heads": 2}[far]
    strides = [4096, 64, 16]
    strides[apart] = 2**31 // (paged.k_cache.shape[apart] - 1) + 16
    memory = torch.empty(2**31 + 2**17, dtype=torch.float16, device=device)
    caches = [memory[k_or_v * 2**15 :].as_strided(paged.k_cache.shape, (*strides, 1)) for k_or_v in (0, 1)]
    caches[0].copy_(paged.k_cache)
    caches[1].copy_(paged.v_cache)
    q, out = random_q(40, 3, 16, torch.float16, device), torch.empty(40, 3, 16, dtype=torch.float16, device=device)
    meta = meta_on_device(paged, [(40, 40)], torch.int32, device)
    paged_prefill_attention(q, caches[0], caches[1], meta, 0.25, out, tile=tile, splits=1)
    assert_near(out, exact_prefill(paged, q, [(40, 40)], 0.25))


def test_queries_and_outputs_beyond_2_to_31_elements(device: str) -> None:
    paged, stride = make_paged([35], 1, 16, 16, torch.float16, device), 2**31 // 34 + 16
    memory = torch.empty(2**31 + 2**12, dtype=torch.float16, device=device)
    q, out = (memory[begin:].as_strided((35, 2, 16), (stride, 16, 1)) for begin in (0, 1024))
    q.copy_(random_q(35, 2, 16, torch.float16, device))
    paged_prefill_attention(
        q, paged.k_cache, paged.v_cache, meta_on_device(paged, [(35, 35)], torch.int32, device), 0.25, out
    )
    assert_near(out, exact_prefill(paged, q, [(35, 35)], 0.25))


def test_no_rows(device: str) -> None:
    paged = make_paged([3], 1, 16, 8, torch.float32, device)
    q = random_q(0, 2, 16, torch.float32, device)
    assert prefill(paged, q, [(3, 0)], 0.3).shape == (0, 2, 16)


@each_dtype
def test_a_graph_serves_other_batches(dtype: torch.dtype, device: str) -> None:
    if device != "cuda":
        pytest.skip("graphs need a GPU")
    batches = [[(300, 290), (20, 3)], [(77, 77), (0, 0)], [(5, 1), (128, 128)]]
    pageds = [make_paged([context for context, _ in chunks], 2, 64, 16, dtype, device) for chunks in batches]
    q, out = random_q(300, 6, 64, dtype, device), torch.empty(300, 6, 64, dtype=dtype, device=device)
    k_cache, v_cache = (torch.full((30, 16, 2, 64), float("nan"), dtype=dtype, device=device) for _ in range(2))
    tables, starts, contexts = (torch.zeros(*s, dtype=torch.int32, device=device) for s in ((2, 30), (3,), (2,)))
    meta = ops.PrefillMeta(tables, starts, contexts, None, None, 16)
    paged_prefill_attention(q, k_cache, v_cache, meta, 0.2, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill_attention(q, k_cache, v_cache, meta, 0.2, out)
    for paged, chunks in zip(pageds, batches, strict=True):
        now, rows = meta_on_device(paged, chunks, torch.int32, device), sum(query for _, query in chunks)
        k_cache[: len(paged.k_cache)], v_cache[: len(paged.v_cache)] = paged.k_cache, paged.v_cache
        tables[:, : now.block_tables.shape[1]] = now.block_tables
        starts.copy_(now.query_starts)
        contexts.copy_(now.context_lens)
        out.fill_(7)
        graph.replay()
        kept = [i for i, (_, query) in enumerate(chunks) if query]
        some = replace(paged, k=[paged.k[i] for i in kept], v=[paged.v[i] for i in kept])
        assert_near(out[:rows], exact_prefill(some, q[:rows], [chunks[i] for i in kept], 0.2))
        assert (out[rows:] == 7).all()
