"""What the engine launches for models of real shapes, compiled offline: the process behind `test_gpu_compiles.py`.

    python -m tests.kernels.compile_cases OUTPUT.json

Not to be imported by a test: `offline.pretend` changes torch and Triton for good. Of a model there are two layers with
the same weights, never read: memory nobody touches costs nothing.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.prefill import PrefillInputs, PrefillShape
from engine.cuda.runner import CudaRunner
from engine.lifecycle import StepResult
from engine.model.config import load_model_config
from engine.model.loader import Checkpoint, _Reader
from engine.model.transformer import Transformer, Weights
from engine.plan import StepPlan
from engine.sampling_params import LogprobsMode, SamplingParams
from kernels import ops
from kernels.gpu import cache
from kernels.gpu.launch import wait_for_earlier_kernels
from scripts.make_shape_model import write_shape
from tests.engine.driver import Driver
from tests.kernels.offline import Launches, Stream, Variant, compile_all, pretend

BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 2048, 16, 4096
SAMPLING = "kernels.gpu.sampling"


@dataclass(frozen=True, slots=True)
class Start:
    """Parts of an engine's start to compile: warm-up, decode-ROWS, prefill-TOKENS. ``sampling``: its kernels, too."""

    shape: str
    dtype: str
    parts: tuple[str, ...]
    sampling: bool = False
    max_num_seqs: int = 64

    @property
    def cases(self) -> list[str]:
        return [f"{self.shape}-{self.dtype}-{part}" for part in self.parts]


# One shape with all there is; of the others what depends on the shape. More than 64 rows use cuBLAS.
ALL = ("warm-up", "decode-1", "decode-8", "decode-32", "decode-64", "decode-128", "prefill-16")
SOME = ("decode-1", "decode-64")
MODELS = (
    Start("qwen2.5-1.5b", "bfloat16", ALL, sampling=True, max_num_seqs=128),
    Start("smollm2-135m", "bfloat16", ("warm-up", *SOME)),
    Start("smollm2-135m", "float32", ("decode-1", "decode-8", "prefill-512")),
    Start("qwen2.5-0.5b", "bfloat16", SOME),
    Start("qwen2.5-7b", "bfloat16", (*SOME, "prefill-512")),
    Start("llama-3.2-1b", "bfloat16", SOME),
    Start("qwen3-0.6b", "bfloat16", (*SOME, "prefill-512")),
)


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that serves. ``eager``: without graphs."""

    shape: str
    max_num_seqs: int
    max_batched_tokens: int
    eager: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}{'-eager' if self.eager else ''}"


# The second one's buffers are of odd sizes.
SERVED = (Served("qwen2.5-1.5b", 64, 2048), Served("smollm2-135m", 13, 700), Served("qwen3-0.6b", 16, 512, eager=True))
# Small, so that logprobs are quick; what is compiled depends on its divisors only.
SERVED_VOCABULARY = 2048
NOISE: dict[str, Any] = {"temperature": 0.8, "max_tokens": 2}
FILTERS: dict[str, Any] = NOISE | {"top_k": 5, "top_p": 0.9, "min_p": 0.01}
PROCESSED: dict[str, Any] = {"top_logprobs": 1, "logprobs_mode": LogprobsMode.PROCESSED}
# What the requests of a batch ask for, in turn.
BATCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0, "max_tokens": 2},),
    "noise": (NOISE, NOISE | {"n": 3}),
    "filters": (FILTERS,),
    "others": (
        NOISE | {"repetition_penalty": 1.5, "frequency_penalty": 0.3},
        NOISE | {"logit_bias": ((7, 5.0),)},
        NOISE | {"min_tokens": 2, "stop_token_ids": (8, 9)},
    ),
    "logprobs": (NOISE | {"top_logprobs": 2}, {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 1}),
    "processed": (NOISE | PROCESSED,),
    "processed-filters": (FILTERS | PROCESSED,),
}
# Not batches of requests: prompt chunks of every size there is, and of one there is not.
PADDED, UNPADDED = "padded", "unpadded"


class NoWeights(Checkpoint):
    """A checkpoint of every tensor that is asked for, without content."""

    def __init__(self) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")


def model_of(shape: str, dtype: torch.dtype, **overrides: Any) -> Transformer:
    with tempfile.TemporaryDirectory() as directory:
        config = load_model_config(write_shape(Path(directory), shape, num_hidden_layers=2, **overrides))
    shapes = _Reader(NoWeights(), config, dtype, torch.device("meta")).layer(0)
    tensors = {field.name: getattr(shapes, field.name) for field in fields(shapes)}
    empty: dict[str, Any] = {
        name: None if of is None else torch.empty(of.shape, dtype=dtype) for name, of in tensors.items()
    }
    layer = replace(shapes, **empty)
    embedding = torch.empty((config.vocab_size, config.hidden_size), dtype=dtype)
    head = embedding if config.tied_embeddings else torch.empty_like(embedding)
    return Transformer(config, Weights(embedding, (layer, layer), torch.empty(config.hidden_size, dtype=dtype), head))


def runner_of(model: Transformer, max_num_seqs: int, max_batched_tokens: int) -> CudaRunner:
    runner = CudaRunner(
        model,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_slots=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=max_batched_tokens,
        eos_token_ids=(2,),
    )
    runner._stream = Stream()  # type: ignore[assignment]
    return runner


def start(launches: Launches, model: Start) -> dict[str, list[str]]:
    """The keys of each part of an engine's start, in the order of their launches."""
    runner = runner_of(model_of(model.shape, getattr(torch, model.dtype)), model.max_num_seqs, 2048)
    launches.take()
    parts = {}
    for part in model.parts:
        kind, _, size = part.partition("-")
        if kind == "decode":
            runner.capture(False, decode=[int(size)], prefill=[])
        elif kind == "prefill":
            runner.capture(False, decode=[1], prefill=[int(size)])
        else:
            runner.warm_up()
        keys = launches.take()
        if not model.sampling:
            keys = [key for key in keys if not launches.variants[key].module.startswith(SAMPLING)]
        parts[f"{model.shape}-{model.dtype}-{part}"] = keys
    return parts


