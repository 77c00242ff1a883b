"""Loading is total: whatever is missing, left over or out of shape is refused in one line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelError
from engine.sampling_params import SamplingParams
from tests.engine.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 128}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_model(tmp_path_factory.mktemp("model"), "llama", attention_bias=True, mlp_bias=True, **SMALL)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    return directory


@pytest.fixture(scope="module")
def sharded_original(tmp_path_factory: pytest.TempPathFactory, original: Path) -> Path:
    """The same model in several files."""
    directory = tmp_path_factory.mktemp("sharded")
    make_model(directory, "llama", shard_size="20KB", attention_bias=True, mlp_bias=True, **SMALL)
    shutil.copy(original / "tokenizer.json", directory)
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


@pytest.fixture
def model(tmp_path: Path, original: Path) -> Path:
    """A copy to be changed."""
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path, sharded_original: Path) -> Path:
    return shutil.copytree(sharded_original, tmp_path / "sharded")


def load(directory: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(directory), **({"num_gpu_blocks": 8} | options)))


def refused(directory: Path, *culprits: str, **options: Any) -> None:
    with pytest.raises(ModelError) as error:
        load(directory, **options)
    message = str(error.value)
    assert "\n" not in message, "one line"
    for culprit in culprits:
        assert culprit in message


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys; ``...`` removes one."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def greedy(engine: Engine) -> list[list[int]]:
    prompts = [[5, 6, 7], [100, 3]]
    return [r.token_ids for r in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=10))]


# -- files ------------------------------------------------------------------------------------------------------


def test_it_loads_as_it_is(model: Path) -> None:
    info = load(model).info
    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 16)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.limits.vocab_size == 128


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    refused(model, name)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_a_file_that_is_optional_here(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    load(model)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", b'{"a": 1}}'])
def test_broken_json_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    refused(model, name)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_weight_file_is_named(model: Path, kept: float) -> None:
    content = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(content[: int(len(content) * kept) if kept == 0.5 else int(kept)])
    refused(model, WEIGHTS)


# -- tensors ----------------------------------------------------------------------------------------------------


def test_every_missing_tensor_is_named(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    assert len(tensors) == 3 + 2 * (9 + 7)
    for name in tensors:
        save_file({other: tensors[other] for other in tensors if other != name}, model / WEIGHTS)
        refused(model, f"{name} is missing")


def test_every_tensor_of_another_shape_is_named_with_both_shapes(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    for name, tensor in tensors.items():
        wrong = torch.cat((tensor, tensor[:1]))
        save_file(tensors | {name: wrong}, model / WEIGHTS)
        refused(model, name, str(tuple(wrong.shape)), str(tuple(tensor.shape)))


def test_a_transposed_tensor_is_refused(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({DOWN: t[DOWN].T.contiguous()}))
    refused(model, DOWN)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_a_tensor_of_integers_is_refused(model: Path, dtype: torch.dtype) -> None:
    edit_tensors(model, lambda t: t.update({DOWN: t[DOWN].to(dtype)}))
    refused(model, DOWN, str(dtype))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.layers.0.self_attn.q_norm.weight", "x"])
def test_a_tensor_nobody_takes_is_named(model: Path, name: str) -> None:
    edit_tensors(model, lambda t: t.update({name: torch.zeros(3)}))
    refused(model, name)


def test_recomputed_buffers_of_old_checkpoints_are_no_leftovers(model: Path) -> None:
    expected = greedy(load(model))
    edit_tensors(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert greedy(load(model)) == expected


def test_tied_embeddings_need_no_head_and_refuse_another_one(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", tie_word_embeddings=True, **SMALL)
    expected = greedy(load(directory))
    embedding = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert greedy(load(directory)) == expected
    edit_tensors(directory, lambda t: t["lm_head.weight"][-1, -1].add_(1e-3))
    refused(directory, "lm_head.weight")


# -- shards -----------------------------------------------------------------------------------------------------


def test_a_sharded_model_is_the_single_one(model: Path, sharded: Path) -> None:
    single, several = load(model), load(sharded)
    assert greedy(single) == greedy(several)
    assert single.info.fingerprint == several.info.fingerprint


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, shard.name)


def test_a_tensor_in_two_shards_is_named_with_both(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    refused(sharded, name, first.name, second.name)


def test_a_tensor_the_shard_lacks_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({other: tensors[other] for other in tensors if other != name}, shard)
    refused(sharded, name)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../other/model.safetensors"}}',
    ],
)  # fmt: skip
def test_a_bad_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


# -- end and sampling defaults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([7, 9], 3, (7, 9)),
        (7, 3, (7,)),
        (..., 3, (3,)),
        (..., [3, 4], (3, 4)),
        (..., None, ()),
        (..., ..., ()),
    ],
    ids=str,
)
def test_eos_ids(model: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    edit_json(model / "generation_config.json", eos_token_id=generation)
    edit_json(model / "config.json", eos_token_id=config)
    assert load(model).info.eos_token_ids == expected


@pytest.mark.parametrize("bad", [128, -1, [3, 128], "</s>", 1.5, [[3]]])
def test_an_eos_id_outside_the_vocabulary_is_refused(model: Path, bad: Any) -> None:
    edit_json(model / "generation_config.json", eos_token_id=bad)
    refused(model, "eos_token_id")


def test_without_do_sample_the_default_is_greedy(model: Path) -> None:
    edit_json(model / "generation_config.json", temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert load(model).info.default_sampling == SamplingParams(temperature=0.0, repetition_penalty=1.1)
    (model / "generation_config.json").unlink()
    assert load(model).info.default_sampling == SamplingParams(temperature=0.0)


def test_sampling_defaults_of_the_models_authors(model: Path) -> None:
    settings: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    edit_json(model / "generation_config.json", do_sample=True, min_p=0.1, **settings)
    assert load(model).info.default_sampling == SamplingParams(min_p=0.1, **settings)
    edit_json(model / "generation_config.json", min_p=..., temperature=None, top_p=None, top_k=0)
    assert load(model).info.default_sampling == SamplingParams(repetition_penalty=1.05)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("bad", [-1.0, 11, "high", [1.0]])
def test_a_default_that_no_request_may_have_is_refused(model: Path, do_sample: bool, bad: Any) -> None:
    edit_json(model / "generation_config.json", do_sample=do_sample, repetition_penalty=bad)
    refused(model, "generation_config.json", "repetition_penalty")


# -- dtype ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_auto_is_the_checkpoints(model: Path, key: str, dtype: str) -> None:
    edit_json(model / "config.json", **({"dtype": ..., "torch_dtype": ...} | {key: dtype}))
    edit_tensors(model, lambda t: t.update({name: tensor.to(getattr(torch, dtype)) for name, tensor in t.items()}))
    engine = load(model)
    assert engine.info.dtype == dtype
    assert engine._runner.kv_cache.dtype == getattr(torch, dtype)
    assert load(model, dtype="float32").info.dtype == "float32"


def test_dtype_auto_of_an_unserved_one_is_refused(model: Path) -> None:
    edit_json(model / "config.json", dtype="float64")
    refused(model, "float64")
    load(model, dtype="float32")


def test_a_context_above_the_models_is_refused(model: Path) -> None:
    assert load(model, max_model_len=100).info.limits.max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len 513.*512"):
        load(model, max_model_len=513)


def test_a_top_k_that_is_no_whole_number_is_refused_and_not_cut(model: Path) -> None:
    edit_json(model / "generation_config.json", do_sample=True, top_k=20.7)
    with pytest.raises(ModelError, match=r"top_k must be a whole number, got 20\.7"):
        load(model)
