"""The prefix cache: time to first token off, cold and warm, what it costs where nothing repeats, and its own CPU time.

    python -m bench.prefix_cache --json bench/results/prefix_cache.json
    python -m bench.prefix_cache --device cpu --shape nano --scale 0.05 --rounds 2

Scenarios: three system prompts of 144 tokens in three rounds; 2,083 shared and 28 to 48 own tokens, eight times; 0, 50
and 98 % of 2,048 tokens shared; a chat of six turns whose answers are part of the next prompt. `off` is an engine
without the cache, `cold` the first request of a prefix, `warm` the later ones. One request at a time, one token each.
"""

import random
import time
from collections.abc import Callable
from typing import Any

from bench import vllm
from bench.driver import facts
from bench.options import engine_config, engine_options, finish, model_directory, parser
from bench.report import spread, table
from engine.engine import Engine
from engine.output_prefixes import OutputPrefixes
from engine.outputs import RequestDone, TokenOutput
from engine.sampling_params import SamplingParams

Prompt = list[int]
# Named groups of prompts, in the order they are sent; each prompt is "cold" or "warm".
Scenario = list[tuple[str, Prompt]]


class Clock:
    """Adds up the time inside the methods that a request's way through the cache consists of."""

    METHODS = ("take", "written", "leave")

    def __init__(self, prefixes: OutputPrefixes | None) -> None:
        self.seconds = 0.0
        for name in self.METHODS if prefixes is not None else ():
            setattr(prefixes, name, self._timed(getattr(prefixes, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def tokens(rng: random.Random, count: int, vocab: int) -> Prompt:
    return rng.choices(range(3, vocab), k=count)


def scenarios(scale: float, vocab: int, seed: int) -> dict[str, Scenario]:
    """Prompts of every scenario; ``scale`` shortens them."""
    rng = random.Random(seed)

    def length(full: int) -> int:
        return max(int(full * scale), 20)

    systems = [tokens(rng, length(144), vocab) for _ in range(3)]
    shared = tokens(rng, length(2083), vocab)
    made: dict[str, Scenario] = {
        "3 prompts of 144, 3 rounds": [("warm" if turn else "cold", p) for turn in range(3) for p in systems],
        "2,083 shared + 28-48": [
            ("warm" if i else "cold", shared + tokens(rng, rng.randrange(28, 49), vocab)) for i in range(8)
        ],
    }
    for percent in (0, 50, 98):
        common = tokens(rng, length(2048) * percent // 100, vocab)
        rest = length(2048) - len(common)
        made[f"{percent} % of 2,048"] = [
            ("warm" if i and percent else "cold", common + tokens(rng, rest, vocab)) for i in range(8)
        ]
    return made


def first_token(engine: Engine, prompt: Prompt, max_tokens: int = 1) -> tuple[float, int, Prompt]:
    """Seconds to the first token, cached prompt tokens, and the tokens, of one request alone."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    engine.add("0", prompt, params)
    first, cached, out = 0.0, 0, []
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, TokenOutput):
                first = first or time.perf_counter() - start
                out.append(event.token_id)
            elif isinstance(event, RequestDone):
                cached = event.usage.cached_prompt_tokens
    return first, cached, out


def run_scenario(engines: dict[str, tuple[Engine, Clock]], scenario: Scenario, rounds: int) -> dict[str, Any]:
    """First-token times by kind; a round begins with an empty cache. Off and on take turns."""
    times: dict[str, list[float]] = {"off": [], "cold": [], "warm": []}
    cached: dict[str, list[int]] = {"cold": [], "warm": []}
    cpu: list[float] = []
    for number in range(rounds + 1):
        on, clock = engines["on"]
        on.flush_cache()
        for kind, prompt in scenario:
            off_seconds = first_token(engines["off"][0], prompt)[0]
            before = clock.seconds
            seconds, hit, _ = first_token(on, prompt)
            if number:  # the first round warms up
                times["off"].append(1e3 * off_seconds)
                times[kind].append(1e3 * seconds)
                cached[kind].append(hit)
                cpu.append(1e6 * (clock.seconds - before))
    return {
        **{f"{kind}_ms": spread(values) for kind, values in times.items() if values},
        "cached_tokens": {kind: max(values) for kind, values in cached.items() if values},
        "prompt_tokens": max(len(prompt) for _, prompt in scenario),
        "cache_cpu_us": spread(cpu),
    }


def run_chat(
    engines: dict[str, tuple[Engine, Clock]], turns: int, scale: float, vocab: int, seed: int
) -> dict[str, Any]:
    """Each turn's prompt is all that was said; 64 tokens are answered. Times of the last turn."""
    rng = random.Random(seed)
    result: dict[str, Any] = {}
    opening = tokens(rng, max(int(500 * scale), 20), vocab)
    questions = [tokens(rng, max(int(60 * scale), 5), vocab) for _ in range(turns)]
    for name, (engine, _) in engines.items():
        engine.flush_cache()
        said, seconds = list(opening), []
        for question in questions:
            said += question
            first, cached, answer = first_token(engine, said, max_tokens=max(int(64 * scale), 4))
            seconds.append(1e3 * first)
            result[f"{name}_cached_last"] = cached
            said += answer
        result[f"{name}_last_turn_ms"] = seconds[-1]
        result["prompt_tokens"] = len(said)
    return result


def main() -> None:
    made = parser(__doc__, rounds=5)
    engine_options(made)
    made.add_argument("--scale", type=float, default=1.0, help="of all prompt lengths")
    args = made.parse_args()
    with model_directory(args) as directory:
        engines: dict[str, tuple[Engine, Clock]] = {}
        for name, enabled in (("off", False), ("on", True)):
            options: dict[str, Any] = {"prefix_cache": enabled}
            if args.device == "cuda" and args.num_gpu_blocks is None:
                options["gpu_memory_utilization"] = 0.4 if name == "off" else 0.8
            engine = Engine(engine_config(args, directory, **options))
            engines[name] = engine, Clock(engine._scheduler.prefixes)
    vocab = engines["on"][0].info.limits.vocab_size
    results = {
        name: run_scenario(engines, scenario, args.rounds)
        for name, scenario in scenarios(args.scale, vocab, args.seed).items()
    }
    chat = run_chat(engines, 6, args.scale, vocab, args.seed)
    print(table(HEADER, [row(name, result) for name, result in results.items()]))
    print(
        f"chat, turn 6 of {chat['prompt_tokens']} tokens: {chat['off_last_turn_ms']:.2f} ms off, "
        f"{chat['on_last_turn_ms']:.2f} ms on ({chat['on_cached_last']} cached)"
    )
    if vllm.comparable(None if args.model else args.shape, args.device, engines["on"][0].info.dtype):
        print(f"vLLM 0.26.0, 2,118 tokens: cold 27.5 ms, with 2,083 cached 12.9 ms ({vllm.SOURCE})")
    content = {"engine": facts(engines["on"][0]), "scenarios": results, "chat": chat}
    finish(args, "prefix_cache", content)


HEADER = ["scenario", "tokens", "cached", "off ms", "cold ms", "warm ms", "min-max", "cache CPU us"]


def row(name: str, result: dict[str, Any]) -> list[str]:
    warm = result.get("warm_ms")
    return [
        name,
        str(result["prompt_tokens"]),
        str(result["cached_tokens"].get("warm", 0)),
        f"{result['off_ms']['median']:.2f}",
        f"{result['cold_ms']['median']:.2f}",
        f"{warm['median']:.2f}" if warm else "",
        f"{warm['min']:.2f}-{warm['max']:.2f}" if warm else "",
        f"{result['cache_cpu_us']['median']:.0f}",
    ]


if __name__ == "__main__":
    main()
