"""A slow sampler: full-forward logits of the naive model, then every stage in the plainest terms, token by token."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.naive import RecomputeDecoder, load_naive
from engine.outputs import FinishReason, TokenLogprob
from engine.results import OutputResult
from engine.sampling_params import SamplingParams
from kernels.reference.sampling import gumbel_noise, signed64, sub_seed
from tests.engine.equality import FLOAT32_MARGIN, FLOAT32_MAX_STOPPED
from tests.kernels.filter_oracle import allowed_ids

TOLERANCE = 1e-4


class Oracle:
    """Scores every token of an output as the definition says, given the tokens before it (teacher-forced)."""

    def __init__(self, model_dir: Path, eos: int = 1) -> None:
        self._model = RecomputeDecoder(*load_naive(model_dir))._model
        self._eos = eos

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V]: row i predicts the token after ``tokens[i]``."""
        _, hidden = self._model.forward(tokens, None)
        return F.linear(hidden, self._model.weights.head_VH).float()

    def processed(self, logits: Tensor, prompt: list[int], before: list[int], p: SamplingParams) -> tuple[Tensor, bool]:
        """One row after penalties, bias, min_tokens, temperature and filters; and whether a filter is near a call."""
        row = logits.tolist()
        for token in {*prompt, *before}:
            row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
        for token in set(before):
            row[token] -= p.frequency_penalty * before.count(token) + p.presence_penalty
        for token, bias in p.logit_bias:
            row[token] += bias
        if len(before) < p.min_tokens:
            for token in (*p.stop_token_ids, *(() if p.ignore_eos else (self._eos,))):
                row[token] = -math.inf
        if p.temperature == 0:
            return torch.tensor(row), False
        row = [value / p.temperature for value in row]
        kept, near = allowed_ids(row, p.top_k, p.top_p, p.min_p)
        return torch.tensor([v if token in kept else -math.inf for token, v in enumerate(row)]), near

    def scores(self, prompt: list[int], before: list[int], p: SamplingParams, index: int = 0) -> tuple[Tensor, bool]:
        """What the next token is the argmax of."""
        return self._scores(self.logits(prompt + before)[-1], prompt, before, p, index)

    def check(self, prompt: list[int], p: SamplingParams, outputs: list[OutputResult]) -> int:
        """Every token of every output is the best one by the rule, and it ended where it should.

        Returns how many outputs stopped at a near tie.
        """
        assert len(outputs) == p.n
        return sum(self._check_output(prompt, p, output, index) for index, output in enumerate(outputs))

    def _check_output(self, prompt: list[int], p: SamplingParams, output: OutputResult, index: int) -> bool:
        tokens = output.token_ids
        logits = self.logits(prompt + tokens)[len(prompt) - 1 :]
        self._check_end(p, output)
        for i, token in enumerate(tokens):
            scores, near = self._scores(logits[i], prompt, tokens[:i], p, index)
            best = scores.topk(2)
            if int(best.indices[0]) == token:
                continue
            margin = float(best.values[0] - scores[token])
            assert near or margin < FLOAT32_MARGIN, f"token {i} is {token}, not {int(best.indices[0])}: {margin:.2e}"
            return True
        return False

    def _scores(
        self, logits: Tensor, prompt: list[int], before: list[int], p: SamplingParams, index: int
    ) -> tuple[Tensor, bool]:
        row, near = self.processed(logits, prompt, before, p)
        if p.temperature == 0:
            return row, near
        assert p.seed is not None
        seed = torch.tensor([signed64(sub_seed(p.seed, index))])
        return row + gumbel_noise(seed, torch.tensor([len(prompt) + len(before)]), len(row))[0], near

    def _check_end(self, p: SamplingParams, output: OutputResult) -> None:
        stops = {*p.stop_token_ids, *(() if p.ignore_eos else (self._eos,))}
        assert not stops.intersection(output.token_ids[:-1]), "it went on after a stop"
        assert not stops.intersection(output.token_ids[: p.min_tokens]), "it stopped before min_tokens"
        if output.token_ids and output.token_ids[-1] in stops:
            assert output.finish_reason is FinishReason.STOP
            assert output.stop_token_id == output.token_ids[-1]
        else:
            assert output.finish_reason is FinishReason.LENGTH
            assert len(output.token_ids) == p.max_tokens
            assert output.stop_token_id is None


def check_stopped(stopped: int, total: int) -> None:
    assert stopped <= max(FLOAT32_MAX_STOPPED * total, 1), f"{stopped} of {total} outputs stopped at near ties"


def check_record(record: TokenLogprob, token: int, logits: Tensor, top: int) -> None:
    """``record`` says of ``token`` what the log-softmax of ``logits`` does, to the tolerance."""
    logprobs = logits.double().log_softmax(0)
    exact = float(logprobs[token])
    assert record.token_id == token
    assert record.logprob == pytest.approx(exact, abs=TOLERANCE)
    assert record.rank is not None
    assert _rank_range(logprobs, exact)[0] <= record.rank <= _rank_range(logprobs, exact)[1]
    possible = logprobs[logprobs > -math.inf].sort(descending=True).values[:top]
    assert [entry.logprob for entry in record.top] == [
        pytest.approx(value, abs=TOLERANCE) for value in possible.tolist()
    ]
    assert [entry.rank for entry in record.top] == list(range(1, len(possible) + 1))
    assert [entry.logprob for entry in record.top] == [
        pytest.approx(float(logprobs[entry.token_id]), abs=TOLERANCE) for entry in record.top
    ]
    assert len({entry.token_id for entry in record.top}) == len(record.top)


def _rank_range(logprobs: Tensor, exact: float) -> tuple[int, int]:
    """The second count has the token itself in it."""
    return int((logprobs > exact + TOLERANCE).sum()) + 1, int((logprobs > exact - TOLERANCE).sum())
