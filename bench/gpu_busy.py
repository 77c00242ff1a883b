"""What a device did and when, from torch.profiler, and how busy that kept it."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Activity(NamedTuple):
    """A kernel or a copy, on a CPU an operation of torch; ``start`` and ``end`` in nanoseconds as of `time.time_ns`."""

    name: str
    start: int
    end: int
    stream: int = 0

    @property
    def is_copy(self) -> bool:
        return self.name.startswith(("Memcpy", "Memset"))

    @property
    def is_copy_to_host(self) -> bool:
        return self.name.startswith("Memcpy DtoH")


class Recording(NamedTuple):
    """``activities`` by their start; ``launches``: the driver's calls that started them, none on a CPU."""

    activities: list[Activity]
    launches: list[Activity]


def record(work: Callable[[], object], device: str) -> Recording:
    """Run ``work`` under the profiler. On a CPU only operations that are not part of another one count."""
    on_cuda = device == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiled:
        work()
        if on_cuda:
            torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()
    found = [(event.device_type(), _activity(event)) for event in events]
    on_host = [activity for kind, activity in found if kind == DeviceType.CPU]
    if not on_cuda:
        return Recording(outermost(on_host), [])
    on_device = [activity for kind, activity in found if kind == DeviceType.CUDA]
    launches = [call for call in on_host if "Launch" in call.name]
    return Recording(*(sorted(some, key=lambda activity: activity.start) for some in (on_device, launches)))


def outermost(activities: list[Activity]) -> list[Activity]:
    """Those that do not lie within another one."""
    found: list[Activity] = []
    for activity in sorted(activities, key=lambda activity: (activity.start, -activity.end)):
        if not found or activity.end > found[-1].end:
            found.append(activity)
    return found


def busy_and_span(intervals: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Length of the union of (start, end) intervals, and from the first start to the last end."""
    busy, reached, first = 0, None, None
    for start, end in sorted(intervals):
        if reached is None or first is None:
            first = reached = start
        busy += max(0, end - max(start, reached))
        reached = max(reached, end)
    return (0, 0) if reached is None or first is None else (busy, reached - first)


def idle_share(activities: Iterable[Activity]) -> float | None:
    """1 - union of the intervals / time from the first to the last of them; None of nothing."""
    busy, span = busy_and_span((activity.start, activity.end) for activity in activities)
    return 1 - busy / span if span else None


def profile_kernels(work: Callable[[], object], steps: int) -> dict[str, Any]:
    """Run ``work``, ``steps`` steps of it on a GPU, under the profiler.

    ``idle_share`` is of the kernels, without copies; ``top`` the five kernels that cost most, in microseconds per step.
    """
    kernels = [activity for activity in record(work, "cuda").activities if not activity.is_copy]
    busy, _ = busy_and_span((kernel.start, kernel.end) for kernel in kernels)
    by_name: dict[str, int] = {}
    for kernel in kernels:
        by_name[kernel.name] = by_name.get(kernel.name, 0) + kernel.end - kernel.start
    top = sorted(by_name.items(), key=lambda item: -item[1])[:5]
    return {
        "idle_share": idle_share(kernels),
        "kernels_per_step": len(kernels) / steps,
        "busy_us_per_step": busy / 1e3 / steps,
        "top": {name[:80]: nanoseconds / 1e3 / steps for name, nanoseconds in top},
    }


def _activity(event: Any) -> Activity:
    start = event.start_ns()
    return Activity(event.name(), start, start + event.duration_ns(), event.device_resource_id())
