"""The server under load over gRPC: latencies, tokens per message, goodput, and the CPU time of every process.

    python -m bench.serve --concurrency 1 8 32 128 --json bench/results/serve.json
    python -m bench.serve --rates 4 8 16 --prompt-tokens exp:512 --prefix-tokens 1024 --prefix-share 0.5
    python -m bench.serve --device cpu --shape nano --concurrency 2 --requests 4 --output-tokens 8 --clients 1

Starts picovllm-serve with the shape's random weights, or uses the one at --address, and loads it from several client
processes with prompts of token ids. Each of --concurrency keeps so many requests alive; each of --rates sends them as
a Poisson process. TTFT: from sending a request to its first content message. TPOT: (end - first) / (tokens - 1) of
a request. ICL: the gap between two messages of a stream; with several tokens in a message it is no TPOT. Goodput:
requests per second that kept both limits.

The first requests of --concurrency are sent at once, which is a burst of prompts: their TTFT is `burst` and counts
nowhere else, and their outputs are cut at random so that the loops fall out of step. `full tok/s` is the rate from the
last of their first tokens to the sending of the last request: while all are alive. `tok/s` is that of the whole run.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.options import finish, model_directory, parser, weights_seed
from bench.report import percentiles, table
from bench.server import Server, running, started
from bench.workload import Lengths, Planned, Workload, split

START_DELAY = 0.5  # from the last client's readiness to the first request


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[Server]:
    if args.address is not None:
        yield running(args.address, args.admin_address)
        return
    with model_directory(args, tokenizer=True) as directory, tempfile.TemporaryDirectory() as folder:
        options = ["--model", str(directory), "--device", args.device, "--dtype", args.dtype, "--log-level", "warning"]
        if (seed := weights_seed(args, directory)) is not None:
            options += ["--random-weights", str(seed)]
        with started([*options, *shlex.split(args.server)], Path(folder)) as server:
            yield server


def run_clients(
    server: Server, planned: list[Planned], workers: int, seed: str, args: argparse.Namespace
) -> list[Any]:
    """Each client's answer: its CPU time and its requests. ``workers`` requests alive in all, 0 = as they are due."""
    count = min(args.clients, workers) if workers else args.clients
    common = {
        "address": server.address, "vocab_size": server.vocab_size, "seed": seed, "connections": args.connections,
    }  # fmt: skip
    clients = []
    for number, share in enumerate(split(planned, count)):
        own = workers // count + (number < workers % count)
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.load_client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        clients.append(process)
        _say(process, json.dumps(common | {"requests": share, "workers": own}))
    try:
        for process in clients:
            if _hear(process) != "ready":
                raise SystemExit("a client could not connect; its error is above")
        start = time.monotonic() + START_DELAY
        for process in clients:
            _say(process, repr(start))
        return [json.loads(_hear(process)) for process in clients]
    finally:
        for process in clients:
            process.kill()
            process.communicate()


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def measure(
    server: Server, name: str, planned: list[Planned], workers: int, number: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One load, as a row of the report. The server's CPU time includes what little it does before the first request.

    The prompts of every load, and of every round ``number``, are its own: none is found in a cache of an earlier one.
    """
    before = server.cpu_seconds()
    answers = run_clients(server, planned, workers, f"{args.seed}-{name}-{number}", args)
    used = {worker: seconds - before[worker] for worker, seconds in server.cpu_seconds().items()}
    requests = [request for answer in answers for request in answer["results"]]
    clients = sum(answer["cpu_seconds"] for answer in answers)
    limits = (args.ttft_limit / 1e3, args.tpot_limit / 1e3)
    return {"load": name} | summary(requests, limits, workers) | {"cpu_seconds": used | {"clients": clients}}


def summary(requests: list[dict[str, Any]], limits: tuple[float, float], first_wave: int = 0) -> dict[str, Any]:
    """Latencies in milliseconds and rates per second; ``limits`` on TTFT and TPOT in seconds.

    The requests numbered below ``first_wave`` were sent at once: their TTFT is apart, ``first_wave_ttft_ms``.
    """
    done = [request for request in requests if "error" not in request and request["times"]]
    if not done:
        return {"requests": len(requests), "errors": _errors(requests), "tokens": 0}
    ttft = [request["times"][0] - request["sent"] for request in done]
    burst = [request["number"] < first_wave for request in done]
    tpot = [time_per_token(request) for request in done]
    gaps = [b - a for request in done for a, b in zip(request["times"], request["times"][1:], strict=False)]
    lags = [request["sent"] - request["at"] for request in done if request["at"] is not None]
    seconds = max(request["times"][-1] for request in done) - min(request["sent"] for request in done)
    tokens = sum(sum(request["tokens"]) for request in done)
    good = sum(t <= limits[0] and (p is None or p <= limits[1]) for t, p in zip(ttft, tpot, strict=True))
    return {
        "requests": len(requests),
        "errors": _errors(requests),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "full_tokens_per_second": full_rate(done, first_wave),
        "requests_per_second": len(done) / seconds,
        "goodput": good / seconds,
        "ttft_ms": percentiles([1e3 * value for value, early in zip(ttft, burst, strict=True) if not early]),
        "first_wave_ttft_ms": percentiles([1e3 * value for value, early in zip(ttft, burst, strict=True) if early]),
        "tpot_ms": percentiles([1e3 * value for value in tpot if value is not None]),
        "icl_ms": percentiles([1e3 * value for value in gaps]),
        "tokens_per_message": tokens / sum(len(request["times"]) for request in done),
        "send_lag_ms": percentiles([1e3 * value for value in lags]),
    }


def full_rate(done: list[dict[str, Any]], first_wave: int) -> float | None:
    """Tokens per second while ``first_wave`` requests were alive and past their first burst; None without one."""
    begin = max((r["times"][0] for r in done if r["number"] < first_wave), default=None)
    end = max((r["sent"] for r in done if r["number"] >= first_wave), default=None)
    if begin is None or end is None or end <= begin:
        return None
    messages = [message for r in done for message in zip(r["times"], r["tokens"], strict=True)]
    return sum(tokens for time, tokens in messages if begin < time <= end) / (end - begin)


def time_per_token(request: dict[str, Any]) -> float | None:
    """TPOT: (end - first) / (tokens - 1); None for a single token."""
    tokens, times = sum(request["tokens"]), request["times"]
    return (times[-1] - times[0]) / (tokens - 1) if tokens > 1 else None


def _errors(requests: list[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for request in requests:
        if "error" in request:
            counts[request["error"]] = counts.get(request["error"], 0) + 1
    return counts


HEADER = [
    "load", "req/s", "tok/s", "full tok/s", "TTFT p50", "p99", "burst p50", "p99", "TPOT p50", "p99", "ICL p50", "p99",
    "tok/msg", "goodput", "front us/tok", "engine", "clients",
]  # fmt: skip


def row(result: dict[str, Any]) -> list[str]:
    if not result["tokens"]:
        return [result["load"], "no request was answered", *[""] * (len(HEADER) - 2)]

    def times(name: str) -> list[str]:
        found = result[name]
        return [f"{found[p]:.2f}" if found else "" for p in ("p50", "p99")]

    def cpu(kind: str) -> str:
        used = [seconds for name, seconds in result["cpu_seconds"].items() if name.startswith(kind)]
        return f"{1e6 * sum(used) / result['tokens']:.1f}" if used else ""

    return [
        result["load"],
        f"{result['requests_per_second']:.2f}",
        f"{result['tokens_per_second']:.0f}",
        f"{result['full_tokens_per_second']:.0f}" if result["full_tokens_per_second"] else "",
        *times("ttft_ms"),
        *times("first_wave_ttft_ms"),
        *times("tpot_ms"),
        *times("icl_ms"),
        f"{result['tokens_per_message']:.2f}",
        f"{result['goodput']:.2f}",
        *(cpu(kind) for kind in ("front", "engine", "clients")),
    ]


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=1)
    add = made.add_argument
    add("--address", metavar="TARGET", help="a server that runs already; unset = start one")
    add("--admin-address", metavar="TARGET", help="of that server, on this machine: for the CPU time of its processes")
    add("--server", default="", metavar="OPTIONS", help="more options of picovllm-serve, in one argument")
    add("--clients", type=int, default=4, help="client processes")
    add("--connections", type=int, default=2, help="of each client process")
    add("--concurrency", type=int, nargs="*", default=[], help="requests kept alive")
    add("--rates", type=float, nargs="*", default=[], help="requests per second")
    add("--requests", type=int, metavar="N", help="sent under each load; unset = 4 of each kept alive or 10 s, >= 24")
    add("--prompt-tokens", type=Lengths.parse, default="512", metavar="N|A-B|exp:MEAN", help="after the prefix")
    add("--output-tokens", type=Lengths.parse, default="128", metavar="N|A-B|exp:MEAN")
    add("--prefix-tokens", type=int, default=0, metavar="N", help="of a shared prefix")
    add("--prefixes", type=int, default=1, metavar="N", help="different shared prefixes")
    add("--prefix-share", type=float, default=0.0, metavar="X", help="share of the requests that begin with one")
    add("--ttft-limit", type=float, default=200.0, metavar="MS", help="for goodput")
    add("--tpot-limit", type=float, default=20.0, metavar="MS", help="for goodput")
    args = made.parse_args()
    if not args.concurrency and not args.rates:
        args.concurrency = [1, 8, 32, 128]
    return args


def requests_of(args: argparse.Namespace, workers: int, rate: float | None) -> int:
    return args.requests or max(24, 4 * workers, round(10 * (rate or 0)))


def main() -> None:
    args = arguments()
    workload = Workload(
        args.prompt_tokens, args.output_tokens, args.prefix_tokens, args.prefixes, args.prefix_share, args.seed
    )
    loads = [(f"{n} at once", n, None) for n in args.concurrency] + [(f"{r:g} per s", 0, r) for r in args.rates]
    with server_of(args) as server:
        results = [
            measure(server, name, workload.plan(requests_of(args, workers, rate), rate, workers), workers, number, args)
            for number in range(args.rounds)
            for name, workers, rate in loads
        ]
    print("times in milliseconds, CPU in microseconds per token")
    print(table(HEADER, [row(result) for result in results]))
    for result in results:
        for error, count in result["errors"].items():
            print(f"{result['load']}: {count} of {result['requests']} failed: {error}")
    if server.ready_seconds is not None:
        print(f"ready after {server.ready_seconds:.1f} s, first token after {server.first_token_seconds:.1f} s")
    start = {"ready_seconds": server.ready_seconds, "first_token_seconds": server.first_token_seconds}
    args.prompt_tokens, args.output_tokens = vars_of(args.prompt_tokens), vars_of(args.output_tokens)
    finish(args, "serve", {"start": start, "rows": results})


def vars_of(lengths: Lengths) -> str:
    return f"{lengths.kind} {lengths.low} {lengths.high}"


if __name__ == "__main__":
    main()
