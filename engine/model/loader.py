"""Total weight loading from safetensors: every tensor consumed, shape and dtype checked, gaps and leftovers named."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.errors import ModelError
from engine.model.config import ModelConfig, read_json
from engine.model.transformer import LayerWeights, Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Buffers that old checkpoints carry and that are recomputed from the config.
RECOMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
FINGERPRINT_OFFSETS = 8
FINGERPRINT_BYTES = 4096


class Checkpoint:
    """The tensors of a model directory, sharded or single. Every tensor can be taken once."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._files: dict[str, object] = {}
        self._where: dict[str, str] = {}
        for file_name in _weight_files(directory):
            handle = _open(directory / file_name, stack)
            self._files[file_name] = handle
            for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in self._where:
                    raise ModelError(f"{directory}: tensor {name} is in {self._where[name]} and in {file_name}")
                self._where[name] = file_name
        self._left = {name for name in self._where if not name.endswith(RECOMPUTED_SUFFIXES)}

    def names(self) -> list[str]:
        return sorted(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``; raises `ModelError` when it is missing, of another shape, or not floating point."""
        if name not in self._left:
            raise ModelError(f"{self._directory}: tensor {name} is missing")
        self._left.remove(name)
        tensor = self.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._directory}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if not tensor.is_floating_point():
            raise ModelError(f"{self._directory}: tensor {name} has dtype {tensor.dtype}, expected a float type")
        return tensor

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)  # type: ignore[attr-defined]
        return tensor

    def check_consumed(self) -> None:
        """Raise `ModelError` naming tensors nobody took."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise ModelError(f"{self._directory}: {len(self._left)} tensors are not part of this architecture: {names}")


def load_weights(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, show_progress: bool
) -> tuple[Weights, str]:
    """All weights on ``device`` in ``dtype``, and the model's fingerprint. Raises `ModelError`."""
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(directory, stack)
        reader = _Reader(checkpoint, config, dtype, device)
        numbers = range(config.num_layers)
        with tqdm(numbers, desc="loading layers", unit="layer", disable=not show_progress) as bar:  # ends its line
            layers = tuple(reader.layer(index) for index in bar)
        embedding = reader.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        weights = Weights(
            embedding_VH=embedding,
            layers=layers,
            final_norm_H=reader.get("model.norm.weight", config.hidden_size),
            head_VH=reader.head(embedding),
        )
        checkpoint.check_consumed()
        return weights, _fingerprint(directory, checkpoint)


class _Reader:
    """Takes tensors from a checkpoint in the model's own layout, fusing what is read together."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._config, self._dtype, self._device = checkpoint, config, dtype, device

    def get(self, name: str, *shape: int) -> Tensor:
        # First to the device, as it is: a conversion is cheaper there.
        return self._checkpoint.take(name, shape).to(self._device).to(self._dtype)

    def head(self, embedding: Tensor) -> Tensor:
        name, shape = "lm_head.weight", (self._config.vocab_size, self._config.hidden_size)
        if not self._config.tied_embeddings:
            return self.get(name, *shape)
        if name in self._checkpoint and not torch.equal(self.get(name, *shape), embedding):
            raise ModelError("config.json ties the embeddings, but lm_head.weight differs from embed_tokens.weight")
        return embedding

    def layer(self, index: int) -> LayerWeights:
        c = self._config
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = ((attention + "q_proj", q_size), (attention + "k_proj", kv_size), (attention + "v_proj", kv_size))
        gate_up = ((mlp + "gate_proj", c.intermediate_size), (mlp + "up_proj", c.intermediate_size))
        return LayerWeights(
            input_norm_H=self.get(prefix + "input_layernorm.weight", c.hidden_size),
            qkv=self._stack(qkv, c.hidden_size),
            qkv_bias=self._stack_bias(qkv) if c.qkv_bias else None,
            q_norm_D=self.get(attention + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm_D=self.get(attention + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            o=self.get(attention + "o_proj.weight", c.hidden_size, q_size),
            o_bias=self.get(attention + "o_proj.bias", c.hidden_size) if c.o_bias else None,
            post_norm_H=self.get(prefix + "post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._stack(gate_up, c.hidden_size),
            gate_up_bias=self._stack_bias(gate_up) if c.mlp_bias else None,
            down=self.get(mlp + "down_proj.weight", c.hidden_size, c.intermediate_size),
            down_bias=self.get(mlp + "down_proj.bias", c.hidden_size) if c.mlp_bias else None,
        )

    def _stack(self, parts: tuple[tuple[str, int], ...], width: int) -> Tensor:
        return torch.cat([self.get(f"{name}.weight", rows, width) for name, rows in parts])

    def _stack_bias(self, parts: tuple[tuple[str, int], ...]) -> Tensor:
        return torch.cat([self.get(f"{name}.bias", rows) for name, rows in parts])


def _weight_files(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: weight_map must name a file for every tensor")
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ModelError(f"{index}: {outside[0]!r} is not the name of a file in this directory")
        return names
    if (directory / "model.safetensors").exists():
        return ["model.safetensors"]
    raise ModelError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json")


def _open(path: Path, stack: contextlib.ExitStack) -> "safe_open":
    if not path.exists():
        raise ModelError(f"{path} does not exist, but the index names it")
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from None


def _fingerprint(directory: Path, checkpoint: Checkpoint) -> str:
    """SHA-256 over config.json, tokenizer.json and, per tensor, name, dtype, shape and samples of its bytes."""
    digest = hashlib.sha256()
    for file_name in ("config.json", "tokenizer.json"):
        path = directory / file_name
        digest.update(path.read_bytes() if path.exists() else b"")
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: Tensor) -> Iterator[bytes]:
    """4 KiB at 8 evenly spaced offsets of the tensor's bytes."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    for i in range(FINGERPRINT_OFFSETS):
        start = i * data.numel() // FINGERPRINT_OFFSETS
        yield data[start : start + FINGERPRINT_BYTES].numpy().tobytes()
