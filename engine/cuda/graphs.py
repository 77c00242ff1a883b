"""Capturing work as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

# What `torch.cuda.graph_pool_handle` gives: graphs that share one never run at the same time, so they share memory.
GraphPool = Any


def captured(work: Callable[[], None], pool: GraphPool, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """``work`` as a graph, after it ran once: its kernels are compiled and loaded before the capture."""
    work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        work()
    return graph
