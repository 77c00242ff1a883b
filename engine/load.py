"""From a model directory to something that runs: config, weights, KV pool, defaults."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch

from engine.config import DEFAULT_CPU_KV_BYTES, DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from engine.errors import ConfigError, InvalidRequest, ModelError
from engine.limits import Limits
from engine.model.config import ModelConfig, load_model_config, read_json
from engine.model.loader import DTYPES, load_weights
from engine.model.random_weights import random_weights
from engine.model.transformer import Transformer, Weights, pack_weights
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.reference import ops as reference_ops

if TYPE_CHECKING:
    from engine.cuda.runner import CudaRunner

# Of the attention kernels.
MAX_GPU_HEAD_DIM = 256

AnyRunner = Union[Runner, "CudaRunner"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: AnyRunner
    model_config: ModelConfig
    limits: Limits
    fingerprint: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    kv_bytes_per_token: int


def load_model(config: EngineConfig) -> LoadedModel:
    """Load weights, size the KV pool from what memory is left, allocate it, and make everything ready for steps."""
    directory = Path(config.model)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    model_config = load_model_config(directory)
    generation = directory / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    eos_token_ids = _eos_token_ids(generation_config, read_json(directory / "config.json"), model_config)
    default_sampling = _default_sampling(generation, generation_config, model_config)
    max_model_len = _max_model_len(config, model_config)
    dtype = _dtype(config, model_config)
    device = _device(config)
    if device.type == "cuda" and model_config.head_dim > MAX_GPU_HEAD_DIM:
        raise ModelError(f"{directory}: head_dim {model_config.head_dim} is above {MAX_GPU_HEAD_DIM}, the GPU's most")
    bytes_per_token = kv_bytes_per_token(model_config, DTYPES[dtype])
    with _out_of_memory_in_one_line():
        weights, fingerprint = _weights(config, model_config, DTYPES[dtype], device)
        kernels = reference_ops if config.kernels == "reference" else ops
        model = Transformer(model_config, pack_weights(weights, kernels.pack_weight), kernels)
        runner, num_blocks = _runner(config, model, max_model_len, eos_token_ids, bytes_per_token)
    limits = Limits(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
    )
    return LoadedModel(
        runner, model_config, limits, fingerprint, dtype, eos_token_ids, default_sampling, bytes_per_token
    )


@contextmanager
def _out_of_memory_in_one_line() -> Iterator[None]:
    """A GPU that is too small is the configuration's fault, and the way out is said."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        reason = str(error).split(". ")[0]
        raise ConfigError(f"{reason}; lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization") from None


def _weights(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Weights, str]:
    directory, seed = Path(config.model), config.random_weights
    if seed is not None:
        return random_weights(directory, model_config, seed, dtype, device, config.show_progress)
    return load_weights(directory, model_config, dtype, device, config.show_progress)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """K and V of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch sees no CUDA device; use --device cpu or fix the driver")
    return torch.device(config.device)


def _dtype(config: EngineConfig, model_config: ModelConfig) -> str:
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise ModelError(f"{config.model}: dtype {dtype!r} of config.json is not served; choose one with --dtype")
    return dtype


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    wanted = config.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len {wanted} is above the model's max_position_embeddings {limit}")
    return wanted


def _runner(
    config: EngineConfig, model: Transformer, max_model_len: int, eos_token_ids: tuple[int, ...], bytes_per_token: int
) -> tuple[AnyRunner, int]:
    """The runner for the device, ready to launch, and the number of blocks in its pool."""
    seats_can_fill = config.max_num_seqs * -(-max_model_len // config.block_size)
    sizes: dict[str, Any] = {
        "block_size": config.block_size,
        "num_slots": config.max_num_seqs,
        "max_model_len": max_model_len,
        "eos_token_ids": eos_token_ids,
    }
    if config.device == "cpu" or config.kernels != "auto":
        num_blocks = config.num_gpu_blocks or min(_blocks_in_budget(config, model, bytes_per_token), seats_can_fill)
        return Runner(model, num_blocks=num_blocks, **sizes), num_blocks

    # Its kernels need Triton, which an installation for CPUs may lack.
    from engine.cuda.memory import blocks_that_fit
    from engine.cuda.runner import CudaRunner

    def make_runner(num_blocks: int) -> CudaRunner:
        return CudaRunner(model, num_blocks=num_blocks, max_batched_tokens=config.max_num_batched_tokens, **sizes)

    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    num_blocks = config.num_gpu_blocks or min(
        blocks_that_fit(
            make_runner,
            share,
            bytes_per_token * config.block_size,
            config.max_num_batched_tokens,
            graphs=not config.enforce_eager,
        ),
        seats_can_fill,
    )
    runner = make_runner(num_blocks)
    if not config.enforce_eager:
        runner.capture(config.show_progress)
    runner.warm_up(eager=config.enforce_eager)
    return runner, num_blocks


def _blocks_in_budget(config: EngineConfig, model: Transformer, bytes_per_token: int) -> int:
    """Of the CPU's budget, or of the card's share that the plain runner leaves: a generous guess of a step."""
    if config.device == "cpu":
        budget = config.cpu_kv_bytes or DEFAULT_CPU_KV_BYTES
    else:
        free, total = torch.cuda.mem_get_info()
        shape = model.config
        activations = config.max_num_batched_tokens * (4 * shape.intermediate_size + 4 * shape.hidden_size) * 4
        logits = config.max_num_seqs * shape.vocab_size * 4 * 8
        share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        budget = int(total * share) - (total - free) - activations - logits
    blocks = budget // (bytes_per_token * config.block_size)
    if blocks < 1:
        raise ConfigError(
            f"no memory is left for KV blocks ({max(budget, 0)} bytes); raise the memory budget "
            "or lower max_num_batched_tokens, max_num_seqs or the model's size"
        )
    return blocks


def _eos_token_ids(generation: dict[str, Any], raw: dict[str, Any], model_config: ModelConfig) -> tuple[int, ...]:
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < model_config.vocab_size:
            raise ModelError(f"eos_token_id {token_id!r} is outside the vocabulary of {model_config.vocab_size}")
    return tuple(ids)


def _default_sampling(path: Path, generation: dict[str, Any], model_config: ModelConfig) -> SamplingParams:
    """What a request gets that sets nothing. Without ``do_sample`` the model's authors mean greedy."""

    def setting(name: str, default: float) -> float:
        value = generation.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ModelError(f"{path}: {name} must be a number, got {value!r}")
        return default if value is None else value

    def whole(name: str) -> int:
        value = setting(name, 0)
        if value != int(value):
            raise ModelError(f"{path}: {name} must be a whole number, got {value!r}")
        return int(value)

    repetition_penalty = float(setting("repetition_penalty", 1.0))
    if not generation.get("do_sample", False):
        params = SamplingParams(temperature=0.0, repetition_penalty=repetition_penalty)
    else:
        params = SamplingParams(
            temperature=float(setting("temperature", 1.0)),
            top_p=float(setting("top_p", 1.0)),
            top_k=whole("top_k"),
            min_p=float(setting("min_p", 0.0)),
            repetition_penalty=repetition_penalty,
        )
    try:
        params.check(model_config.vocab_size)
    except InvalidRequest as error:
        raise ModelError(f"{path}: {error}") from None
    return params