def store(launches: Launches) -> dict[str, list[str]]:
    """The one kernel of ours that no step of the engine launches."""
    k_TKD = torch.empty((16, 2, 128), dtype=torch.bfloat16)
    pool = torch.empty((2, BLOCKS, BLOCK_SIZE, 2, 128), dtype=torch.bfloat16)
    cache.store_kvcache(k_TKD, k_TKD, pool[0], pool[1], torch.zeros(16, dtype=torch.int64))
    return {"store": launches.take()}


# -- serving ----------------------------------------------------------------------------------------------------


class Serving(Driver):
    """The scheduler's plans, launched by a runner as they come. Its tokens are the driver's."""

    def __init__(self, runner: CudaRunner, max_num_seqs: int, budget: int) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE, max_num_seqs, budget)
        self._runner = runner

    def check(self) -> None:
        """Not what is tested here, and slow."""

    def _result(self, plan: StepPlan) -> StepResult:
        self._runner.launch(plan).wait()
        return super()._result(plan)


@torch.inference_mode()
def serve(launches: Launches, engine: Served) -> dict[str, list[str]]:
    """The forms that batches of each kind need and the start did not compile."""
    model = model_of(engine.shape, torch.bfloat16, vocab_size=SERVED_VOCABULARY)
    seats, budget = engine.max_num_seqs, engine.max_batched_tokens
    runner = runner_of(model, seats, budget)
    launches.take()
    if not engine.eager:
        runner.capture(False)
    runner.warm_up(engine.eager)
    compiled = set(launches.take())
    new = {}
    for kind, params in BATCHES.items():
        for lengths in _lengths(kind, seats, budget):
            serving = Serving(runner, seats, budget)
            for number, length in enumerate(lengths):
                its = SamplingParams(**params[number % len(params)])
                serving.add(f"{number}", length, its.max_tokens or 1, its.n, params=its)
            serving.run()
        new[kind] = [launches.variants[key].form for key in sorted(set(launches.take()) - compiled)]
    for kind, shapes in _shapes(runner, budget).items():
        for of in shapes:
            runner._prefill.forward(PrefillInputs.of(runner._prefill.padding(of), of))
        new[kind] = [launches.variants[key].form for key in sorted(set(launches.take()) - compiled)]
    return {f"{engine.name}-{kind}": forms for kind, forms in new.items()}


def _shapes(runner: CudaRunner, budget: int) -> dict[str, list[PrefillShape]]:
    """All that eager batches are padded to, and one that they never have."""
    padded = {runner._prefill.eager_shape(tokens) for tokens in range(1, budget + 1)}
    return {PADDED: sorted(padded, key=lambda shape: shape.tokens), UNPADDED: [PrefillShape(17, 3, 3)]}


