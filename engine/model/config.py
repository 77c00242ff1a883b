"""ModelConfig: what config.json says, checked. Anything we do not compute exactly is refused by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROPE_TYPES = tuple(ROPE_REQUIRED)
YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
ROPE_NUMBERS = frozenset((*ROPE_REQUIRED["llama3"], *YARN_OPTIONS))


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``kind`` is one of ROPE_TYPES; ``parameters`` are that kind's own (factor, beta_fast, ...)."""

    kind: str
    theta: float
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. ``dtype`` is the checkpoint's, as written."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; `ModelError` names the file when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def load_model_config(directory: Path) -> ModelConfig:
    """Parse ``config.json``. Raises `ModelError` for anything missing, unknown or unsupported."""
    path = directory / "config.json"
    raw = read_json(path)
    architectures = raw.get("architectures") or [None]
    if not isinstance(architectures, list):
        raise ModelError(f"{path}: architectures must be a list, got {architectures!r}")
    architecture = architectures[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {architecture!r} is not served; known: {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(path, raw)
    num_heads = _positive(path, raw, "num_attention_heads")
    num_kv_heads = _positive(path, raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_heads
    hidden_size = _positive(path, raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise ModelError(f"{path}: {num_heads} query heads do not divide into {num_kv_heads} KV heads")
    attention_bias = architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(path, raw, "intermediate_size"),
        num_layers=_positive(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(path, raw, architecture, hidden_size, num_heads),
        norm_eps=_number(path, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive(path, raw, "max_position_embeddings"),
        rope=_rope_config(path, raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    unsupported = [
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act {raw.get('hidden_act')!r}"),
        (raw.get("quantization_config") is not None, "quantization_config"),
        (bool(raw.get("use_sliding_window", False)), "use_sliding_window"),
        (raw.get("partial_rotary_factor", 1.0) not in (None, 1.0), "partial_rotary_factor"),
        ("sliding_attention" in (raw.get("layer_types") or []), "layer_types with sliding_attention"),
    ]
    for found, what in unsupported:
        if found:
            raise ModelError(f"{path}: {what} is not supported")


def _head_dim(path: Path, raw: dict[str, Any], architecture: str, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim"):
        head_dim = _positive(path, raw, "head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = 128
    elif hidden_size % num_heads:
        raise ModelError(f"{path}: head_dim is not given and hidden_size {hidden_size} does not divide by {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{path}: head_dim {head_dim} must be even")
    return head_dim


def _positive(path: Path, raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _number(path: Path, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{path}: {name} must be a number, got {value!r}")
    return float(value)


def _rope_config(path: Path, raw: dict[str, Any]) -> RopeConfig:
    """RoPE settings in either spelling: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling``."""
    scaling, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if scaling and older and scaling != older:
        raise ModelError(f"{path}: rope_parameters and rope_scaling are both set and differ; keep one")
    scaling = scaling or older
    if not isinstance(scaling, dict):
        raise ModelError(f"{path}: rope settings must be an object, got {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    theta = _number(path, "rope_theta", scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    # A setting that is null is one that is not given.
    parameters = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    for name in ROPE_REQUIRED[kind]:
        if name not in parameters:
            raise ModelError(f"{path}: rope scaling {kind!r} needs {name}")
    for name in ROPE_NUMBERS & parameters.keys():
        _number(path, name, parameters[name])
    return RopeConfig(kind=kind, theta=theta, parameters=parameters)
