"""transformers over the very weights of the engine: the peer of a benchmark and the oracle of its logits."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from engine.model.config import ModelConfig, load_model_config
from engine.model.transformer import LayerWeights, Weights


def transformers_model(directory: Path, weights: Weights, attention: str = "sdpa") -> Any:
    """The model of ``directory``'s config.json with ``weights`` (as loaded, not packed), on their device.

    Reads no weight file and copies nothing: the parameters are views of the engine's fused tensors.
    ``attention`` is transformers' ``attn_implementation``.
    """
    embedding = weights.embedding_VH
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=embedding.dtype, attn_implementation=attention
        )
    model.load_state_dict(state_dict(load_model_config(directory), weights), strict=True, assign=True)
    model.tie_weights()
    # Not a parameter: computed when made, so it has to be made again where the weights are.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(embedding.device)
    return model.eval()


def state_dict(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Every tensor by its Hugging Face name; the head, too, when it is the embedding."""
    tensors = {
        "model.embed_tokens.weight": weights.embedding_VH,
        "model.norm.weight": weights.final_norm_H,
        "lm_head.weight": weights.head_VH,
    }
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer).items():
            if tensor is not None:
                tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(config: ModelConfig, layer: LayerWeights) -> dict[str, Tensor | None]:
    heads = (config.num_heads * config.head_dim, *(2 * (config.num_kv_heads * config.head_dim,)))
    halves = (config.intermediate_size,) * 2
    attention, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    tensors: dict[str, Tensor | None] = {
        "input_layernorm.weight": layer.input_norm_H,
        "post_attention_layernorm.weight": layer.post_norm_H,
        "self_attn.q_norm.weight": layer.q_norm_D,
        "self_attn.k_norm.weight": layer.k_norm_D,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for block, names, sizes, matrix, bias in (
        ("self_attn", attention, heads, layer.qkv, layer.qkv_bias),
        ("mlp", mlp, halves, layer.gate_up, layer.gate_up_bias),
    ):
        tensors |= {f"{block}.{n}.weight": part for n, part in zip(names, matrix.split(sizes), strict=True)}
        if bias is not None:
            tensors |= {f"{block}.{n}.bias": part for n, part in zip(names, bias.split(sizes), strict=True)}
    return tensors


class PeerDecoder:
    """Greedy decoding of a batch by transformers, without the overhead of `generate`.

    With ``capacity`` a static KV cache of so many tokens and ``torch.compile(mode="reduce-overhead")``, which replays
    CUDA graphs; without, eager with the dynamic cache.
    """

    def __init__(self, model: Any, capacity: int | None = None) -> None:
        self._model = model
        self._call = model if capacity is None else torch.compile(model, mode="reduce-overhead")
        self._static: Any = capacity and StaticCache(config=model.config, max_cache_len=capacity)

    @torch.inference_mode()
    def begin(self, prompts: list[list[int]]) -> None:
        """Compute the prompts, all of one length, and their first tokens."""
        device = self._model.device
        if self._static is None:
            self._cache = DynamicCache(config=self._model.config)
        else:
            self._cache = self._static
            self._cache.reset()
        token_ids = torch.tensor(prompts, device=device)
        out = self._model(token_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._token = out.logits[:, -1:].argmax(-1)
        self._position = torch.full((len(prompts), 1), len(prompts[0]), device=device)

    @torch.inference_mode()
    def steps(self, count: int) -> float:
        """Seconds of ``count`` steps, the last one's tokens on the host."""
        start = time.perf_counter()
        for _ in range(count):
            if self._static is not None:
                torch.compiler.cudagraph_mark_step_begin()
            out = self._call(self._token, position_ids=self._position, past_key_values=self._cache, use_cache=True)
            self._token = out.logits[:, -1:].argmax(-1)
            self._position += 1
        self._token.tolist()
        return time.perf_counter() - start

    @property
    def tokens(self) -> list[int]:
        """The newest token of every row."""
        ids: list[int] = self._token[:, 0].tolist()
        return ids


@torch.inference_mode()
def first_token_seconds(model: Any, prompts: list[list[int]]) -> float:
    """Seconds from prompts of one length to their first tokens on the host."""
    start = time.perf_counter()
    token_ids = torch.tensor(prompts, device=model.device)
    model(token_ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
    return time.perf_counter() - start