def _lengths(kind: str, max_num_seqs: int, budget: int) -> Iterable[list[int]]:
    """Prompts of batches: small numbers of tokens, of sequences, and many larger ones."""
    yield from ([tokens] for tokens in (1, 2, 3, 15, 16, 17, 31, 32, 33, 34))
    yield from ([3] * sequences for sequences in (2, 3, 4, 7, 8, 9, 10, 11, max_num_seqs))
    draw = random.Random(kind)
    for _ in range(8):
        longest = draw.choice([20, 200, budget])
        yield [draw.randint(1, longest) for _ in range(draw.randint(1, min(max_num_seqs, 4 * budget // longest)))]


# -- kernels that are wrong ---------------------------------------------------------------------------------------


@triton.jit
def _returns_early(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    weight = tl.load(w)
    if tl.program_id(0) >= length:
        return
    wait_for_earlier_kernels(True)
    tl.store(x, tl.load(x) + weight)


@triton.jit
def _writes_early(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    tl.store(x, tl.load(w))
    wait_for_earlier_kernels(True)


@triton.jit
def _reads_early(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    value = tl.load(x + length) + tl.load(w)
    wait_for_earlier_kernels(True)
    tl.store(x, value)


@triton.jit
def _waits_at_times(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    weight = tl.load(w)
    if tl.program_id(0) < length:
        wait_for_earlier_kernels(True)
    tl.store(x, weight)


@triton.jit
def _never_waits(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    tl.store(x, tl.load(w))


@triton.jit
def _loads_late(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    wait_for_earlier_kernels(True)
    tl.store(x, tl.load(w))


@triton.jit
def _spills(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    i = tl.arange(0, 16384)
    value = tl.load(w + i).to(tl.float32)
    tl.store(x + i, value / tl.sum(value))


@triton.jit
def _shares_too_much(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    i, k = tl.arange(0, 128)[:, None], tl.arange(0, 64)
    total = tl.zeros((128, 128), tl.float32)
    for start in range(0, length, 64):
        a = tl.load(w + i * 4096 + start + k[None, :])
        total = tl.dot(a, tl.trans(tl.load(w + i * 4096 + start + 64 + k[None, :])), total)
    tl.store(x + i * 128 + tl.arange(0, 128)[None, :], total)


@triton.jit
def _does_not_compile(x: tl.tensor, w: tl.tensor, length: tl.tensor) -> None:
    tl.store(x + tl.arange(0, 3), 1.0)


WRONG = (
    _returns_early, _writes_early, _reads_early, _waits_at_times, _never_waits, _loads_late, _spills, _shares_too_much,
    _does_not_compile,
)  # fmt: skip


def wrong(launches: Launches) -> dict[str, list[str]]:
    x, w = torch.empty(1 << 20), torch.empty(1 << 20, dtype=torch.bfloat16)
    for function in WRONG:
        options: dict[str, Any] = {"num_warps": 4, "num_stages": 9}
        if function not in (_spills, _shares_too_much, _does_not_compile):
            options["launch_pdl"] = True
        if function is _spills:
            options["num_warps"] = 1
        function[(1,)](x, w, 4096, **options)
    return {"wrong": launches.take()}


def _kind(key: str, variant: Variant) -> str:
    """Of forms of one kind one is compiled: those of sampling may differ in alignment and in the type of slots."""
    return f"{variant.name}{variant.constants}" if variant.module.startswith(SAMPLING) else key


def _linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return x_TI.new_empty((len(x_TI), len(weight_OI)))


def _linear_float32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return torch.empty((len(x_TI), len(weight_OI)))


def main() -> None:
    launches = pretend()
    # Products are not ours to compile; only the shapes of what they give are wanted.
    ops.linear = _linear
    ops.linear_float32 = _linear_float32
    cases: dict[str, list[str]] = {}
    for model in MODELS:
        cases |= start(launches, model)
    cases |= store(launches) | wrong(launches)
    served: dict[str, list[str]] = {}
    for engine in SERVED:
        served |= serve(launches, engine)
    alike: dict[str, str] = {}  # one key for each of those to compile
    keys = {key: alike.setdefault(_kind(key, launches.variants[key]), key) for of in cases.values() for key in of}
    kernels = compile_all(launches.variants[key] for key in alike.values())
    numbers = {key: number for number, key in enumerate(alike.values())}
    content = {
        "kernels": [asdict(kernel) for kernel in kernels],
        "cases": {case: [numbers[keys[key]] for key in of] for case, of in cases.items()},
        "served": served,
    }
    Path(sys.argv[1]).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
