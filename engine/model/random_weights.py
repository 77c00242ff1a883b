"""Random weights for a model directory that has none: a model of any shape, made on the device itself.

For measurements and tests. Values are normal, never constant: a GPU draws less power, and clocks higher, on zeros.
Every projection keeps the size of its input (standard deviation 1 / sqrt(inputs), 0.0255 for 1,536 inputs), so that
activations stay near 1 at any depth. Queries and keys are twice as large: with even ones attention is so flat that all
tokens' states become alike and a greedy run repeats one token; so every KV block matters to what comes next (measured
at 24 layers: cosine between the states of two positions 0.71 with even ones and 0.34 so; 20 and 46 different
tokens of 48).
"""

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.loader import Checkpoint, _Reader
from engine.model.transformer import Weights

EMBEDDING_STD = 0.02
NORM_STD = 0.1
BIAS_STD = 0.1
QUERY_KEY_GAIN = 2.0
WEIGHT_FILES = "*.safetensors*"


def random_weights(
    directory: Path, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device, show_progress: bool
) -> tuple[Weights, str]:
    """Weights on ``device`` in the structure that `load_weights` returns, and the model's fingerprint.

    A tensor depends on its Hugging Face name, the seed and the kind of device, not on the dtype: it is drawn in
    float32 and rounded. Raises `ModelError` when the directory holds weights: a served model is never random by a
    slip of an option.
    """
    if found := sorted(directory.glob(WEIGHT_FILES)):
        raise ModelError(f"{directory} holds {found[0].name}: random weights are for a directory without weights")
    reader = _Reader(_RandomTensors(seed, dtype, device), config, dtype, device)
    numbers = range(config.num_layers)
    with tqdm(numbers, desc="making layers", unit="layer", disable=not show_progress) as bar:
        layers = tuple(reader.layer(index) for index in bar)
    embedding = reader.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    weights = Weights(
        embedding_VH=embedding,
        layers=layers,
        final_norm_H=reader.get("model.norm.weight", config.hidden_size),
        head_VH=reader.head(embedding),
    )
    return weights, _fingerprint(directory, seed, device)


class _RandomTensors(Checkpoint):
    """Stands in for the files: every tensor that is asked for is there, in the shape that is asked for."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed, self._dtype, self._device = seed, dtype, device

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(_tensor_seed(self._seed, name))
        values = torch.randn(shape, generator=generator, device=self._device)
        mean, std = _distribution(name, shape)
        return values.mul_(std).add_(mean).to(self._dtype)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return QUERY_KEY_GAIN, NORM_STD
    if name.endswith("norm.weight"):
        return 1.0, NORM_STD
    if name.endswith(".bias"):
        return 0.0, BIAS_STD
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0.0, EMBEDDING_STD
    gain = QUERY_KEY_GAIN if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    return 0.0, gain / math.sqrt(shape[1])


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}|{name}".encode()).digest()[:8], "little") >> 1


def _fingerprint(directory: Path, seed: int, device: torch.device) -> str:
    """SHA-256 over config.json, seed and kind of device: another kind draws other numbers."""
    content = (directory / "config.json").read_bytes()
    return hashlib.sha256(content + f"|random|{seed}|{device.type}".encode()).hexdigest()
