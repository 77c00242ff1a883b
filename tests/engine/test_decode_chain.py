"""The fused chain of a decode step against the plain layers, on small random models of every architecture.

On a CPU the Triton kernels run in the interpreter; on a GPU they are compiled, with and without programmatic dependent
launch.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.config import load_model_config
from engine.model.decode_chain import DecodeBuffers, DecodeChain
from engine.model.loader import load_weights
from engine.model.rope import cos_sin_table
from engine.model.transformer import ForwardBatch, Transformer
from kernels.reference.attention import DecodeMeta
from kernels.reference.step import DecodeRows
from tests.engine.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, MAX_BLOCKS, SLOTS = 8, 6, 70


@pytest.fixture(
    scope="module",
    params=[
        (
            "llama",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
            },
        ),
        ("llama", {"head_dim": 20, "hidden_size": 100, "intermediate_size": 50, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=["llama-biases", "llama-odd", "qwen2", "qwen3"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> Transformer:
    kind, overrides = request.param
    sizes = {"hidden_size": 64, "intermediate_size": 40, "vocab_size": 70, "max_position_embeddings": 64}
    if device == "cpu" and kind == "llama":
        sizes["num_hidden_layers"] = 1  # the interpreter is slow
    directory: Path = make_model(tmp_path_factory.mktemp("model"), kind, **(sizes | overrides))
    config = load_model_config(directory)
    weights, _ = load_weights(directory, config, torch.float32, torch.device(device), show_progress=False)
    return Transformer(config, weights)


def make_state(model: Transformer, device: str) -> tuple[Tensor, DecodeRows]:
    """A KV cache of random values, each slot with blocks of its own and a position of its own; slot 3 is unused."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    num_blocks = SLOTS * MAX_BLOCKS
    shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_cache = torch.randn(shape, generator=generator).to(device)
    rows = DecodeRows(
        row_slots_B=torch.tensor([slot if slot != 3 else -1 for slot in range(SLOTS)], dtype=torch.int32),
        positions_S=torch.randint(0, MAX_BLOCKS * BLOCK_SIZE - 1, (SLOTS,), generator=generator).int(),
        block_tables_SM=torch.randperm(num_blocks, generator=generator).int().view(SLOTS, MAX_BLOCKS),
        last_token_S=torch.randint(0, config.vocab_size, (SLOTS,), generator=generator),
        block_size=BLOCK_SIZE,
    )
    moved = {name: getattr(rows, name).to(device) for name in DecodeRows.__slots__ if name != "block_size"}
    return kv_cache, replace(rows, **moved)


