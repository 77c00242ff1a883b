"""The two simplest greedy decoders over the same weights: an oracle for tests and the floor of the benchmark ladder.

`RecomputeDecoder` runs the whole sequence again for every token. `ContiguousDecoder` keeps one contiguous KV cache
per request. Neither pages, batches or schedules. Shapes: T tokens, N query heads, K KV heads, D head_dim.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.config import ModelConfig, load_model_config
from engine.model.loader import DTYPES, load_weights
from engine.model.rope import cos_sin_table
from engine.model.transformer import LayerWeights, Weights


class RecomputeDecoder:
    """Every token costs a forward pass over everything before it: O(T^2) per token, no state at all."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._model = _DenseModel(config, weights)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy token ids; EOS is not looked at."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            logits, _ = self._model.forward(tokens, None)
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


class ContiguousDecoder:
    """One contiguous K and V tensor per layer and request, sized for the whole request up front."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._model = _DenseModel(config, weights)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy token ids; EOS is not looked at."""
        cache = _ContiguousCache(self._config, self._model.weights.embedding_VH, len(prompt) + max_tokens)
        logits, _ = self._model.forward(prompt, cache)
        tokens = [int(logits.argmax())]
        while len(tokens) < max_tokens:
            logits, _ = self._model.forward(tokens[-1:], cache)
            tokens.append(int(logits.argmax()))
        return tokens[:max_tokens]


def load_naive(directory: Path, dtype: str = "float32", device: str = "cpu") -> tuple[ModelConfig, Weights]:
    """What both decoders are made from."""
    config = load_model_config(directory)
    weights, _ = load_weights(directory, config, DTYPES[dtype], torch.device(device), show_progress=False)
    return config, weights


class _ContiguousCache:
    """[L, 2, K, capacity, D]; ``length`` tokens are filled."""

    def __init__(self, config: ModelConfig, like: Tensor, capacity: int) -> None:
        shape = (config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim)
        self.kv = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0

    def extend(self, layer: int, k_KTD: Tensor, v_KTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new K and V; returns all of that layer's, the new ones included."""
        end = self.length + k_KTD.shape[1]
        self.kv[layer, 0, :, self.length : end] = k_KTD
        self.kv[layer, 1, :, self.length : end] = v_KTD
        return self.kv[layer, 0, :, :end], self.kv[layer, 1, :, :end]


class _DenseModel:
    """The transformer written out in the plainest torch, without the operations of `kernels`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self._cos_sin_PD = cos_sin_table(config, config.max_position_embeddings).to(weights.embedding_VH.device)

    def forward(self, token_ids: list[int], cache: _ContiguousCache | None) -> tuple[Tensor, Tensor]:
        """Float32 logits of the last token [V], and the final hidden states [T, H]."""
        start = cache.length if cache else 0
        ids = torch.tensor(token_ids, device=self.weights.embedding_VH.device)
        x = self.weights.embedding_VH[ids]
        cos_sin = self._cos_sin_PD[start : start + len(token_ids)]
        for index, layer in enumerate(self.weights.layers):
            x = x + self._attention(self._norm(x, layer.input_norm_H), index, layer, cos_sin, cache)
            x = x + self._mlp(self._norm(x, layer.post_norm_H), layer)
        if cache:
            cache.length += len(token_ids)
        x = self._norm(x, self.weights.final_norm_H)
        return F.linear(x[-1], self.weights.head_VH).float(), x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.config.norm_eps) * weight).to(x.dtype)

    def _attention(
        self, x_TH: Tensor, index: int, layer: LayerWeights, cos_sin_TD: Tensor, cache: _ContiguousCache | None
    ) -> Tensor:
        c = self.config
        heads = F.linear(x_TH, layer.qkv, layer.qkv_bias).unflatten(1, (-1, c.head_dim)).transpose(0, 1)
        q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads))
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q, k = self._norm(q, layer.q_norm_D), self._norm(k, layer.k_norm_D)
        q, k = _rotate(q, cos_sin_TD), _rotate(k, cos_sin_TD)
        if cache:
            k, v = cache.extend(index, k, v)
        group = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2)).float() * c.head_dim**-0.5
        first_query = k.shape[1] - q.shape[1]
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=x_TH.device).triu(first_query + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        return F.linear((weights @ v).transpose(0, 1).flatten(1), layer.o, layer.o_bias)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def _rotate(x_NTD: Tensor, cos_sin_TD: Tensor) -> Tensor:
    cos, sin = cos_sin_TD.to(x_NTD.dtype).chunk(2, dim=-1)
    low, high = x_NTD.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
