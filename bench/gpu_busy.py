"""How busy a GPU is: the union of its kernels' intervals, from torch.profiler."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType


def busy_and_span(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Length of the union of (start, end) intervals, and from the first start to the last end."""
    busy, reached, first = 0, None, None
    for start, end in sorted(intervals):
        if reached is None or first is None:
            first = reached = start
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return (0, 0) if reached is None or first is None else (busy, reached - first)


def profile_kernels(work: Callable[[], object], steps: int) -> dict[str, Any]:
    """Run ``work``, ``steps`` steps of it, under the profiler.

    ``idle_share`` is 1 - union of the kernels' intervals / time from the first to the last of them; ``top`` the five
    kernels that cost most, in microseconds per step.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    kernels = [event for event in _device_events(profile) if not event.name().startswith(("Memcpy", "Memset"))]
    intervals = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in kernels]
    busy, span = busy_and_span(intervals)
    by_name: dict[str, int] = {}
    for event in kernels:
        by_name[event.name()] = by_name.get(event.name(), 0) + event.duration_ns()
    top = sorted(by_name.items(), key=lambda item: -item[1])[:5]
    return {
        "idle_share": 1 - busy / span if span else None,
        "kernels_per_step": len(kernels) / steps,
        "busy_us_per_step": busy / 1e3 / steps,
        "top": {name[:80]: nanoseconds / 1e3 / steps for name, nanoseconds in top},
    }


def _device_events(profile: Any) -> list[Any]:
    events = profile.profiler.kineto_results.events()
    return [event for event in events if event.device_type() == DeviceType.CUDA]
