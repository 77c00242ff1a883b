"""What config.json may say, the fingerprint, and engines side by side."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.model.config import load_model_config
from engine.outputs import TokenOutput
from engine.sampling_params import SamplingParams
from tests.engine.models import make_model

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 128}
TORCH_FREE = ["scheduler", "block_manager", "waiting", "lifecycle", "plan", "request", "outputs", "limits", "config"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_model(tmp_path_factory.mktemp("model"), "llama", **SMALL)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    return directory


@pytest.fixture
def model(tmp_path: Path, original: Path) -> Path:
    """A copy to be changed."""
    return shutil.copytree(original, tmp_path / "model")


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys; ``...`` removes one."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": []}, "architecture None"),
    ({"architectures": ...}, "architecture None"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"architectures": 5}, "architectures"),
    (rope("longrope", factor=4.0), "longrope"),
    (rope("dynamic", factor=4.0), "dynamic"),
    (rope("linear"), "factor"),
    (rope("linear", factor="four"), "factor"),
    (rope("yarn", factor=4.0, beta_fast="x"), "beta_fast"),
    (rope("llama3", **{**LLAMA3, "factor": None}), "factor"),
    (rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), "original_max_position_embeddings"),
    ({"rope_parameters": ..., "rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
    ({"rope_parameters": "linear"}, "rope"),
    (rope("linear", factor=4.0) | {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling are both set"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "rope_theta"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"num_key_value_heads": 3}, "3 KV heads"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"hidden_size": ...}, "hidden_size"),
    ({"hidden_size": 32.5}, "hidden_size"),
    ({"vocab_size": "128"}, "vocab_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"head_dim": 15}, "head_dim"),
    ({"head_dim": ..., "num_attention_heads": 6}, "head_dim"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"max_position_embeddings": -1}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "culprit"), REFUSED, ids=lambda value: json.dumps(value, default=str)[:60])
def test_a_config_we_do_not_serve_is_refused_by_name(model: Path, changes: dict[str, Any], culprit: str) -> None:
    edit_config(model, **changes)
    with pytest.raises(ModelError) as error:
        load_model_config(model)
    message = str(error.value)
    assert "\n" not in message
    assert culprit in message
    assert "config.json" in message


@pytest.mark.parametrize(
    "changes",
    [
        rope("linear", factor=4),
        rope("llama3", **LLAMA3),
        rope("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=None, truncate=False),
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500},
        {"rope_parameters": ..., "rope_scaling": None},
        {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    ],
    ids=lambda value: json.dumps(value, default=str)[:60],
)
def test_a_config_we_serve(model: Path, changes: dict[str, Any]) -> None:
    edit_config(model, **changes)
    assert load_model_config(model).num_layers == 2
    Engine(EngineConfig(model=str(model), num_gpu_blocks=4)).generate([[5]], SamplingParams(max_tokens=2))


# -- fingerprint ------------------------------------------------------------------------------------------------


def fingerprint(directory: Path, **options: Any) -> str:
    return Engine(EngineConfig(model=str(directory), num_gpu_blocks=4, **options)).info.fingerprint


def test_the_fingerprint_is_of_the_content(model: Path, original: Path) -> None:
    assert fingerprint(model) == fingerprint(original)
    assert len(fingerprint(model)) == 64
    assert fingerprint(model, dtype="bfloat16", block_size=8) == fingerprint(original)


def test_the_fingerprint_sees_every_tensor_config_and_tokenizer(model: Path) -> None:
    """A changed weight at each of the first and the last sampled places of every tensor."""
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    seen = {fingerprint(model)}
    for name, tensor in tensors.items():
        for place in (0, 7 * tensor.numel() // 8):
            changed = tensor.clone()
            changed.flatten()[place] += 0.25
            save_file(tensors | {name: changed}, weights, metadata={"format": "pt"})
            seen.add(fingerprint(model))
    save_file(tensors, weights, metadata={"format": "pt"})
    assert fingerprint(model) in seen
    assert len(seen) == 1 + 2 * len(tensors)
    (model / "tokenizer.json").write_text('{"model": {"a": 1}}')
    seen.add(fingerprint(model))
    edit_config(model, rms_norm_eps=1e-5)
    seen.add(fingerprint(model))
    assert len(seen) == 3 + 2 * len(tensors)


def test_the_fingerprint_samples_eight_places_of_a_large_tensor(model: Path) -> None:
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    large = torch.zeros(40_000, 32)
    edit_config(model, vocab_size=40_000)
    tensors |= {"model.embed_tokens.weight": large, "lm_head.weight": large.clone()}
    seen = set()
    places = [i * large.numel() // 8 + offset for i in range(8) for offset in (0, 1023)]
    for place in [None, *places]:
        changed = large.clone()
        if place is not None:
            changed.flatten()[place] = 1.0
        save_file(tensors | {"lm_head.weight": changed}, weights, metadata={"format": "pt"})
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(places)


# -- engines side by side ---------------------------------------------------------------------------------------


def test_two_engines_interleaved_give_what_each_gives_alone(tmp_path: Path) -> None:
    """Other architecture, shape, block size, depth and seed: nothing is shared."""
    one = make_model(tmp_path / "one", "qwen2", **(SMALL | {"hidden_size": 64}))
    other = make_model(tmp_path / "other", "qwen3", seed=1, **SMALL)
    options: list[dict[str, Any]] = [
        {"model": str(one), "block_size": 8, "num_gpu_blocks": 12},
        {"model": str(other), "block_size": 16, "num_gpu_blocks": 8, "pipeline_depth": 2, "max_num_batched_tokens": 64},
    ]
    params = SamplingParams(seed=3, n=2, max_tokens=20, repetition_penalty=1.2, top_p=0.9, ignore_eos=True)
    prompts = [[5 + i] * (3 * i + 1) for i in range(5)]

    def run(engines: list[Engine]) -> list[list[tuple[str, int, int]]]:
        for engine in engines:
            for i, prompt in enumerate(prompts):
                engine.add(str(i), prompt, params)
        tokens: list[list[tuple[str, int, int]]] = [[] for _ in engines]
        while any(engine.has_work() for engine in engines):
            for mine, engine in zip(tokens, engines, strict=True):
                for event in engine.step().events:
                    if isinstance(event, TokenOutput):
                        mine.append((event.request_id, event.output_index, event.token_id))
        return tokens

    alone = [run([Engine(EngineConfig(**each))])[0] for each in options]
    assert run([Engine(EngineConfig(**each)) for each in options]) == alone
    assert [len(tokens) for tokens in alone] == [5 * 2 * 20] * 2


@pytest.mark.parametrize("module", TORCH_FREE)
def test_planning_imports_no_torch(module: str) -> None:
    code = f"import sys, engine.{module}; print([m for m in ('torch', 'numpy', 'grpc') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
