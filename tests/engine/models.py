"""Small random models made through transformers, and reference runs of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_model(directory: Path, kind: str, seed: int = 0, shard_size: str = "1GB", **overrides: Any) -> Path:
    """A random float32 model with weights of a size that keeps activations and logits near 1."""
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    merged = settings | overrides
    merged.setdefault("initializer_range", merged["hidden_size"] ** -0.5)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**merged), dtype=torch.float32)
    randomise_one_dimensional(model)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return directory


def randomise_one_dimensional(model: torch.nn.Module) -> None:
    """Norm weights start as ones and biases as zeros: a test with those would not notice that they are ignored."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval()
