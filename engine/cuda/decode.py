"""Decode steps on a GPU: the chain and the sampling of its logits as CUDA graphs per batch bucket.

A batch that wants plain sampling is one graph: between two graphs the GPU rests for some microseconds. Any other is
two, and what logprobs need of the logits is copied between them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.cuda.graphs import GraphPool, captured
from engine.model.decode_chain import MAX_SKINNY, DecodeBuffers, DecodeChain
from kernels import ops
from kernels.ops import SamplingOut, SamplingStages, SamplingTensors
from kernels.reference.step import DecodeRows

# A batch that wants no more than noise is sampled by two kernels; any other by all stages.
PLAIN = SamplingStages(noise=True)
FULL = SamplingStages(penalties=True, bias=True, stops=True, filters=True, noise=True)
GRAPHS_PER_BUCKET = 3


def decode_buckets(max_rows: int) -> list[int]:
    """Batch sizes that have a graph: powers of two to 8, then steps that keep padding small, and ``max_rows``."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 1025, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Graphs:
    plain_step: torch.cuda.CUDAGraph
    forward: torch.cuda.CUDAGraph
    full_sampling: torch.cuda.CUDAGraph


class Decode:
    """Runs decode rows. ``logits_BV`` and ``out`` are static: the next launch in the stream overwrites them."""

    def __init__(
        self,
        chain: DecodeChain,
        buffers: DecodeBuffers,
        rows: DecodeRows,
        state: SamplingTensors,
        out: SamplingOut,
        max_rows: int,
    ) -> None:
        self._chain, self._buffers, self._rows, self._state, self.out = chain, buffers, rows, state, out
        self._buckets = decode_buckets(max_rows)
        self._graphs: dict[int, _Graphs] = {}

    @property
    def buckets(self) -> list[int]:
        return self._buckets

    @property
    def num_graphs(self) -> int:
        return GRAPHS_PER_BUCKET * len(self._graphs)

    def bucket(self, num_rows: int) -> int:
        """The smallest batch size with room for ``num_rows`` rows."""
        return next(size for size in self._buckets if size >= num_rows)

    def logits(self, bucket: int) -> Tensor:
        return self._buffers.logits_BV[:bucket]

    def plain_step(self, bucket: int) -> None:
        """Launch the layers for the first ``bucket`` rows, and their plain sampling, which leaves the logits alone."""
        graphs = self._graphs.get(bucket)
        if graphs is None:
            self._run_plain_step(bucket, pdl=False)
        else:
            graphs.plain_step.replay()

    def forward(self, bucket: int) -> None:
        """Launch the layers alone."""
        graphs = self._graphs.get(bucket)
        if graphs is None:
            self._chain.run(bucket, pdl=False)
        else:
            graphs.forward.replay()

    def sample(self, bucket: int, stages: SamplingStages) -> None:
        """Launch the sampling of rows whose layers were launched alone."""
        graphs = self._graphs.get(bucket)
        stages = launched_stages(stages)
        if graphs is None or stages != FULL:
            self._sample(bucket, stages)
        else:
            graphs.full_sampling.replay()

    def capture(self, bucket: int, pool: GraphPool, stream: torch.cuda.Stream) -> None:
        """The graphs of one bucket. All rows are padding meanwhile, so nothing is written."""
        pdl = bucket <= MAX_SKINNY
        plain_step = captured(lambda: self._run_plain_step(bucket, pdl=pdl), pool, stream)
        forward = captured(lambda: self._chain.run(bucket, pdl=pdl), pool, stream)
        full_sampling = captured(lambda: self._sample(bucket, FULL), pool, stream)
        self._graphs[bucket] = _Graphs(plain_step, forward, full_sampling)

    def warm_up(self, eager: bool) -> None:
        """Compile what is launched outside graphs: every form of sampling, and with ``eager`` every bucket's chain."""
        for stages in ALL_STAGES:
            self._sample(1, stages)
        for bucket in self._buckets if eager else ():
            self._chain.run(bucket, pdl=False)

    def close(self) -> None:
        self._graphs.clear()

    def _run_plain_step(self, bucket: int, *, pdl: bool) -> None:
        self._chain.run(bucket, pdl=pdl)
        self._sample(bucket, PLAIN)

    def _sample(self, bucket: int, stages: SamplingStages) -> None:
        out = SamplingOut(self.out.tokens_R[:bucket], self.out.best_R[:bucket])
        positions_B = self._buffers.inputs_of(bucket).next_positions_B
        ops.sample(self.logits(bucket), self._rows.row_slots_B[:bucket], positions_B, self._state, stages, out)


def launched_stages(wanted: SamplingStages) -> SamplingStages:
    """What is launched for a batch that wants ``wanted``: one of few forms, all compiled and captured at the start.

    A stage is exact for rows that do not want it.
    """
    plain = not (wanted.penalties or wanted.bias or wanted.stops or wanted.filters)
    return replace(PLAIN if plain else FULL, processed=wanted.processed)


ALL_STAGES = tuple(replace(stages, processed=processed) for stages in (PLAIN, FULL) for processed in (False, True))
