"""Prompt chunks on a GPU: their inputs packed into one copy, run eagerly or as a graph of the next larger bucket.

Shapes: T tokens, B sequences, R samples; a buffer has more of each than there are: padded tokens have slot -1, padded
sequences no tokens. Eager batches are padded, too, so that what Triton makes of a kernel (by the divisibility of
numbers and addresses, by powers of two) is always the same, and nothing is compiled while requests wait.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.cuda.graphs import GraphPool, captured
from engine.model.transformer import ForwardBatch, Transformer
from engine.plan import PlanRow, Sample
from engine.sampling_state import upload
from kernels import ops
from kernels.gpu import prefill_attention
from kernels.gpu.cache import FEW_TOKENS
from kernels.reference.step import DecodeRows

# Graphs pay below this: beyond, the GPU is busy for longer than the launches take. Padding stays below 2x.
GRAPH_TOKENS = (16, 32, 64, 128, 256, 512)
GRAPH_SEQUENCES = 8
# Eager batches hold a multiple of so many tokens.
TOKEN_STEP = 16


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What an input buffer holds: ``tokens``, ``sequences``, ``samples``; all of them even."""

    tokens: int
    sequences: int
    samples: int

    def sections(self) -> list[int]:
        """Elements of each part; every part begins at a multiple of 16 bytes."""
        T, B, R = self.tokens, self.sequences, self.samples
        return [T, T, T, B + 2, B, B, B, R, R, R]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillInputs:
    """Views of one int64 buffer on the device, in the order of `PrefillShape.sections`.

    ``query_starts`` [B + 2]: the last entry is of no use.

    ``last_rows_B``: each sequence's last token; ``sample_sequences_R``: whose logits a sample takes.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    query_starts: Tensor
    context_lens_B: Tensor
    slots_B: Tensor
    last_rows_B: Tensor
    sample_slots_R: Tensor
    sample_positions_R: Tensor
    sample_sequences_R: Tensor

    @classmethod
    def of(cls, buffer: Tensor, shape: PrefillShape) -> "PrefillInputs":
        return cls(*buffer.split(shape.sections()))


def pack(rows: list[PlanRow], samples: list[Sample], shape: PrefillShape, block_size: int) -> np.ndarray:
    """The chunks of ``rows`` as one int64 array, padded to ``shape``."""
    counts = [row.count for row in rows]
    ends = list(accumulate(counts))
    total = ends[-1]
    buffer = np.zeros(sum(shape.sections()), dtype=np.int64)
    parts = np.split(buffer, list(accumulate(shape.sections()))[:-1])
    tokens, positions, kv_slots, starts, contexts, slots, last, sample_slots, sample_positions, sequences = parts
    kv_slots[total:] = -1
    starts[len(rows) + 1 :] = total
    sample_slots[len(samples) :] = -1
    start = 0
    for number, row in enumerate(rows):
        end = ends[number]
        tokens[start:end] = row.output.tokens(row.start, row.start + row.count)
        its_positions = np.arange(row.start, row.start + row.count)
        positions[start:end] = its_positions
        blocks = np.asarray(row.blocks)
        kv_slots[start:end] = blocks[its_positions // block_size] * block_size + its_positions % block_size
        start = end
    starts[1 : len(rows) + 1] = ends
    contexts[: len(rows)] = [row.start + row.count for row in rows]
    slots[: len(rows)] = [row.slot for row in rows]
    last[: len(rows)] = np.array(ends) - 1
    sample_slots[: len(samples)] = [sample.slot for sample in samples]
    sample_positions[: len(samples)] = [sample.position for sample in samples]
    sequences[: len(samples)] = [number for number, row in enumerate(rows) for _ in row.samples]
    return buffer


class Prefill:
    """Runs chunks. Writes their KV; gives the hidden states of all tokens and the logits of each sequence's last."""

    def __init__(self, model: Transformer, kv_cache: Tensor, rows: DecodeRows, cos_sin_PD: Tensor) -> None:
        self._model, self._kv_cache, self._rows, self._cos_sin_PD = model, kv_cache, rows, cos_sin_PD
        num_slots = len(rows.row_slots_B)
        self._eager_sequences = num_slots + num_slots % 2
        self._graphs: dict[int, _Graph] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, rows: list[PlanRow], samples: list[Sample]) -> tuple[Tensor, Tensor, PrefillInputs]:
        """Launch ``rows``. Returns hidden [T, H], logits float32 [B, V] and the inputs; all three may be padded."""
        shape = PrefillShape(sum(row.count for row in rows), len(rows), len(samples))
        graph = self._graph_for(shape)
        if graph is None:
            shape = self.eager_shape(shape.tokens)
            (buffer,) = upload([pack(rows, samples, shape, self._rows.block_size)], self._kv_cache.device)
            inputs = PrefillInputs.of(buffer, shape)
            starts = tuple(accumulate((row.count for row in rows), initial=0))
            starts += starts[-1:] * (shape.sequences - len(rows))
            contexts = tuple(row.start + row.count for row in rows) + (0,) * (shape.sequences - len(rows))
            hidden_TH, logits_BV = self.forward(inputs, starts, contexts)
            return hidden_TH, logits_BV, inputs
        (buffer,) = upload([pack(rows, samples, graph.shape, self._rows.block_size)], self._kv_cache.device)
        graph.buffer.copy_(buffer)
        graph.graph.replay()
        return graph.hidden_TH, graph.logits_BV, PrefillInputs.of(graph.buffer, graph.shape)

    def forward(
        self,
        inputs: PrefillInputs,
        host_query_starts: tuple[int, ...] | None = None,
        host_context_lens: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layers over ``inputs``, eagerly: hidden states and logits."""
        meta = ops.PrefillMeta(
            block_tables=self._rows.block_tables_SM.index_select(0, inputs.slots_B),
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens_B,
            host_query_starts=host_query_starts,
            host_context_lens=host_context_lens,
            block_size=self._rows.block_size,
        )
        batch = ForwardBatch(
            token_ids_T=inputs.token_ids_T,
            cos_sin_TD=self._cos_sin_PD.index_select(0, inputs.positions_T),
            slots_T=inputs.kv_slots_T,
            num_decode=0,
            decode=None,
            prefill=meta,
        )
        hidden_TH = self._model.hidden_states(batch, self._kv_cache)
        return hidden_TH, self._model.logits(hidden_TH.index_select(0, inputs.last_rows_B))

    def eager_shape(self, tokens: int) -> PrefillShape:
        """The padded shape of an eager batch of ``tokens`` tokens. A slot gives one sample at most."""
        return PrefillShape(-(-tokens // TOKEN_STEP) * TOKEN_STEP, self._eager_sequences, self._eager_sequences)

    def warm_up_tokens(self, max_tokens: int) -> list[int]:
        """One number of tokens for each form that kernels take in eager batches, the largest first."""
        config = self._model.config
        forms: dict[object, int] = {}
        for tokens in range(TOKEN_STEP, max_tokens + TOKEN_STEP, TOKEN_STEP):
            dtype = self._kv_cache.dtype
            tile = prefill_attention.choose_tile(dtype, tokens, config.num_heads, config.head_dim)
            splits = prefill_attention.choose_splits(tile, tokens, config.num_heads)
            forms[tile, splits, tokens <= FEW_TOKENS] = tokens
        return sorted(forms.values(), reverse=True)

    def padding(self, shape: PrefillShape) -> Tensor:
        """An input buffer of nothing but padding: it computes, and writes no KV."""
        inputs = PrefillInputs.of(buffer := torch.zeros(sum(shape.sections()), dtype=torch.int64), shape)
        inputs.kv_slots_T.fill_(-1)
        inputs.sample_slots_R.fill_(-1)
        return buffer.to(self._kv_cache.device)

    def capture(self, tokens: int, pool: GraphPool, stream: torch.cuda.Stream) -> None:
        """A graph for up to ``tokens`` tokens of up to GRAPH_SEQUENCES sequences."""
        shape = PrefillShape(tokens, GRAPH_SEQUENCES, GRAPH_SEQUENCES)
        buffer = self.padding(shape)
        inputs = PrefillInputs.of(buffer, shape)
        outputs: list[Tensor] = []

        def work() -> None:
            outputs[:] = self.forward(inputs)

        graph = captured(work, pool, stream)
        hidden_TH, logits_BV = outputs
        self._graphs[tokens] = _Graph(shape, buffer, graph, hidden_TH, logits_BV)

    def close(self) -> None:
        self._graphs.clear()

    def _graph_for(self, shape: PrefillShape) -> "_Graph | None":
        if max(shape.sequences, shape.samples) > GRAPH_SEQUENCES:
            return None
        fitting = [tokens for tokens in self._graphs if tokens >= shape.tokens]
        return self._graphs[min(fitting)] if fitting else None


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    shape: PrefillShape
    buffer: Tensor
    graph: torch.cuda.CUDAGraph
    hidden_TH: Tensor
    logits_BV: Tensor
