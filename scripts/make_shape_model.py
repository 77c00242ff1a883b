"""Make a model directory of a known shape, without weights: for `picovllm-serve --random-weights` and the benchmarks.

    python -m scripts.make_shape_model --shape qwen2.5-1.5b --output models/qwen2.5-1.5b

Writes config.json, generation_config.json and the default model's tokenizer, filled up with made-up words to the size
of the vocabulary: any id adds something to a text, as it does with the shape's own tokenizer.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts.model_files import MODELS, TOKENIZER_FILES, new_directory, write_json

DONOR = MODELS / "smollm2"
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "use_sliding_window": False,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


# As the published config.json of each says; nano is ours, for dry runs on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "nano": QWEN2 | _sizes(64, 2, 4, 2, 16, 128, 49_152, tied=True) | {"dtype": "float32"},
    "smollm2-135m": LLAMA
    | _sizes(576, 30, 9, 3, 64, 1536, 49_152, tied=True)
    | {"max_position_embeddings": 8192, "rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"}},
    "qwen2.5-0.5b": QWEN2 | _sizes(896, 24, 14, 2, 64, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": QWEN2 | _sizes(1536, 28, 12, 2, 128, 8960, 151_936, tied=True),
    "qwen2.5-7b": QWEN2 | _sizes(3584, 28, 28, 4, 128, 18_944, 152_064, tied=False),
    "llama-3.2-1b": LLAMA
    | _sizes(2048, 16, 32, 8, 64, 8192, 128_256, tied=True)
    | {"max_position_embeddings": 131_072, "rope_parameters": LLAMA3_ROPE},
    "qwen3-0.6b": {
        **QWEN2,
        **_sizes(1024, 28, 16, 8, 128, 3072, 151_936, tied=True),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "max_position_embeddings": 40_960,
    },
}
COMMON: dict[str, Any] = {"bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "hidden_act": "silu"}


def write_shape(directory: Path, shape: str, **overrides: Any) -> Path:
    """Write the two configuration files of ``shape`` into ``directory``: all that the engine needs."""
    write_json(directory / "config.json", COMMON | SHAPES[shape] | overrides)
    write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2]})
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """The donor's files; the ids it lacks are words like " w50000", which no text is encoded to."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(DONOR / name, directory / name)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    space = "\u0120"  # as the tokenizer writes it
    vocabulary.update({f"{space}w{token_id}": token_id for token_id in range(len(vocabulary), vocab_size)})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--output", required=True, type=Path, help="a directory that does not exist yet")
    args = parser.parse_args()
    if args.output.exists():
        raise SystemExit(f"{args.output} exists already")
    if not (DONOR / "tokenizer.json").exists():
        raise SystemExit(f"{DONOR} is missing: run `make models`, or scripts.fetch_model first")
    with new_directory(args.output) as draft:
        write_shape(draft, args.shape)
        write_tokenizer(draft, SHAPES[args.shape]["vocab_size"])
    print(f"{args.shape}: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
