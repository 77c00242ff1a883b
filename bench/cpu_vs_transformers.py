"""SmolLM2 on the CPU: our engine beside transformers eager, in one run, with the floor of the linear layers alone.

    python -m bench.cpu_vs_transformers --json bench/results/cpu_vs_transformers.json

Decode: tokens per second after a prompt, at batch 1 and 16. Prefill: prompt tokens per second at batch 1. The
contenders take turns in every round. The floor is every matrix product of one decode step and nothing else, once
with `F.linear` (what transformers calls) and once with the product the engine calls.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.report import conditions, spread, table, write_json
from engine.config import EngineConfig
from engine.engine import Engine
from engine.naive import load_naive
from engine.outputs import TokenOutput
from engine.sampling_params import SamplingParams
from kernels import ops

Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Work:
    decode_prompt: int
    decode_tokens: int
    prefill_prompt: int
    batch: int


class Ours:
    """The engine, driven step by step."""

    def __init__(self, model: Path, dtype: str, work: Work) -> None:
        blocks = work.batch * -(-(work.decode_prompt + work.decode_tokens) // 16) + -(-work.prefill_prompt // 16)
        self._engine = Engine(EngineConfig(model=str(model), dtype=dtype, num_gpu_blocks=blocks, prefix_cache=False))

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        start = time.perf_counter()
        self._engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds from the last first token to the last token: ``tokens`` - 1 steps of the whole batch."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self._engine.add(str(i), prompt, params)
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {e.request_id for e in self._engine.step().events if isinstance(e, TokenOutput)}
        start = time.perf_counter()
        while self._engine.has_work():
            self._engine.step()
        return time.perf_counter() - start


class Transformers:
    """transformers eager with its dynamic KV cache, without the overhead of `generate`."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._model(torch.tensor([prompt]), logits_to_keep=1).logits[:, -1].argmax(-1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        out = self._model(torch.tensor(prompts), logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            out = self._model(token, past_key_values=out.past_key_values)
            token = out.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start


class LinearFloor:
    """Every matrix product of one decode step at batch 1, over the real weights."""

    def __init__(self, model: Path, dtype: str) -> None:
        _, weights = load_naive(model, dtype)
        self._matrices = [matrix for w in weights.layers for matrix in (w.qkv, w.o, w.gate_up, w.down)]
        self._matrices.append(weights.head_VH)
        self._packed = [ops.pack_weight(matrix) for matrix in self._matrices]
        self._inputs = [torch.randn(1, matrix.shape[1], dtype=matrix.dtype) for matrix in self._matrices]

    def plain(self, count: int) -> float:
        """Seconds of ``count`` steps through `F.linear`."""
        return self._steps(F.linear, self._matrices, count)

    def ours(self, count: int) -> float:
        """Seconds of ``count`` steps through the engine's product and weights."""
        return self._steps(ops.linear, self._packed, count)

    @torch.inference_mode()
    def _steps(self, product: Callable[[Tensor, Tensor], Tensor], matrices: list[Tensor], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for x, matrix in zip(self._inputs, matrices, strict=True):
                product(x, matrix)
        return time.perf_counter() - start


def measure(model: Path, dtype: str, work: Work, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second of every contender, as median, min and max over the rounds; the first round warms up."""
    prompt = [1000 + i % 40_000 for i in range(max(work.prefill_prompt, work.decode_prompt))]
    short, long = prompt[: work.decode_prompt], prompt[: work.prefill_prompt]
    ours, theirs, floor = Ours(model, dtype, work), Transformers(model, dtype), LinearFloor(model, dtype)
    steps = work.decode_tokens - 1
    rates: Rates = {}
    for round_number in range(rounds + 1):
        seconds = {
            "transformers decode, batch 1": theirs.decode([short], work.decode_tokens) / steps,
            "picovllm decode, batch 1": ours.decode([short], work.decode_tokens) / steps,
            "linear layers alone, F.linear": floor.plain(steps) / steps,
            "linear layers alone, picovllm": floor.ours(steps) / steps,
            "transformers prefill": theirs.prefill(long) / work.prefill_prompt,
            "picovllm prefill": ours.prefill(long) / work.prefill_prompt,
            f"transformers decode, batch {work.batch}": theirs.decode([short] * work.batch, work.decode_tokens)
            / (steps * work.batch),
            f"picovllm decode, batch {work.batch}": ours.decode([short] * work.batch, work.decode_tokens)
            / (steps * work.batch),
        }
        if round_number:
            for name, value in seconds.items():
                rates.setdefault(name, []).append(1 / value)
    return {name: spread(values) for name, values in rates.items()}


def ratios(rates: dict[str, dict[str, float]], batch: int) -> dict[str, float]:
    """What the goals are about, from the medians."""
    median = {name: rate["median"] for name, rate in rates.items()}
    return {
        "decode, batch 1, over transformers": median["picovllm decode, batch 1"]
        / median["transformers decode, batch 1"],
        "prefill, over transformers": median["picovllm prefill"] / median["transformers prefill"],
        f"batch {batch} over own batch 1": median[f"picovllm decode, batch {batch}"]
        / median["picovllm decode, batch 1"],
        f"decode, batch {batch}, over transformers": median[f"picovllm decode, batch {batch}"]
        / median[f"transformers decode, batch {batch}"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode-prompt", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--prefill-prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", help="write the figures and their conditions here")
    args = parser.parse_args()
    work = Work(args.decode_prompt, args.decode_tokens, args.prefill_prompt, args.batch)
    result: dict[str, Any] = {"benchmark": "cpu_vs_transformers", "conditions": conditions("cpu"), "work": vars(work)}
    for dtype in args.dtypes:
        rates = measure(args.model, dtype, work, args.rounds)
        result[dtype] = {"tokens_per_second": rates, "ratios": ratios(rates, work.batch)}
        rows = [[n, *(f"{r[k]:.1f}" for k in ("median", "min", "max"))] for n, r in rates.items()]
        print(f"\n{dtype}\n{table(['tokens per second', 'median', 'min', 'max'], rows)}")
        print("\n".join(f"{name}: {value:.2f}x" for name, value in result[dtype]["ratios"].items()))
    write_json(args.json, result)


if __name__ == "__main__":
    main()
