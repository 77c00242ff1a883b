"""Decoding: tokens per second of the whole engine over batch and context, beside the GPU's limit and transformers.

    python -m bench.decode --json bench/results/decode.json
    python -m bench.decode --device cpu --shape nano --batches 1 2 --contexts 16 --steps 3 --rounds 2

Tokens go in and come out through `Engine.add` and `Engine.step`, greedy, EOS ignored. A batch is admitted once; after
its warm-up it takes ``--rounds`` times ``--steps`` steps, so a row begins at its context and ends that much further on.
`of read bw` compares the bytes that a step must read (weights once, KV of every sequence) with the read bandwidth
measured in this run. `idle` is the share of some profiled steps in which no kernel ran. `cpu` is the engine's time per
step without its waits for the GPU. `whole run` counts prefill as well. Batches whose prompts together would take longer
to compute than what is measured, or that the KV pool cannot hold, are skipped and named.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import vllm
from bench.driver import Driver, facts, random_prompts
from bench.gpu_busy import profile_kernels
from bench.limits import bandwidth_lines, bandwidths
from bench.model_math import step_bytes
from bench.options import engine_config, engine_options, finish, load_model, model_directory, parser
from bench.report import spread, table
from engine.engine import Engine
from engine.model.config import ModelConfig, load_model_config
from engine.model.loader import DTYPES

WARM_UP = 10
EAGER, COMPILED = "transformers eager", "transformers static cache + compile"
WHOLE_RUN_TOKENS = 40_000  # of a batch's prompts; no whole runs beyond: they would measure prefill


@dataclass(frozen=True)
class Plan:
    """How a case is measured. ``prompt_tokens``: of a batch, at most."""

    rounds: int
    steps: int
    profiled: int
    whole_tokens: int
    prompt_tokens: int
    seed: int

    @property
    def new_tokens(self) -> int:
        return WARM_UP + self.rounds * self.steps + self.profiled


def reason_to_skip(engine: Engine, batch: int, context: int, new_tokens: int, prompt_tokens: int) -> str | None:
    """Why a case is not run on this engine, None when it is."""
    limits = engine.info.limits
    if batch * context > prompt_tokens:
        return f"its prompts have {batch * context} tokens, --max-prompt-tokens is {prompt_tokens}"
    if context + new_tokens > limits.max_model_len:
        return f"{context} + {new_tokens} tokens are more than the context of {limits.max_model_len}"
    blocks = batch * -(-(context + new_tokens) // limits.block_size)
    spare = min(batch, limits.num_blocks // 16)
    if blocks + spare > limits.num_blocks:
        return f"{blocks + spare} KV blocks are needed, there are {limits.num_blocks}"
    return None


def measure_case(driver: Driver, batch: int, context: int, plan: Plan, budget: int, peers: "Peers") -> dict[str, Any]:
    """One row. The peers take their turn within every round."""
    engine = driver.engine
    late = -(-batch * context // budget)  # steps that the first requests take while the last ones are computed
    new_tokens = plan.new_tokens + late + 2 * WARM_UP
    case: dict[str, Any] = {"batch": batch, "context": context}
    if (reason := reason_to_skip(engine, batch, context, new_tokens, plan.prompt_tokens)) is not None:
        return case | {"skipped": reason}
    prompts = random_prompts(batch, context, engine.info.limits.vocab_size, plan.seed)
    driver.begin(prompts, new_tokens)
    peer_rates = peers.begin(prompts)
    driver.steps(WARM_UP)
    rounds = []
    for _ in range(plan.rounds):
        rounds.append(driver.steps(plan.steps))
        peers.measure(peer_rates)
    case["tokens_per_second"] = spread([steps.rate for steps in rounds])
    case["step_ms"] = spread([1e3 * steps.wall / steps.count for steps in rounds])
    case["cpu_us_per_step"] = spread([1e6 * steps.cpu_per_step for steps in rounds])
    case["launch_us_per_step"] = spread([1e6 * steps.launch / steps.count for steps in rounds])
    case["peers"] = {name: spread(rates) for name, rates in peer_rates.items()}
    if plan.profiled:
        case["gpu"] = profile_kernels(lambda: driver.steps(plan.profiled), plan.profiled)
    driver.end()
    if plan.whole_tokens and batch * context <= WHOLE_RUN_TOKENS:
        runs = [driver.whole_run(prompts, plan.whole_tokens) for _ in range(min(plan.rounds, 3))]
        case["whole_run_tokens_per_second"] = spread(runs)
    return case


class Peers:
    """transformers at batch 1: eager, and with a static cache compiled for one context. Empty when not asked for."""

    def __init__(self, decoders: dict[str, Any], steps: int, compiled_context: int | None) -> None:
        self._decoders, self._steps, self._compiled_context = decoders, steps, compiled_context

    def begin(self, prompts: list[list[int]]) -> dict[str, list[float]]:
        """Compute the prompts and warm up; the rates of the peers that take part."""
        if len(prompts) > 1:
            return {}
        names = [n for n in self._decoders if n != COMPILED or len(prompts[0]) == self._compiled_context]
        for name in names:
            self._decoders[name].begin(prompts)
            self._decoders[name].steps(3)  # compiling and recording happen in the first steps
        return {name: [] for name in names}

    def measure(self, rates: dict[str, list[float]]) -> None:
        for name, values in rates.items():
            values.append(self._steps / self._decoders[name].steps(self._steps))


def make_peers(args: argparse.Namespace, directory: Path) -> Peers:
    if not args.peer:
        return Peers({}, 0, None)
    from bench.peer import PeerDecoder, transformers_model  # transformers takes seconds to import

    _, weights = load_model(args, directory)
    model = transformers_model(directory, weights)
    decoders = {EAGER: PeerDecoder(model)}
    # A static cache is read to its end: one of another context's size would be slower than it need be.
    context = min(args.contexts, key=lambda length: abs(length - args.compile_context))
    if args.compile:
        decoders[COMPILED] = PeerDecoder(model, context + args.rounds * args.peer_steps + 8)
    return Peers(decoders, args.peer_steps, context)


def add_shares(case: dict[str, Any], config: ModelConfig, itemsize: int, read: float, plan: Plan) -> None:
    """What the figure is of the limit that the measured read bandwidth sets."""
    if "skipped" in case:
        return
    context = case["context"] + WARM_UP + plan.rounds * plan.steps / 2
    needed = step_bytes(config, itemsize, case["batch"], context)
    case["bytes_per_step"] = needed
    case["limit_tokens_per_second"] = case["batch"] * read / needed
    case["share_of_read_bandwidth"] = needed / (case["step_ms"]["median"] / 1e3) / read


def row(case: dict[str, Any], quoted: bool) -> list[str]:
    head = [f"{case['batch']} x {case['context']}"]
    if "skipped" in case:
        return [*head, "skipped", *[""] * 8]
    rate, gpu, whole = case["tokens_per_second"], case.get("gpu"), case.get("whole_run_tokens_per_second")
    published = vllm.DECODE.get((case["batch"], case["context"])) if quoted else None
    return [
        *head,
        f"{rate['median']:.0f}",
        f"{rate['min']:.0f}-{rate['max']:.0f}",
        f"{case['step_ms']['median']:.3f}",
        f"{100 * case['share_of_read_bandwidth']:.1f} %",
        f"{100 * gpu['idle_share']:.1f} %" if gpu and gpu["idle_share"] is not None else "",
        f"{gpu['kernels_per_step']:.0f}" if gpu else "",
        f"{case['cpu_us_per_step']['median']:.0f}",
        f"{whole['median']:.0f}" if whole else "",
        f"{published:.0f}" if published else "",
    ]


HEADER = [
    "batch x context", "tok/s", "min-max", "ms/step", "of read bw", "idle", "kernels", "cpu us", "whole run", "vLLM",
]  # fmt: skip


def print_report(cases: list[dict[str, Any]], found: dict[str, Any], quoted: bool) -> None:
    print(bandwidth_lines(found))
    print(table(HEADER, [row(case, quoted) for case in cases]))
    for case in cases:
        where = f"{case['batch']} x {case['context']}"
        if "skipped" in case:
            print(f"skipped {where}: {case['skipped']}")
        for name, rate in case.get("peers", {}).items():
            print(f"{where}, {name}: {rate['median']:.1f} tok/s ({rate['min']:.1f} to {rate['max']:.1f})")
    if quoted:
        print(f"vLLM: {vllm.SOURCE}")


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=5)
    engine_options(made)
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    made.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    made.add_argument("--steps", type=int, default=50, help="of a round")
    made.add_argument("--profile-steps", type=int, default=100, metavar="N", help="under the profiler; 0 = none")
    made.add_argument("--whole-tokens", type=int, default=256, metavar="N", help="new tokens of a whole run; 0 = none")
    made.add_argument("--max-prompt-tokens", type=int, default=1_200_000, metavar="N", help="of a batch")
    made.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="transformers at batch 1")
    made.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the compiled peer; unset = on cuda")
    made.add_argument("--compile-context", type=int, default=1024, metavar="TOKENS", help="the one it compiles for")
    made.add_argument("--peer-steps", type=int, default=20, metavar="N", help="of a peer's round")
    args = made.parse_args()
    if args.compile is None:
        args.compile = args.device == "cuda"
    return args


def main() -> None:
    args = arguments()
    profiled = args.profile_steps if args.device == "cuda" else 0
    plan = Plan(args.rounds, args.steps, profiled, args.whole_tokens, args.max_prompt_tokens, args.seed)
    found = bandwidths(args.device)
    with model_directory(args) as directory:
        peers = make_peers(args, directory)
        model = load_model_config(directory)
        driver = Driver(Engine(engine_config(args, directory, max_num_seqs=max(args.batches))))
        cases = [
            measure_case(driver, batch, context, plan, args.max_num_batched_tokens, peers)
            for context in args.contexts
            for batch in args.batches
        ]
    info = driver.engine.info
    for case in cases:
        add_shares(case, model, DTYPES[info.dtype].itemsize, found["read"]["median"], plan)
    quoted = vllm.comparable(None if args.model else args.shape, args.device, info.dtype)
    print_report(cases, found, quoted)
    content = {"engine": facts(driver.engine), "bandwidth": found, "cases": cases}
    finish(args, "decode", content | {"vllm": vllm.SOURCE if quoted else None})


if __name__ == "__main__":
    main()
