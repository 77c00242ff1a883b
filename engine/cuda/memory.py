"""How many KV blocks fit on a GPU: measured by a trial run with a pool of one block, not estimated from shapes."""

import gc
from collections.abc import Callable

import torch

from engine.cuda.decode import GRAPHS_PER_BUCKET
from engine.cuda.prefill import GRAPH_TOKENS
from engine.cuda.runner import CudaRunner
from engine.errors import ConfigError

# Left free beside everything measured: fragments, and what the driver takes for itself later.
MARGIN = 256 << 20


def blocks_that_fit(
    make_runner: Callable[[int], CudaRunner], share: float, bytes_per_block: int, max_batched_tokens: int, graphs: bool
) -> int:
    """KV blocks in the ``share`` of the card that is ours, beside weights, buffers, the largest step and all graphs.

    The largest decode and prefill graphs are captured for the trial: the memory pool that all graphs share is theirs,
    and what the driver takes for a graph is multiplied by the number of graphs. Raises `ConfigError` when none fits.
    """
    release_cached_memory()
    free_before, total = torch.cuda.mem_get_info()
    trial = make_runner(1)
    # In the order of a real start: a capture gives back what was cached before it.
    graph_bytes = _graph_bytes(trial, max_batched_tokens) if graphs else 0
    trial.warm_up(eager=not graphs)
    free_after, _ = torch.cuda.mem_get_info()
    trial.close()
    del trial
    release_cached_memory()
    taken = (total - free_before) + (free_before - free_after) - bytes_per_block + graph_bytes + MARGIN
    budget = int(total * share) - taken
    if budget < bytes_per_block:
        raise ConfigError(
            f"no GPU memory is left for KV blocks: {taken / 2**30:.1f} GiB are taken by other programs, weights and a "
            f"step, of {total * share / 2**30:.1f} GiB ({share:.0%} of the card); raise gpu_memory_utilization "
            f"or lower max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    return budget // bytes_per_block


def _graph_bytes(trial: CudaRunner, max_batched_tokens: int) -> int:
    """What the graphs that the trial does not capture will take of the driver's memory."""
    prefill = [tokens for tokens in GRAPH_TOKENS if tokens <= max_batched_tokens]
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    trial.capture(False, decode=trial.decode_buckets[-1:], prefill=prefill[-1:])
    driver = (free - torch.cuda.mem_get_info()[0]) - (torch.cuda.memory_reserved() - reserved)
    captured = trial.num_graphs
    in_all = GRAPHS_PER_BUCKET * len(trial.decode_buckets) + len(prefill)
    return max(driver, 0) * (in_all - captured) // captured


def release_cached_memory() -> None:
    """Give what nobody refers to back to the driver, where other programs, and the next pool, can have it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
