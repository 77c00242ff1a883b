"""Make models/tiny, a random Llama for tests that are about serving and not about text.

Its embeddings are not tied: with tied ones such a model repeats one token, whatever is in its KV cache. Its query
and key weights are larger than the others: with equal ones attention is uniform, and V may be shuffled unnoticed.
Weights come from a fixed seed, tensor by tensor in the order of their names. The tokenizer is the default model's.
Does nothing when the directory was made by this recipe.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.model_files import MODELS, TOKENIZER_FILES, new_directory, write_json

TARGET = MODELS / "tiny"
DONOR = MODELS / "smollm2"
SEED = 20_250_101
STD = 0.02
QUERY_KEY_STD = 0.25
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 128, 4, 2, 16, 49_152


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": STD,
        "query_key_initializer_range": QUERY_KEY_STD,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 16_384,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by its Hugging Face name."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    outer: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    return outer | {
        f"model.layers.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()
    }


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * std(name)
        for name, shape in sorted(shapes().items())
    }


def std(name: str) -> float:
    return QUERY_KEY_STD if "q_proj" in name or "k_proj" in name else STD


def build(target: Path) -> None:
    save_file(weights(), target / "model.safetensors", metadata={"format": "pt"})
    write_json(target / "config.json", config())
    write_json(target / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    for name in TOKENIZER_FILES:
        shutil.copyfile(DONOR / name, target / name)


def is_current(target: Path) -> bool:
    """Whether ``target`` holds what this recipe makes."""
    path = target / "config.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8")) == config()


def main() -> int:
    if not is_current(TARGET):
        if not (DONOR / "tokenizer.json").exists():
            raise SystemExit(f"{DONOR} is missing: run `make models`, or scripts.fetch_model first")
        shutil.rmtree(TARGET, ignore_errors=True)
        with new_directory(TARGET) as draft:
            build(draft)
    print(f"tiny model: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
