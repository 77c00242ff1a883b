"""Random weights: what files would have given, the same for a seed, of a size that computes, and never by accident."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.peer import state_dict, transformers_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelError
from engine.model.config import load_model_config
from engine.model.loader import load_weights
from engine.model.random_weights import random_weights
from engine.model.transformer import Weights
from engine.naive import RecomputeDecoder
from engine.sampling_params import SamplingParams
from scripts.make_shape_model import SHAPES, write_shape

pytestmark = pytest.mark.usefixtures("one_thread")

# The architectures, at a size for tests.
SMALL: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {"hidden_size": 56, "num_attention_heads": 14},
    "qwen2.5-7b": {"hidden_size": 64, "num_attention_heads": 7, "num_key_value_heads": 1},
    "llama-3.2-1b": {"hidden_size": 64, "num_attention_heads": 8},
    "qwen3-0.6b": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4},
    "smollm2-135m": {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3},
}
SIZES = {"head_dim": 16, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 300, "dtype": "float32"}


@pytest.fixture(params=SMALL, ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_shape(tmp_path, request.param, **(SIZES | SMALL[request.param]))


def make(directory: Path, seed: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Weights:
    config = load_model_config(directory)
    return random_weights(directory, config, seed, dtype, torch.device(device), show_progress=False)[0]


def tensors_of(directory: Path, weights: Weights) -> dict[str, Tensor]:
    return state_dict(load_model_config(directory), weights)


def test_they_are_what_the_loader_would_have_read(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make(model)
    copy = Path(shutil.copytree(model, tmp_path_factory.mktemp("saved") / "model"))
    config = load_model_config(model)
    tensors = {name: tensor.clone() for name, tensor in tensors_of(model, made).items()}
    save_file(tensors, copy / "model.safetensors")
    read, _ = load_weights(copy, config, torch.float32, torch.device("cpu"), show_progress=False)
    for name, tensor in tensors_of(copy, read).items():
        assert torch.equal(tensor, tensors[name]), name
    assert (read.head_VH is read.embedding_VH) == (made.head_VH is made.embedding_VH) == config.tied_embeddings
    assert [layer.qkv.shape for layer in read.layers] == [layer.qkv.shape for layer in made.layers]


def test_one_seed_is_one_model(model: Path, device: str) -> None:
    first, again, other = (tensors_of(model, make(model, seed, device)) for seed in (5, 5, 6))
    for name, tensor in first.items():
        assert tensor.device.type == device
        assert torch.equal(tensor, again[name]), name
        assert not torch.equal(tensor, other[name]), name
    layers = [name for name in first if ".layers.0." in name]
    assert not any(torch.equal(first[n], first[n.replace(".0.", ".1.", 1)]) for n in layers)


def test_another_dtype_is_the_same_model_rounded(model: Path, device: str) -> None:
    exact, rounded = (tensors_of(model, make(model, 1, device, d)) for d in (torch.float32, torch.bfloat16))
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in exact.items())


def test_the_fingerprint_tells_seed_and_shape(tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int, **overrides: Any) -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        write_shape(directory, "nano", vocab_size=300, **overrides)
        config = EngineConfig(model=str(directory), random_weights=seed, num_gpu_blocks=4)
        return Engine(config).info.fingerprint

    assert fingerprint("a", 1) == fingerprint("b", 1)
    assert len({fingerprint("a", 1), fingerprint("a", 2), fingerprint("c", 1, rms_norm_eps=1e-5)}) == 3


def test_logits_are_those_of_transformers_over_the_same_weights(model: Path, device: str) -> None:
    weights = make(model, device=device)
    peer = transformers_model(model, weights)
    parameters = dict(peer.named_parameters())
    assert parameters["model.embed_tokens.weight"].data_ptr() == weights.embedding_VH.data_ptr(), "nothing is copied"
    assert parameters["model.layers.1.self_attn.q_proj.weight"].data_ptr() == weights.layers[1].qkv.data_ptr()
    prompt = list(range(7, 47))
    with torch.inference_mode():
        theirs = peer(torch.tensor([prompt], device=device)).logits[0, -1].float()
        ours, _ = RecomputeDecoder(load_model_config(model), weights)._model.forward(prompt, None)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_activations_stay_sane_and_a_greedy_run_is_no_repetition(model: Path, device: str) -> None:
    """Residual near 1, logits that tell tokens apart, and a text that depends on the prompt."""
    weights = make(model, device=device)
    decoder = RecomputeDecoder(load_model_config(model), weights)
    logits, hidden = decoder._model.forward(list(range(50)), None)
    assert 0.5 < float(hidden.std()) < 2
    assert 0.05 < float(logits.std()) < 1
    texts = [decoder.generate([*range(20), changed, *range(20)], 16) for changed in (100, 200)]
    assert sum(a == b for a, b in zip(*texts, strict=True)) < 8, "one early token decides what follows"
    assert all(len(set(text)) > 8 for text in texts)


def test_the_engine_runs_them(model: Path, device: str) -> None:
    config = EngineConfig(model=str(model), device=device, dtype="float32", num_gpu_blocks=16, random_weights=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = list(range(3, 40))
    (result,) = Engine(config).generate([prompt], params)
    expected = RecomputeDecoder(load_model_config(model), make(model, device=device)).generate(prompt, 8)
    assert result.token_ids == expected


def test_a_directory_with_weights_is_refused(tmp_path: Path) -> None:
    write_shape(tmp_path, "nano")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors.*without weights"):
        Engine(EngineConfig(model=str(tmp_path), random_weights=0))


def test_without_a_seed_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds neither"):
        Engine(EngineConfig(model=str(write_shape(tmp_path, "nano"))))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="random_weights"):
        EngineConfig(model="x", random_weights=seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_one_the_engine_serves(shape: str, tmp_path: Path) -> None:
    config = load_model_config(write_shape(tmp_path, shape))
    assert config.qkv_bias == (config.architecture == "Qwen2ForCausalLM")
    assert config.num_heads * config.head_dim in (config.hidden_size, 2 * config.hidden_size)


def test_the_shape_of_all_figures(tmp_path: Path) -> None:
    """docs: 3.087 GB are read per decode step (the embedding's one row apart), 28,672 bytes of KV per token."""
    config = load_model_config(write_shape(tmp_path, "qwen2.5-1.5b"))
    H, rows = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = rows * H + rows + H * H + 3 * H * config.intermediate_size + 2 * H
    parameters = config.num_layers * layer + config.vocab_size * H + H
    assert round(2 * parameters / 1e9, 3) == 3.087
    assert 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim == 28_672
