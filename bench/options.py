"""What the benchmarks' command lines share: device, model, rounds, JSON, and the engine that they stand for."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.report import conditions, write_json
from engine.config import DEVICES, DTYPES, EngineConfig
from engine.model.config import ModelConfig, load_model_config
from engine.model.loader import DTYPES as TORCH_DTYPES
from engine.model.loader import load_weights
from engine.model.random_weights import WEIGHT_FILES, random_weights
from engine.model.transformer import Weights
from scripts.make_shape_model import SHAPES, write_shape, write_tokenizer


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The common options; ``doc`` is the script's docstring, its first line the description."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--device", choices=DEVICES, default="cuda")
    made.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b", help="of a model with random weights")
    made.add_argument("--model", type=Path, metavar="DIR", help="a model directory, instead of a shape")
    made.add_argument("--dtype", choices=DTYPES, default="auto", help="auto = the model's")
    made.add_argument("--seed", type=int, default=0, help="of weights, prompts and arrivals")
    made.add_argument("--rounds", type=int, default=rounds, help="measurements of each figure")
    made.add_argument("--json", metavar="PATH", help="write the figures and their conditions here")
    return made


def engine_options(made: argparse.ArgumentParser, budget: bool = True) -> None:
    """Options of the engine that change what is measured; ``budget``: how many tokens a step may have."""
    if budget:
        made.add_argument("--max-num-batched-tokens", type=int, default=16_384, metavar="N", help="tokens of one step")
    made.add_argument("--num-gpu-blocks", type=int, metavar="N", help="KV blocks; unset = from memory")
    made.add_argument("--pipeline-depth", type=int, choices=(1, 2), help="unset = the engine's default")
    made.add_argument("--engine", nargs="*", default=[], metavar="NAME=VALUE", help="other options of EngineConfig")


@contextmanager
def model_directory(args: argparse.Namespace, tokenizer: bool = False) -> Iterator[Path]:
    """The directory that was asked for, or a temporary one of the shape; only a server needs its ``tokenizer``."""
    if args.model is not None:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="picovllm-bench-") as folder:
        directory = write_shape(Path(folder), args.shape)
        if tokenizer:
            write_tokenizer(directory, SHAPES[args.shape]["vocab_size"])
        yield directory


def engine_config(args: argparse.Namespace, directory: Path, **options: Any) -> EngineConfig:
    """The configuration that the command line stands for; ``options`` go before it."""
    given: dict[str, Any] = {
        "model": str(directory),
        "device": args.device,
        "dtype": args.dtype,
        "random_weights": weights_seed(args, directory),
        "num_gpu_blocks": args.num_gpu_blocks,
        "pipeline_depth": args.pipeline_depth,
        **dict(_named_option(text) for text in args.engine),
        **options,
    }
    if hasattr(args, "max_num_batched_tokens"):
        given.setdefault("max_num_batched_tokens", args.max_num_batched_tokens)
    # A prompt that is measured twice is to be computed twice.
    given.setdefault("prefix_cache", False)
    # Room for what else is measured on the card: peers, graphs, the buffers of the bandwidth test.
    if args.device == "cuda" and given["num_gpu_blocks"] is None:
        given.setdefault("gpu_memory_utilization", 0.75)
    return EngineConfig(**given)


def load_model(args: argparse.Namespace, directory: Path) -> tuple[ModelConfig, Weights]:
    """The engine's own weights once more: equal tensors, in memory of their own, not packed."""
    config = load_model_config(directory)
    dtype = TORCH_DTYPES[config.dtype if args.dtype == "auto" else args.dtype]
    device, seed = torch.device(args.device), weights_seed(args, directory)
    if seed is None:
        return config, load_weights(directory, config, dtype, device, show_progress=False)[0]
    return config, random_weights(directory, config, seed, dtype, device, show_progress=False)[0]


def finish(args: argparse.Namespace, benchmark: str, content: dict[str, Any]) -> None:
    """Write the JSON, if one was asked for."""
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    header = {"benchmark": benchmark, "conditions": conditions(args.device), "arguments": arguments}
    write_json(args.json, header | content)


def weights_seed(args: argparse.Namespace, directory: Path) -> int | None:
    """The seed of random weights, or None for a directory that has weights."""
    return None if any(directory.glob(WEIGHT_FILES)) else args.seed


def _named_option(text: str) -> tuple[str, Any]:
    """``name=value`` with the value as Python would read it: a number, true or false, or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--engine {text}: NAME=VALUE is expected")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