def plain_logits(model: Transformer, kv_cache: Tensor, rows: DecodeRows, count: int) -> Tensor:
    """Logits of the first ``count`` rows by the layers that every device runs; the padded row is left out."""
    slots = [slot for slot in rows.row_slots_B[:count].tolist() if slot >= 0]
    positions = rows.positions_S[slots].long()
    tables = rows.block_tables_SM[slots].long()
    cos_sin = cos_sin_table(model.config, 64).to(kv_cache.device)
    batch = ForwardBatch(
        token_ids_T=rows.last_token_S[slots],
        cos_sin_TD=cos_sin[positions],
        slots_T=tables[torch.arange(len(slots)), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        num_decode=len(slots),
        decode=DecodeMeta(tables, positions + 1, tuple((positions + 1).tolist()), BLOCK_SIZE),
        prefill=None,
    )
    return model.logits(model.hidden_states(batch, kv_cache))


@pytest.mark.parametrize(("count", "fold_norms_upto"), [(1, 0), (17, 0), (70, 0), (5, 16)])
@pytest.mark.parametrize("pdl", [False, True])
@torch.inference_mode()
def test_the_chain_equals_the_layers(
    model: Transformer, count: int, fold_norms_upto: int, pdl: bool, device: str
) -> None:
    """One row, few rows, more than the narrow products take, and few rows without kernels for the norms."""
    if pdl and device == "cpu":
        pytest.skip("the interpreter has no dependent launch")
    kv_cache, rows = make_state(model, device)
    expected_cache = kv_cache.clone()
    expected = plain_logits(model, expected_cache, rows, count)
    positions = rows.positions_S.clone()
    cos_sin = cos_sin_table(model.config, 64).to(device)
    buffers = DecodeBuffers(model, SLOTS)
    DecodeChain(model, kv_cache, rows, cos_sin, buffers, fold_norms_upto).run(count, pdl=pdl)
    live = [row for row in range(count) if row != 3]
    assert (buffers.logits_BV[live] - expected).abs().max() < 2e-4
    assert (kv_cache - expected_cache).abs().max() < 2e-4, "the KV of the new tokens, and nothing else, is written"
    moved = rows.positions_S - positions
    assert moved.tolist() == [1 if slot < count and slot != 3 else 0 for slot in range(SLOTS)]


@pytest.mark.parametrize(("count", "fold_norms_upto"), [(1, 0), (17, 0), (5, 16)])
@torch.inference_mode()
def test_dependent_launch_changes_no_bit(model: Transformer, count: int, fold_norms_upto: int, device: str) -> None:
    """10,000 steps beside kernels that take multiprocessors away at random, so that programs start late and out of
    step: the same bits as without dependent launch.

    Two states take turns, and whatever a step must write before it is read holds NaN or nonsense when it begins: what
    is read too early is another step's, or poison.
    """
    if device == "cpu":
        pytest.skip("the interpreter has no dependent launch")
    kv_cache, rows = make_state(model, device)
    buffers = DecodeBuffers(model, SLOTS)
    chain = DecodeChain(model, kv_cache, rows, cos_sin_table(model.config, 64).to(device), buffers, fold_norms_upto)
    live = torch.tensor([row for row in range(count) if row != 3], device=device)
    states = [_State(rows, model.config.vocab_size, seed) for seed in (0, 1)]
    for state in states:
        state.begin(rows, kv_cache, buffers)
        chain.run(count, pdl=False)
        torch.cuda.synchronize()
        state.expected = buffers.logits_BV.index_select(0, live)
        assert not state.expected.isnan().any()
    assert not torch.equal(states[0].expected, states[1].expected)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    hog = torch.randn(4 << 20, device=device)

    def two_steps() -> None:
        for state in states:
            state.begin(rows, kv_cache, buffers)
            chain.run(count, pdl=True)
            wrong.add_((buffers.logits_BV.index_select(0, live) != state.expected).any())

    with torch.cuda.stream(stream):
        two_steps()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            two_steps()
        rng = random.Random(count)
        for number in range(5_000):
            graph.replay()
            if number % 10 == 0:
                with torch.cuda.stream(other):
                    hog[: rng.randrange(1, len(hog))].mul_(1.0)
            if number % 250 == 0:
                stream.synchronize()
    torch.cuda.synchronize()
    assert int(wrong) == 0


class _State:
    """Positions, tokens and tables of all slots; `begin` sets them and poisons what the step has to write."""

    def __init__(self, rows: DecodeRows, vocab_size: int, seed: int) -> None:
        device, generator = rows.positions_S.device, torch.Generator().manual_seed(seed)
        order = torch.randperm(SLOTS, generator=generator).to(device)
        self._tables = rows.block_tables_SM[order].clone()
        self._positions = torch.randint(1, MAX_BLOCKS * BLOCK_SIZE - 1, (SLOTS,), generator=generator).int().to(device)
        self._tokens = torch.randint(0, vocab_size, (SLOTS,), generator=generator).to(device)
        positions = self._positions.long()
        blocks = self._tables.long()[torch.arange(SLOTS, device=device), positions // BLOCK_SIZE]
        self._newest = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        self.expected = torch.empty(0, device=device)

    def begin(self, rows: DecodeRows, kv_cache: Tensor, buffers: DecodeBuffers) -> None:
        rows.positions_S.copy_(self._positions)
        rows.last_token_S.copy_(self._tokens)
        rows.block_tables_SM.copy_(self._tables)
        kv_cache.flatten(2, 3).index_fill_(2, self._newest, float("nan"))
        inputs = buffers.inputs_of(SLOTS)
        for tensor in (inputs.x_BH, inputs.cos_sin_BD, buffers.q_BND, buffers.attended_BND, buffers.act_BI):
            tensor.fill_(float("nan"))
        for tensor in (buffers.normed_BH, buffers.partial_floats, buffers.attention_floats, buffers.logits_BV):
            tensor.fill_(float("nan"))
        inputs.context_lens_B.fill_(1)
        inputs.kv_slots_B.fill_(0)
