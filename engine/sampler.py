"""The sampler: one call per batch, from logits to tokens. Shapes: R rows to sample, V vocabulary, K top tokens.

Nothing here waits for the device but what says so. What the host wants to know is copied to it in the stream's order,
and can be read once the step is over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.outputs import TokenLogprob
from engine.plan import Sample
from engine.sampling_params import LogprobsMode
from engine.sampling_state import SamplingState, upload
from kernels import ops
from kernels.ops import SamplingOut, SamplingStages
from kernels.reference.sampling import NEVER

# Rows of prompt logits made at once: bounds their memory to this many rows of the vocabulary.
PROMPT_LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Logprobs of one token per row and of the row's K best ones. On the host; not to be read before the step is over.

    ``token_ids_R``, ``ranks_R`` and ``top_ids_RK`` int64; ``chosen_R`` and ``top_RK``, which descends, float32.
    """

    token_ids_R: Tensor
    chosen_R: Tensor
    ranks_R: Tensor
    top_RK: Tensor
    top_ids_RK: Tensor

    def records(self, tops: Sequence[int]) -> list[TokenLogprob]:
        """One record per row, with the ``tops[row]`` most likely tokens (at most K)."""
        columns = (self.token_ids_R, self.chosen_R, self.ranks_R, self.top_RK, self.top_ids_RK)
        rows = zip(*(column.tolist() for column in columns), tops, strict=True)
        return [
            TokenLogprob(token, _finite(logprob), rank, _top_records(values, ids, top))
            for token, logprob, rank, values, ids, top in rows
        ]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a batch asks of the sampler, known before the draw.

    ``raw`` and ``processed``: the rows that want logprobs of either kind; ``top``: how many alternatives at most;
    ``raw_logits``: the logits of the rows ``raw`` as the model gave them, for the draw may change them.
    """

    stages: SamplingStages
    raw: list[int]
    processed: list[int]
    top: int
    raw_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of one sampling call: device tensors, and what the rows that asked for logprobs get."""

    tokens_R: Tensor
    best_R: Tensor
    logprobs: tuple[tuple[list[int], LogprobTensors], ...]


class Sampler:
    """Applies penalties, bias, stops held back, temperature and filters, then draws by Gumbel-max.

    Every stage is skipped when no row wants it, and is exact for rows that do not: a row's token never depends on
    its neighbours.
    """

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def sample(
        self,
        logits_RV: Tensor,
        samples: list[Sample],
        slots_R: Tensor | None = None,
        positions_R: Tensor | None = None,
    ) -> Sampled:
        """Draw one token per row, write it to the rows' slots, and count it for penalties.

        ``slots_R`` and ``positions_R``: those of ``samples``, on the device, and more rows where padded (slot -1). May
        change ``logits_RV``.
        """
        if slots_R is None or positions_R is None:
            numbers = np.array([(sample.slot, sample.position) for sample in samples], dtype=np.int64)
            slots_R, positions_R = upload([numbers[:, 0], numbers[:, 1]], logits_RV.device)
        out = SamplingOut.allocate(len(slots_R), logits_RV.device)
        asked = self.ask(logits_RV, samples)
        ops.sample(logits_RV, slots_R, positions_R, self._state.tensors, asked.stages, out)
        return self.answer(asked, logits_RV, out)

    def ask(self, logits_RV: Tensor, samples: list[Sample]) -> Asked:
        """Before the draw: its stages, and a copy of what logprobs need and the draw may change."""
        return self.keep_raw(self.survey(samples), logits_RV)

    def keep_raw(self, asked: Asked, logits_RV: Tensor) -> Asked:
        """With a copy of the logits of the rows that want them as the model gave them: before the draw changes them."""
        if not asked.raw:
            return asked
        return replace(asked, raw_logits=logits_RV.index_select(0, _rows(asked.raw, logits_RV.device)))

    def survey(self, samples: list[Sample]) -> Asked:
        """What ``samples`` want; nothing is copied yet."""
        raw: list[int] = []
        processed: list[int] = []
        top = 0
        for row, sample in enumerate(samples):
            params = sample.output.request.params
            if params.top_logprobs is not None:
                (raw if params.logprobs_mode is LogprobsMode.RAW else processed).append(row)
                top = max(top, params.top_logprobs)
        stages = self._state.stages(samples, processed=bool(processed))
        return Asked(stages, raw, processed, top, None)

    def answer(self, asked: Asked, logits_RV: Tensor, out: SamplingOut) -> Sampled:
        """After the draw into ``out``: the logprobs that were asked for. ``logits_RV`` is what the draw left."""
        logprobs = []
        if asked.raw_logits is not None:
            tokens_r = out.tokens_R.index_select(0, _rows(asked.raw, logits_RV.device))
            logprobs.append((asked.raw, score(asked.raw_logits, tokens_r, asked.top)))
        if asked.processed:
            rows_r = _rows(asked.processed, logits_RV.device)
            processed_rV, tokens_r = logits_RV.index_select(0, rows_r), out.tokens_R.index_select(0, rows_r)
            logprobs.append((asked.processed, score(processed_rV, tokens_r, asked.top)))
        return Sampled(out.tokens_R, out.best_R, tuple(logprobs))


def score(logits_RV: Tensor, token_ids_R: Tensor, top: int) -> LogprobTensors:
    """Logprob and rank of one token per row, and the ``top`` most likely tokens. Does not wait for the device."""
    logprobs_RV = logits_RV.log_softmax(dim=1)
    chosen_R1 = logprobs_RV.gather(1, token_ids_R[:, None])
    ranks_R = (logprobs_RV > chosen_R1).sum(dim=1) + 1
    top_RK, top_ids_RK = logprobs_RV.topk(min(top, logprobs_RV.shape[1]), dim=1)
    on_device = (token_ids_R, chosen_R1.squeeze(1), ranks_R, top_RK, top_ids_RK)
    # To pinned memory: torch allocates it for a copy from a GPU that nothing waits for.
    return LogprobTensors(*(tensor.to("cpu", non_blocking=True) for tensor in on_device))


def pieces(count: int) -> Iterator[slice]:
    """``count`` rows of prompt logits, as many at once as their memory allows."""
    for start in range(0, count, PROMPT_LOGITS_ROWS):
        yield slice(start, min(start + PROMPT_LOGITS_ROWS, count))


def sampled_logprobs(sampled: Sampled, samples: list[Sample]) -> list[TokenLogprob | None]:
    """The records of the rows that asked for logprobs, None for the others. Not before the step is over."""
    records: list[TokenLogprob | None] = [None] * len(samples)
    for rows, tensors in sampled.logprobs:
        tops = [samples[row].output.request.params.top_logprobs or 0 for row in rows]
        for row, record in zip(rows, tensors.records(tops), strict=True):
            records[row] = record
    return records


def logprob_records(logits_RV: Tensor, token_ids_R: Tensor, top: int) -> list[TokenLogprob]:
    """`score` and its records at once. Waits for the device."""
    tensors = score(logits_RV, token_ids_R, top)
    if logits_RV.is_cuda:
        torch.cuda.current_stream(logits_RV.device).synchronize()
    return tensors.records([top] * len(token_ids_R))


def _top_records(values: list[float], ids: list[int], top: int) -> tuple[TokenLogprob, ...]:
    best = zip(ids[:top], values[:top], strict=True)
    return tuple(
        TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(best, 1) if _finite(value) is not None
    )


def _rows(rows: list[int], device: torch.device) -> Tensor:
    return upload([np.array(rows, dtype=np.int64)], device)[0]


def _finite(value: float) -> float | None:
    return None if value == NEVER else value
