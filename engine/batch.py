"""From a plan to the tensors of one forward pass. Built in numpy on the host, then moved in one go each."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.transformer import ForwardBatch
from engine.plan import PlanRow, Sample, StepPlan
from engine.sampling_state import SamplingState
from kernels import ops


@dataclass(frozen=True, slots=True)
class StepInputs:
    """``sample_rows``: the flat token whose logits each sample takes; ``prompt_rows``: per plan row that wants
    prompt logprobs, the flat tokens that predict its positions, and the ids they should predict."""

    forward: ForwardBatch
    samples: list[Sample]
    sample_rows: Tensor
    prompt_rows: dict[int, tuple[Tensor, Tensor]]


class BatchBuilder:
    """Turns plans into inputs for one device."""

    def __init__(self, state: SamplingState, cos_sin_PD: Tensor, dtype: torch.dtype, block_size: int) -> None:
        self._state = state
        self._cos_sin_PD = cos_sin_PD
        self._dtype = dtype
        self._device = cos_sin_PD.device
        self._block_size = block_size

    def build(self, plan: StepPlan) -> StepInputs:
        """Inputs of ``plan``; decode rows' tokens are read from their device slots."""
        rows = plan.rows
        decode = [row for row in rows if row.is_decode]
        positions_T = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
        slots_T = np.concatenate([self._slots(row) for row in rows])
        forward = ForwardBatch(
            token_ids_T=self._token_ids(rows, len(decode)),
            cos_sin_TD=self._cos_sin_PD.index_select(0, self._move(positions_T)).to(self._dtype),
            slots_T=self._move(slots_T),
            num_decode=len(decode),
            decode=self._decode_meta(decode) if decode else None,
            prefill=self._prefill_meta(rows[len(decode) :], len(decode)) if len(decode) < len(rows) else None,
        )
        starts = np.cumsum([0] + [row.count for row in rows])
        last_rows = [int(end) - 1 for row, end in zip(rows, starts[1:], strict=True) for _ in row.samples]
        return StepInputs(
            forward=forward,
            samples=[sample for row in rows for sample in row.samples],
            sample_rows=self._move(np.array(last_rows, dtype=np.int64)),
            prompt_rows={
                number: self._prompt_rows(row, int(starts[number]))
                for number, row in enumerate(rows)
                if row.prompt_logprobs is not None
            },
        )

    def _token_ids(self, rows: list[PlanRow], num_decode: int) -> Tensor:
        known = [token for row in rows[num_decode:] for token in row.output.tokens(row.start, row.start + row.count)]
        chunks = self._move(np.array(known, dtype=np.int64))
        if not num_decode:
            return chunks
        slots = self._move(np.array([row.slot for row in rows[:num_decode]]))
        fed_back = self._state.last_token_S.index_select(0, slots)
        return torch.cat((fed_back, chunks)) if known else fed_back

    def _slots(self, row: PlanRow) -> np.ndarray:
        if row.count == 1:
            block, offset = divmod(row.start, self._block_size)
            return np.array([row.blocks[block] * self._block_size + offset])
        positions = np.arange(row.start, row.start + row.count)
        return np.array(row.blocks)[positions // self._block_size] * self._block_size + positions % self._block_size

    def _decode_meta(self, rows: list[PlanRow]) -> ops.DecodeMeta:
        lengths = tuple(row.start + 1 for row in rows)
        tables = self._move(self._block_tables(rows))
        return ops.DecodeMeta(tables, self._move(np.array(lengths)), lengths, self._block_size)

    def _prefill_meta(self, rows: list[PlanRow], first_token: int) -> ops.PrefillMeta:
        starts = np.cumsum([first_token] + [row.count for row in rows])
        contexts = np.array([row.start + row.count for row in rows])
        return ops.PrefillMeta(
            block_tables=self._move(self._block_tables(rows)),
            query_starts=self._move(starts),
            context_lens=self._move(contexts),
            host_query_starts=tuple(starts.tolist()),
            host_context_lens=tuple(contexts.tolist()),
            block_size=self._block_size,
        )

    @staticmethod
    def _block_tables(rows: list[PlanRow]) -> np.ndarray:
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row.blocks)] = row.blocks
        return tables

    def _prompt_rows(self, row: PlanRow, flat_start: int) -> tuple[Tensor, Tensor]:
        """Position p is predicted by the token at p - 1; position 0 by nothing, so it has no row here."""
        assert row.prompt_logprobs is not None
        first, number = row.prompt_logprobs
        predicted = range(max(first, 1), first + number)
        flat = np.array([flat_start + position - 1 - row.start for position in predicted], dtype=np.int64)
        ids = np.array(row.output.request.prompt[predicted.start : predicted.stop], dtype=np.int64)
        return self._move(flat), self._move(ids)

    def _move(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
