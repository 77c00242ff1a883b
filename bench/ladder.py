"""The ladder: what each technique of the engine is worth at batch 1, from recomputing everything to the whole of it.

    python -m bench.ladder --json bench/results/ladder.json
    python -m bench.ladder --device cpu --shape nano --contexts 16 --tokens 4 --rounds 1

Seconds per token after a prompt, prefill not counted; every rung has the same weights and the same prompt. `tokens
equal` is how many of the greedy tokens are the first engine rung's until the first that differs: another order of
additions may decide a near tie otherwise, wrong numerics differ at once. The engines have one seat, so that the one
batch size that is measured is all that is captured.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.driver import Driver, random_prompts
from bench.limits import bandwidth_lines, bandwidths, release, synchronize
from bench.model_math import step_bytes
from bench.options import engine_config, engine_options, finish, load_model, model_directory, parser
from bench.report import spread, table
from engine.engine import Engine
from engine.model.config import load_model_config
from engine.naive import ContiguousDecoder, RecomputeDecoder
from engine.sampling_params import SamplingParams


class Decoder(Protocol):
    """Decodes one prompt greedily."""

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]: ...

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rung:
    """A technique and how to build what has it; ``build`` gets the command line and the model directory."""

    name: str
    build: Callable[[argparse.Namespace, Path], Decoder]


class Naive:
    """The decoders of `engine.naive`, which know of no steps: two runs, and the difference of their times."""

    def __init__(self, decoder: RecomputeDecoder | ContiguousDecoder, device: str) -> None:
        self._decoder, self._device = decoder, device

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        return self._decoder.generate(prompt, max_tokens)

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float:
        times = []
        for count in (1, 1 + tokens):
            start = time.perf_counter()
            self._decoder.generate(prompt, count)
            synchronize(self._device)
            times.append(time.perf_counter() - start)
        return (times[1] - times[0]) / tokens

    def close(self) -> None:
        """Its memory goes with it."""


class Stepped:
    """An engine, step by step."""

    def __init__(self, engine: Engine) -> None:
        self._driver = Driver(engine)

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return self._driver.engine.generate([prompt], params)[0].token_ids

    def seconds_per_token(self, prompt: list[int], tokens: int) -> float:
        self._driver.begin([prompt], tokens + 16)
        self._driver.steps(4)
        seconds = self._driver.steps(tokens).wall / tokens
        self._driver.end()
        return seconds

    def close(self) -> None:
        self._driver.engine.close()


def naive(kind: type[RecomputeDecoder] | type[ContiguousDecoder]) -> Callable[[argparse.Namespace, Path], Decoder]:
    return lambda args, directory: Naive(kind(*load_model(args, directory)), args.device)


def engine(**options: Any) -> Callable[[argparse.Namespace, Path], Decoder]:
    return lambda args, directory: Stepped(Engine(engine_config(args, directory, max_num_seqs=1, **options)))


# From the bottom up.
NAIVE = [Rung("recompute", naive(RecomputeDecoder)), Rung("contiguous KV cache", naive(ContiguousDecoder))]
PAGED = Rung("paged, reference kernels", engine(kernels="reference", pipeline_depth=1))
RUNGS = {
    "cuda": [
        *NAIVE,
        PAGED,
        Rung("Triton, one kernel per operation", engine(kernels="separate", pipeline_depth=1)),
        Rung("+ fused decode chain", engine(kernels="auto", enforce_eager=True, pipeline_depth=1)),
        Rung("+ CUDA graphs, dependent launch", engine(kernels="auto", pipeline_depth=1)),
        Rung("+ overlapped steps", engine(kernels="auto", pipeline_depth=2)),
    ],
    "cpu": [
        *NAIVE,
        PAGED,
        Rung("kernels for the CPU", engine(kernels="auto", pipeline_depth=1)),
        Rung("+ overlapped steps", engine(kernels="auto", pipeline_depth=2)),
    ],
}


def climb(rung: Rung, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One rung at every context; what it held on the device is free again afterwards."""
    vocab = load_model_config(directory).vocab_size
    decoder = rung.build(args, directory)
    result: dict[str, Any] = {"rung": rung.name, "contexts": {}}
    for context in args.contexts:
        (prompt,) = random_prompts(1, context, vocab, args.seed)
        tokens = decoder.generate(prompt, args.tokens)  # warms up
        seconds = [decoder.seconds_per_token(prompt, args.tokens) for _ in range(args.rounds)]
        result["contexts"][context] = {"ms_per_token": spread([1e3 * s for s in seconds]), "tokens": tokens}
    decoder.close()
    del decoder
    release(args.device)
    return result


def equal_tokens(results: list[dict[str, Any]]) -> None:
    """Note how far each rung's tokens are the first engine rung's."""
    reference = next(result for result in results if result["rung"] == PAGED.name)
    for result in results:
        for context, figures in result["contexts"].items():
            expected = reference["contexts"][context]["tokens"]
            same = [a == b for a, b in zip(figures["tokens"], expected, strict=True)]
            figures["tokens_equal"] = same.index(False) if False in same else len(same)


def rows(results: list[dict[str, Any]], contexts: list[int], limits: dict[int, float]) -> list[list[str]]:
    base = {context: figures["ms_per_token"]["median"] for context, figures in results[0]["contexts"].items()}
    made = []
    for result in results:
        for context in contexts:
            figures = result["contexts"][context]
            ms = figures["ms_per_token"]
            made.append(
                [
                    result["rung"],
                    str(context),
                    f"{1e3 / ms['median']:.1f}",
                    f"{1e3 / ms['max']:.1f}-{1e3 / ms['min']:.1f}",
                    f"{ms['median']:.3f}",
                    f"{base[context] / ms['median']:.2f}x",
                    f"{100 * limits[context] / ms['median']:.1f} %",
                    f"{figures['tokens_equal']} of {len(figures['tokens'])}",
                ]
            )
    return made


HEADER = ["rung", "context", "tok/s", "min-max", "ms/token", "of the first", "of read bw", "tokens equal"]


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=3)
    engine_options(made)
    made.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    made.add_argument("--tokens", type=int, default=32, help="decoded in every measurement")
    return made.parse_args()


def main() -> None:
    args = arguments()
    found = bandwidths(args.device)
    with model_directory(args) as directory:
        config = load_model_config(directory)
        results = [climb(rung, args, directory) for rung in RUNGS[args.device]]
    equal_tokens(results)
    itemsize = 4 if (args.dtype if args.dtype != "auto" else config.dtype) == "float32" else 2
    read = found["read"]["median"]
    limits = {c: 1e3 * step_bytes(config, itemsize, 1, c + args.tokens / 2) / read for c in args.contexts}
    print(bandwidth_lines(found))
    print(table(HEADER, rows(results, args.contexts, limits)))
    finish(args, "ladder", {"bandwidth": found, "rungs": results})


if __name__ == "__main__":
    main()
