"""Rotary position embedding tables, with the scalings that extend a model's context."""

import math

import torch
from torch import Tensor

from engine.model.config import ModelConfig, RopeConfig


def cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: cos then sin of every position, times the scaling's attention factor."""
    inv_freq, attention_factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_factor)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] (float32) and the factor on cos and sin."""
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, config)
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""
    p = rope.parameters
    turns = p["original_max_position_embeddings"] * plain / (2 * math.pi)
    share_kept = ((turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])).clamp(0, 1)
    return share_kept * plain + (1 - share_kept) * plain / p["factor"]


def _yarn(plain: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), section 3: dimensions that turn often keep their frequency,
    those that turn seldom are interpolated, with a linear ramp between."""
    p = config.rope.parameters
    factor = float(p["factor"])
    original = p.get("original_max_position_embeddings") or config.max_position_embeddings

    def dimension_of(turns: float) -> float:
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope.theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: dict[str, float], factor: float) -> float:
    """Section 3.4 of YaRN: 0.1 ln(factor) + 1; ``mscale`` and ``mscale_all_dim`` refine it where a model has them."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)
