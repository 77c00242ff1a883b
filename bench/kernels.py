"""Every kernel on a model's shapes: time, bandwidth and operations, beside what the GPU can do.

    python -m bench.kernels --json bench/results/kernels.json
    python -m bench.kernels --only attention --contexts 1024 --tokens 1 32
    python -m bench.kernels --device cpu --shape nano --tokens 1 3 --contexts 20 --prefills 24 --rounds 1

On a GPU the calls are captured in a CUDA graph that goes round at least 8 copies of what the kernel reads, more than
the caches hold; a kernel that waits for the host cannot be captured and is timed as it is (`eager`). `of read bw` and
`of matmul` compare with the read bandwidth and a large product measured in this run; `torch` is `F.linear` on the
same copies, in turn with ours. The kernels of the decode chain run under dependent launch as there; `plain us` is the
time without. They are Triton's: on a CPU they are left out, unless TRITON_INTERPRET=1.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.kernel_cases import BUILDERS, Bench, Call, Case, decode_attention
from bench.limits import bandwidth_lines, bandwidths, matmul_rate, seconds_of, synchronize
from bench.options import finish, model_directory, parser
from bench.report import spread, table
from engine.model.config import load_model_config
from engine.model.loader import DTYPES

GRAPH_SECONDS = 2e-3  # of one replay, so that launching it does not count
MOST_CALLS = 2048


class Timed:
    """One list of calls, ready to be timed as a whole: a CUDA graph, or the calls themselves."""

    def __init__(self, calls: list[Call], device: str) -> None:
        self._calls, self._device = calls, device
        self._graph: torch.cuda.CUDAGraph | None = None
        for call in calls:  # compiles, and caches what the first call computes
            call()
        synchronize(device)
        if device == "cuda" and not _waits_for_host(calls[0]):
            self._record()

    @property
    def mode(self) -> str:
        return "graph" if self._graph is not None else "eager"

    def seconds(self, repeats: int) -> list[float]:
        """Seconds of one call, ``repeats`` times measured."""
        work = self._run if self._graph is None else self._graph.replay
        return [seconds / len(self._calls) for seconds in seconds_of(work, self._device, repeats)]

    def _run(self) -> None:
        for call in self._calls:
            call()

    def _record(self) -> None:
        """One lap tells how many take long enough: launched one by one, calls would seem longer than they are."""
        lap = self._calls
        self._graph = self._captured()
        one = min(seconds_of(self._graph.replay, "cuda", 3))
        laps = min(-int(-GRAPH_SECONDS // one), MOST_CALLS // len(lap))
        if laps > 1:
            self._calls = lap * laps
            self._graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph


def _waits_for_host(call: Call) -> bool:
    """Whether a call synchronises, so that it cannot be part of a graph."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@torch.inference_mode()
def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """Microseconds of one call, ours and torch's in turn."""
    result: dict[str, Any] = {"kernel": case.name, "size": case.size, "bytes": case.nbytes, "flops": case.flops}
    if not case.calls:
        return result | {"skipped": "its copies do not fit"}
    ours = Timed(case.calls, device)
    others = {name: Timed(calls, device) for name, calls in (("torch", case.peer), ("plain", case.plain)) if calls}
    times: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(rounds):
        times += ours.seconds(5)
        for name, other in others.items():
            theirs[name] += other.seconds(5)
    result |= {"mode": ours.mode, "copies": len(case.calls), "us": spread([1e6 * t for t in times])}
    return result | {f"{name}_us": spread([1e6 * t for t in some]) for name, some in theirs.items()}


def add_shares(result: dict[str, Any], read: float, matmul: float) -> None:
    if "skipped" in result:
        return
    seconds = result["us"]["median"] / 1e6
    result["bytes_per_second"] = result["bytes"] / seconds
    result["flops_per_second"] = result["flops"] / seconds
    result["share_of_read_bandwidth"] = result["bytes_per_second"] / read
    result["share_of_matmul"] = result["flops_per_second"] / matmul


HEADER = [
    "kernel", "size", "us", "min-max", "GB/s", "of read bw", "TFLOP/s", "of matmul", "plain us", "torch us", "mode",
]  # fmt: skip


def row(result: dict[str, Any]) -> list[str]:
    head = [result["kernel"], result["size"]]
    if "skipped" in result:
        return [*head, "skipped", *[""] * (len(HEADER) - 3)]
    us = result["us"]
    return [
        *head,
        f"{us['median']:.2f}",
        f"{us['min']:.2f}-{us['max']:.2f}",
        f"{result['bytes_per_second'] / 1e9:.0f}",
        f"{100 * result['share_of_read_bandwidth']:.1f} %",
        f"{result['flops_per_second'] / 1e12:.2f}" if result["flops"] else "",
        f"{100 * result['share_of_matmul']:.1f} %" if result["flops"] else "",
        *(f"{result[name]['median']:.2f}" if name in result else "" for name in ("plain_us", "torch_us")),
        result["mode"],
    ]


def builders(device: str) -> list[Callable[[Bench], Iterator[Case]]]:
    """All that can run; what Triton has is imported where Triton runs only."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return BUILDERS
    from bench.chain_cases import CHAIN_BUILDERS

    return [*(builder for builder in BUILDERS if builder is not decode_attention), *CHAIN_BUILDERS]


def cases(bench: Bench, only: list[str]) -> Iterator[Case]:
    """The cases of every builder whose name contains one of ``only``, or of all."""
    for builder in builders(bench.device):
        if not only or any(word in builder.__name__ for word in only):
            yield from builder(bench)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, rounds=5)
    made.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128, 2048], help="rows of a step")
    made.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192], help="of decode attention")
    made.add_argument("--prefills", type=int, nargs="+", default=[512, 2118, 8192], help="of prefill attention")
    made.add_argument("--only", nargs="*", default=[], metavar="WORD", help="builders whose name contains one of these")
    return made.parse_args()


def main() -> None:
    args = arguments()
    with model_directory(args) as directory:
        config = load_model_config(directory)
    dtype = DTYPES[config.dtype if args.dtype == "auto" else args.dtype]
    found, matmul = bandwidths(args.device), matmul_rate(args.device, dtype)
    torch.manual_seed(args.seed)
    bench = Bench(config, args.device, dtype, args.tokens, args.contexts, args.prefills)
    results = []
    for case in cases(bench, args.only):
        results.append(measure(case, args.device, args.rounds))
        add_shares(results[-1], found["read"]["median"], matmul["median"])
    print(bandwidth_lines(found), f"matmul: {matmul['median'] / 1e12:.2f} TFLOP/s", sep="\n")
    print(table(HEADER, [row(result) for result in results]))
    finish(args, "kernels", {"bandwidth": found, "matmul": matmul, "kernels": results})


if __name__ == "__main__":
    main()
