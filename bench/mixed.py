"""Decoding streams while long prompts arrive: the gaps between a stream's tokens, and the prompts' time to first token.

    python -m bench.mixed --budgets 16384 512 --json bench/results/mixed.json
    python -m bench.mixed --device cpu --shape nano --streams 2 --prompt 40 --rates 0 20 --seconds 0.5 --budgets 64

In process, at the engine: 16 streams decode; prompts of 2,048 tokens that share nothing arrive, each for one token.
A gap is the time between two tokens of one stream, as the caller of `Engine.step` sees it. The rates take turns in
every round, and a row is what all of its rounds saw.
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

from bench import vllm
from bench.driver import Driver, random_prompts
from bench.limits import release
from bench.options import engine_config, engine_options, finish, model_directory, parser
from bench.report import percentiles, table
from engine.engine import Engine
from engine.outputs import TokenOutput
from engine.sampling_params import SamplingParams

WARM_UP = 20
STREAM_PROMPT = 128
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass
class Seen:
    """What was measured at one rate; times in seconds. ``late``: prompts without a token when their round ended."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    arrivals: int = 0
    late: int = 0
    tokens: int = 0
    seconds: float = 0.0


def arrival_times(rate: float, seconds: float, even: bool, seed: int) -> list[float]:
    """When prompts arrive, from 0 on: a Poisson process, or one every 1 / rate."""
    if rate == 0:
        return []
    if even:
        return [number / rate for number in range(int(seconds * rate))]
    generator, now, times = random.Random(seed), 0.0, list[float]()
    while (now := now + generator.expovariate(rate)) < seconds:
        times.append(now)
    return times


def run_round(driver: Driver, args: argparse.Namespace, rate: float, seconds: float, seed: int, seen: Seen) -> None:
    """One stretch at one rate, added to ``seen``."""
    limits = driver.engine.info.limits
    times = arrival_times(rate, seconds, args.even, seed)
    prompts = random_prompts(len(times), args.prompt, limits.vocab_size, seed)
    streams = random_prompts(args.streams, STREAM_PROMPT, limits.vocab_size, seed)
    driver.begin(streams, limits.max_model_len - STREAM_PROMPT)
    driver.steps(WARM_UP)
    start = time.perf_counter()
    last, waiting = dict.fromkeys((str(n) for n in range(args.streams)), start), dict[str, float]()
    sent, now = 0, start
    while now < start + seconds:
        while sent < len(times) and start + times[sent] <= now:
            waiting[f"prompt-{sent}"] = start + times[sent]
            driver.engine.add(f"prompt-{sent}", prompts[sent], ONE_TOKEN)
            sent += 1
        events = driver.engine.step().events
        now = time.perf_counter()
        for event in events:
            if not isinstance(event, TokenOutput):
                continue
            if event.request_id in waiting:
                seen.first_tokens.append(now - waiting.pop(event.request_id))
            else:
                seen.gaps.append(now - last[event.request_id])
                last[event.request_id] = now
                seen.tokens += 1
    seen.seconds += now - start
    seen.arrivals += sent
    seen.late += len(waiting)
    driver.end()


def measure(args: argparse.Namespace, directory: Any, budget: int) -> tuple[list[dict[str, Any]], str]:
    """A row for each rate under one chunk budget, and the dtype. A stretch at the highest rate warms up."""
    engine = Engine(engine_config(args, directory, max_num_batched_tokens=budget, max_num_seqs=args.max_num_seqs))
    driver = Driver(engine)
    run_round(driver, args, max(args.rates), min(args.seconds, 2.0), args.seed - 1, Seen())
    seen = {rate: Seen() for rate in args.rates}
    for number in range(args.rounds):
        for rate, so_far in seen.items():
            run_round(driver, args, rate, args.seconds, args.seed + number, so_far)
    engine.close()
    return [report_of(budget, rate, so_far) for rate, so_far in seen.items()], engine.info.dtype


def report_of(budget: int, rate: float, seen: Seen) -> dict[str, Any]:
    return {
        "budget": budget,
        "rate": rate,
        "gap_ms": percentiles([1e3 * gap for gap in seen.gaps]),
        "first_token_ms": percentiles([1e3 * time for time in seen.first_tokens]),
        "arrivals": seen.arrivals,
        "late": seen.late,
        "stream_tokens_per_second": seen.tokens / seen.seconds,
    }


HEADER = [
    "budget", "arrivals/s", "gap p50", "p90", "p99", "max", "TTFT p50", "p99", "late", "stream tok/s",
    "vLLM p50/p90/p99", "TTFT",
]  # fmt: skip


def row(result: dict[str, Any], quoted: bool) -> list[str]:
    gap, first = result["gap_ms"], result["first_token_ms"]
    published = vllm.MIXED.get((result["budget"], result["rate"])) if quoted else None
    return [
        str(result["budget"]),
        f"{result['rate']:g}",
        *(f"{gap[name]:.2f}" for name in ("p50", "p90", "p99", "max")),
        *(f"{first[name]:.1f}" if first else "" for name in ("p50", "p99")),
        f"{result['late']} of {result['arrivals']}",
        f"{result['stream_tokens_per_second']:.0f}",
        "{:.1f}/{:.1f}/{:.1f}".format(*published[:3]) if published else "",
        f"{published[3]:.0f}" if published and published[3] else "",
    ]


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=2)
    engine_options(made, budget=False)
    made.add_argument("--budgets", type=int, nargs="+", default=[16_384, 512], help="tokens of a step, an engine each")
    made.add_argument("--rates", type=float, nargs="+", default=[0, 5, 15, 30], help="prompts per second")
    made.add_argument("--streams", type=int, default=16, help="that decode")
    made.add_argument("--prompt", type=int, default=2048, metavar="TOKENS", help="of the prompts that arrive")
    made.add_argument("--seconds", type=float, default=6.0, help="of a round at one rate")
    made.add_argument("--even", action="store_true", help="arrivals at equal distances instead of a Poisson process")
    made.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="streams and prompts in one batch")
    return made.parse_args()


def main() -> None:
    args = arguments()
    results: list[dict[str, Any]] = []
    dtype = ""
    with model_directory(args) as directory:
        for budget in args.budgets:
            rows, dtype = measure(args, directory, budget)
            results += rows
            release(args.device)
    quoted = vllm.comparable(None if args.model else args.shape, args.device, dtype)
    print("times in milliseconds")
    print(table(HEADER, [row(result, quoted) for result in results]))
    if quoted:
        print(f"vLLM: {vllm.SOURCE}")
    finish(args, "mixed", {"rows": results, "vllm": vllm.SOURCE if quoted else None})


if __name__ == "__main__":
    main()
