"""Prefill: time to the first token of prompts of several lengths, one and eight at once, beside transformers.

    python -m bench.prefill --json bench/results/prefill.json
    python -m bench.prefill --device cpu --shape nano --prompts 24 --counts 1 2 --rounds 2

Every round has prompts of its own, so that nothing of them is cached. The time runs from `Engine.add` of the first
prompt to the first token of the last one on the host; `tok/s` are prompt tokens by it. `of matmul` compares the
operations that the prompts cannot do without with a large product measured in this run.
"""

import argparse
from pathlib import Path
from typing import Any

from bench import vllm
from bench.driver import Driver, facts, random_prompts
from bench.limits import matmul_rate
from bench.model_math import prefill_flops
from bench.options import engine_config, engine_options, finish, load_model, model_directory, parser
from bench.report import spread, table
from engine.engine import Engine
from engine.model.config import ModelConfig, load_model_config
from engine.model.loader import DTYPES

PEER = "transformers sdpa"


def measure_case(driver: Driver, peer: Any, length: int, count: int, rounds: int, seed: int) -> dict[str, Any]:
    """One row; ours and the peer take turns. The first round warms up and does not count."""
    case: dict[str, Any] = {"prompt": length, "count": count}
    if (reason := reason_to_skip(driver.engine, length, count)) is not None:
        return case | {"skipped": reason}
    vocab = driver.engine.info.limits.vocab_size
    firsts, lasts, theirs = [], [], []
    for number in range(rounds + 1):
        prompts = random_prompts(count, length, vocab, seed + number)
        times = driver.first_tokens(prompts)
        peer_seconds = peer(prompts) if peer else None
        if number:
            firsts.append(1e3 * times[0])
            lasts.append(1e3 * times[-1])
            theirs += [] if peer_seconds is None else [1e3 * peer_seconds]
    case |= {"first_ms": spread(firsts), "last_ms": spread(lasts)}
    return case | ({"peer_ms": spread(theirs)} if theirs else {})


def reason_to_skip(engine: Engine, length: int, count: int) -> str | None:
    limits = engine.info.limits
    if length + 1 > limits.max_model_len:
        return f"{length} tokens and one more are over the context of {limits.max_model_len}"
    blocks = count * -(-(length + 1) // limits.block_size)
    if blocks + limits.num_blocks // 16 > limits.num_blocks:
        return f"{blocks} KV blocks and some spare ones are needed, there are {limits.num_blocks}"
    return None


def add_rates(case: dict[str, Any], config: ModelConfig, matmul: float) -> None:
    if "skipped" in case:
        return
    seconds = case["last_ms"]["median"] / 1e3
    case["tokens_per_second"] = case["prompt"] * case["count"] / seconds
    case["share_of_matmul"] = prefill_flops(config, case["prompt"], case["count"]) / seconds / matmul


HEADER = ["prompts", "ms to last", "min-max", "ms to first", "tok/s", "of matmul", PEER, "min-max", "vLLM"]


def row(case: dict[str, Any], quoted: bool) -> list[str]:
    head = [f"{case['count']} x {case['prompt']}"]
    if "skipped" in case:
        return [*head, "skipped", *[""] * 7]
    last, peer = case["last_ms"], case.get("peer_ms")
    published = vllm.PREFILL.get((case["prompt"], case["count"])) if quoted else None
    return [
        *head,
        f"{last['median']:.2f}",
        f"{last['min']:.2f}-{last['max']:.2f}",
        f"{case['first_ms']['median']:.2f}",
        f"{case['tokens_per_second']:.0f}",
        f"{100 * case['share_of_matmul']:.1f} %",
        f"{peer['median']:.2f}" if peer else "",
        f"{peer['min']:.2f}-{peer['max']:.2f}" if peer else "",
        f"{published:.1f}" if published else "",
    ]


def make_peer(args: argparse.Namespace, directory: Path) -> Any:
    if not args.peer:
        return None
    from bench.peer import first_token_seconds, transformers_model  # transformers takes seconds to import

    model = transformers_model(directory, load_model(args, directory)[1], attention="sdpa")
    return lambda prompts: first_token_seconds(model, prompts)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=7)
    engine_options(made)
    made.add_argument("--prompts", type=int, nargs="+", default=[144, 512, 2118, 8192], metavar="TOKENS")
    made.add_argument("--counts", type=int, nargs="+", default=[1, 8], help="prompts at once")
    made.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="transformers")
    return made.parse_args()


def main() -> None:
    args = arguments()
    with model_directory(args) as directory:
        model = load_model_config(directory)
        peer = make_peer(args, directory)
        driver = Driver(Engine(engine_config(args, directory)))
        matmul = matmul_rate(args.device, DTYPES[driver.engine.info.dtype])
        cases = [
            measure_case(driver, peer, length, count, args.rounds, args.seed)
            for length in args.prompts
            for count in args.counts
        ]
    for case in cases:
        add_rates(case, model, matmul["median"])
    quoted = vllm.comparable(None if args.model else args.shape, args.device, driver.engine.info.dtype)
    print(f"matmul: {matmul['median'] / 1e12:.2f} TFLOP/s")
    print(table(HEADER, [row(case, quoted) for case in cases]))
    for case in cases:
        if "skipped" in case:
            print(f"skipped {case['count']} x {case['prompt']}: {case['skipped']}")
    if quoted:
        print(f"vLLM: {vllm.SOURCE}")
    content = {"engine": facts(driver.engine), "matmul": matmul, "cases": cases}
    finish(args, "prefill", content | {"vllm": vllm.SOURCE if quoted else None})


if __name__ == "__main__":
    main()
