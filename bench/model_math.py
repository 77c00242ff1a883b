"""Bytes and operations that a model cannot do without: what a step must read, what a prompt must compute."""

from engine.model.config import ModelConfig


def linear_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices that every token passes, the head excluded."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = heads * config.hidden_size + config.hidden_size * config.num_heads * config.head_dim
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def step_weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that one decode step reads: all matrices and the head once, biases and norms."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    vectors = config.num_layers * (2 * config.hidden_size + heads * config.qkv_bias) + config.hidden_size
    return itemsize * (linear_parameters(config) + config.vocab_size * config.hidden_size + vectors)


def step_bytes(config: ModelConfig, itemsize: int, batch: int, context: float) -> float:
    """Bytes that a decode step reads: the weights once, and K and V of every sequence."""
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    return step_weight_bytes(config, itemsize) + kv * batch * context


def prefill_flops(config: ModelConfig, tokens: int, prompts: int = 1) -> float:
    """Operations of ``prompts`` prompts: the products, causal attention, and one row of logits each."""
    products = 2.0 * linear_parameters(config) * tokens
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1) / 2
    return prompts * (products + attention + 2.0 * config.vocab_size * config.hidden_size)
