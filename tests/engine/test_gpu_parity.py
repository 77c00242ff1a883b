"""Models of full size in bfloat16 on a GPU: how far our logits are from a float32 run, beside transformers' own."""

import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.peer import transformers_model
from engine.cuda.prefill import Prefill, PrefillInputs, PrefillShape
from engine.model.config import load_model_config
from engine.model.decode_chain import DecodeBuffers, DecodeChain
from engine.model.random_weights import random_weights
from engine.model.rope import cos_sin_table
from engine.model.transformer import Transformer, Weights, pack_weights
from kernels.reference.step import DecodeRows
from scripts.make_shape_model import write_shape

PROMPTS, LENGTH, BLOCK_SIZE = 80, 48, 16
# Of transformers' own distance in bfloat16 from float32.
ALLOWED = 1.5


@pytest.fixture(scope="module", params=["qwen2.5-0.5b", "qwen2.5-1.5b"])
def case(request: pytest.FixtureRequest, device: str) -> Iterator[SimpleNamespace]:
    """Weights, token ids [PROMPTS, LENGTH], and transformers' logits of every position in float32 and in bfloat16."""
    if device == "cpu":
        pytest.skip("models of full size are for a GPU")
    with tempfile.TemporaryDirectory() as name:
        directory = write_shape(Path(name), request.param)
        config = load_model_config(directory)
        weights, _ = random_weights(directory, config, 0, torch.bfloat16, torch.device(device), False)
        token_ids = torch.randint(3, config.vocab_size, (PROMPTS, LENGTH), device=device)
        with torch.inference_mode():
            half = transformers_model(directory, weights)(token_ids).logits[:, -1].float()
            full = transformers_model(directory, _float32(weights))(token_ids).logits[:, -1]
        yield SimpleNamespace(config=config, weights=weights, token_ids=token_ids, half=half, full=full)
    torch.cuda.empty_cache()


def _float32(weights: Weights) -> Weights:
    """The same values, wider."""
    wide = pack_weights(weights, lambda matrix: matrix.float())
    layers = tuple(
        replace(
            layer,
            **{
                field.name: tensor.float()
                for field in fields(layer)
                if (tensor := getattr(layer, field.name)) is not None
            },
        )
        for layer in wide.layers
    )
    embedding = weights.embedding_VH.float()
    head = embedding if weights.head_VH is weights.embedding_VH else wide.head_VH
    return Weights(embedding, layers, weights.final_norm_H.float(), head)


def error(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def state_of(case: SimpleNamespace) -> tuple[Tensor, DecodeRows, Tensor]:
    """KV cache (NaN all over), rows with a slot and blocks for each prompt, rotary table."""
    config, device = case.config, case.token_ids.device
    blocks_each = -(-LENGTH // BLOCK_SIZE)
    shape = (config.num_layers, 2, PROMPTS * blocks_each, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    rows = DecodeRows(
        row_slots_B=torch.arange(PROMPTS, dtype=torch.int32, device=device),
        positions_S=torch.full((PROMPTS,), LENGTH - 1, dtype=torch.int32, device=device),
        block_tables_SM=torch.randperm(PROMPTS * blocks_each, device=device).int().view(PROMPTS, blocks_each),
        last_token_S=case.token_ids[:, -1].clone(),
        block_size=BLOCK_SIZE,
    )
    return kv_cache, rows, cos_sin_table(config, LENGTH).to(device)


def prefill(case: SimpleNamespace, kv_cache: Tensor, rows: DecodeRows, cos_sin: Tensor, length: int) -> Tensor:
    """Logits after the first ``length`` tokens of every prompt, all prompts as one batch of chunks."""
    device = case.token_ids.device
    shape = PrefillShape(PROMPTS * length, PROMPTS, PROMPTS)
    positions = torch.arange(length, device=device)
    blocks = rows.block_tables_SM.long()[:, positions // BLOCK_SIZE]
    inputs = PrefillInputs.of(torch.zeros(sum(shape.sections()), dtype=torch.int64, device=device), shape)
    inputs.token_ids_T.copy_(case.token_ids[:, :length].flatten())
    inputs.positions_T.copy_(positions.repeat(PROMPTS))
    inputs.kv_slots_T.copy_((blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten())
    inputs.query_starts.copy_(torch.arange(PROMPTS + 2, device=device) * length)
    inputs.context_lens_B.fill_(length)
    inputs.slots_B.copy_(torch.arange(PROMPTS, device=device))
    inputs.last_rows_B.copy_(torch.arange(1, PROMPTS + 1, device=device) * length - 1)
    model = Transformer(case.config, case.weights)
    return Prefill(model, kv_cache, rows, cos_sin).forward(inputs)[1]


@torch.inference_mode()
def test_prefill_is_as_near_to_float32_as_transformers(case: SimpleNamespace) -> None:
    ours = prefill(case, *state_of(case), LENGTH)
    mine, theirs = error(ours, case.full), error(case.half, case.full)
    print(f"prefill: ours {mine:.2e}, transformers {theirs:.2e}")
    assert 1e-4 < theirs < 0.2, "the comparison means nothing"
    assert mine <= ALLOWED * theirs


@pytest.mark.parametrize("batch", [1, 8, 33, PROMPTS])
@torch.inference_mode()
def test_decode_is_as_near_to_float32_as_transformers(case: SimpleNamespace, batch: int) -> None:
    """The last token as a decode step, in each of the chain's forms, with dependent launch where it is used."""
    kv_cache, rows, cos_sin = state_of(case)
    prefill(case, kv_cache, rows, cos_sin, LENGTH - 1)
    buffers = DecodeBuffers(Transformer(case.config, case.weights), PROMPTS)
    chain = DecodeChain(Transformer(case.config, case.weights), kv_cache, rows, cos_sin, buffers)
    chain.run(batch, pdl=batch <= 64)
    mine = error(buffers.logits_BV[:batch], case.full[:batch])
    theirs = error(case.half[:batch], case.full[:batch])
    print(f"decode of {batch}: ours {mine:.2e}, transformers {theirs:.2e}")
    assert mine <= ALLOWED * theirs
