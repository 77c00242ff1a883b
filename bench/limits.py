"""What the hardware can do, measured in the run whose figures are compared with it."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.report import spread

# Far beyond any cache. On a CPU less does, and the dry runs stay short.
READ_BYTES = {"cuda": 5 * 1024**3, "cpu": 256 * 1024**2}
MATRIX_SIDE = {"cuda": 8192, "cpu": 512}
REPEATS = {"cuda": 20, "cpu": 3}


def synchronize(device: str) -> None:
    """Wait for everything that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give back the memory of what is no longer referred to, so that the next engine can have it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` calls, by events on the GPU and by the clock on the CPU; one call warms up.

    On a GPU every measured call stands behind one that is not, so that what it takes to launch it is over by then.
    """
    call()
    synchronize(device)
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return times


def read_bandwidth(device: str) -> dict[str, float]:
    """Bytes per second of reading alone: the faster of two reductions, over more than 4 GB on a GPU."""
    count = READ_BYTES[device] // 4
    floats = torch.randn(count, device=device)
    integers = floats.view(torch.int32)
    reductions: list[Callable[[], object]] = [floats.sum, integers.amax]
    rates = [_rates(call, device, 4.0 * count) for call in reductions]
    return max(rates, key=lambda rate: rate["median"])


def copy_bandwidth(device: str) -> dict[str, float]:
    """Bytes per second read and written by a copy."""
    count = READ_BYTES[device] // 8
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return _rates(lambda: target.copy_(source), device, 8.0 * count)


def matmul_rate(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Floating-point operations per second of a large square product of random matrices."""
    side = MATRIX_SIDE[device]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return _rates(lambda: torch.mm(left, right, out=out), device, 2.0 * side**3)


def bandwidths(device: str) -> dict[str, Any]:
    """Both bandwidths, for the JSON."""
    found = {"read": read_bandwidth(device), "copy": copy_bandwidth(device)}
    release(device)
    return found


def bandwidth_lines(found: dict[str, Any]) -> str:
    return "\n".join(
        f"{what} bandwidth: {rate['median'] / 1e9:.0f} GB/s ({rate['min'] / 1e9:.0f} to {rate['max'] / 1e9:.0f})"
        for what, rate in found.items()
    )


def _rates(call: Callable[[], object], device: str, amount: float) -> dict[str, float]:
    return spread([amount / seconds for seconds in seconds_of(call, device, REPEATS[device])])
