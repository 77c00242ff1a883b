"""The decoder-only transformer of Llama, Qwen2 and Qwen3 over a paged KV cache.

Shapes: T tokens of the step, H hidden, N query heads, K KV heads, D head_dim, A = N + 2K, V vocabulary,
L layers, R rows that need logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from kernels import ops


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qkv`` stacks q, k, v rows; ``gate_up`` stacks gate, up rows; norms of q and k are Qwen3's."""

    input_norm_H: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm_H: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model. Loaded with tied embeddings, ``head_VH`` is ``embedding_VH`` itself; packing makes it a copy."""

    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: Tensor
    head_VH: Tensor


def pack_weights(weights: Weights, pack: Callable[[Tensor], Tensor] = ops.pack_weight) -> Weights:
    """The same weights with every matrix as its product reads it fastest; the embedding stays as it is."""
    layers = tuple(
        replace(layer, qkv=pack(layer.qkv), o=pack(layer.o), gate_up=pack(layer.gate_up), down=pack(layer.down))
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head_VH=pack(weights.head_VH))


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens: first ``decode`` rows (one token per sequence), then the chunks of ``prefill``.

    ``cos_sin_TD`` holds the rotary factors of each token's position; ``slots_T`` where its KV goes.
    """

    token_ids_T: Tensor
    cos_sin_TD: Tensor
    slots_T: Tensor
    num_decode: int
    decode: ops.DecodeMeta | None
    prefill: ops.PrefillMeta | None


class Transformer:
    """Runs the layers. Owns nothing that changes: weights are read-only, the KV cache is the caller's."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: ModuleType = ops) -> None:
        """``kernels``: where the operations come from, `kernels.ops` or `kernels.reference.ops`."""
        self.config = config
        self.weights = weights
        self._scale = config.head_dim**-0.5
        self._ops = kernels
        # Where it costs next to nothing the residual stream keeps all of its bits over the layers.
        self._residual_dtype = torch.float32 if weights.embedding_VH.is_cuda else weights.embedding_VH.dtype

    def hidden_states(self, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Final-norm hidden states [T, H]; writes the tokens' KV into ``kv_cache`` [L, 2, blocks, block_size, K, D]."""
        eps = self.config.norm_eps
        residual = self.weights.embedding_VH.index_select(0, batch.token_ids_T).to(self._residual_dtype)
        normed = self._ops.rmsnorm(residual, self.weights.layers[0].input_norm_H, eps)
        for index, layer in enumerate(self.weights.layers):
            attended = self._attention(normed, layer, batch, kv_cache[index, 0], kv_cache[index, 1])
            normed, residual = self._ops.add_rmsnorm(attended, residual, layer.post_norm_H, eps)
            out = self._mlp(normed, layer)
            normed, residual = self._ops.add_rmsnorm(out, residual, self._next_norm(index), eps)
        return normed

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] in float32."""
        return self._ops.linear_float32(hidden_RH, self.weights.head_VH)

    def _next_norm(self, index: int) -> Tensor:
        layers = self.weights.layers
        return layers[index + 1].input_norm_H if index + 1 < len(layers) else self.weights.final_norm_H

    def _attention(
        self, normed_TH: Tensor, layer: LayerWeights, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        config = self.config
        qkv_TAD = self._ops.linear(normed_TH, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        head_norms = None
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            head_norms = ops.HeadNorms(layer.q_norm_D, layer.k_norm_D, config.norm_eps)
        q_TND = self._ops.rope_and_store(
            qkv_TAD, config.num_kv_heads, batch.cos_sin_TD, k_cache, v_cache, batch.slots_T, head_norms
        )
        attended_TND = self._attend(q_TND, batch, k_cache, v_cache)
        return self._ops.linear(attended_TND.flatten(1), layer.o, layer.o_bias)

    def _attend(self, q_TND: Tensor, batch: ForwardBatch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        if batch.prefill is None:
            assert batch.decode is not None
            return self._ops.paged_decode_attention(q_TND, k_cache, v_cache, batch.decode, self._scale)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        if batch.decode is not None:
            rows = slice(0, batch.num_decode)
            out_TND[rows] = self._ops.paged_decode_attention(q_TND[rows], k_cache, v_cache, batch.decode, self._scale)
        self._ops.paged_prefill_attention(q_TND, k_cache, v_cache, batch.prefill, self._scale, out_TND)
        return out_TND

    def _mlp(self, normed_TH: Tensor, layer: LayerWeights) -> Tensor:
        gate_up = self._ops.linear(normed_TH, layer.gate_up, layer.gate_up_bias)
        return self._ops.linear(self._ops.silu_mul(gate_up), layer.down, layer.down_bias)
