"""SamplingParams: how one request is sampled and when it stops. Validated once, then read-only."""

import math
from dataclasses import dataclass
from enum import Enum

from engine.errors import InvalidRequest

UINT64_MAX = 2**64 - 1
MAX_N = 16
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20


class LogprobsMode(Enum):
    """RAW: log-softmax of the model's logits. PROCESSED: after penalties, bias, temperature and filters."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    ``temperature`` in [0, 2] (0 = greedy); ``top_p`` in (0, 1]; ``top_k`` >= 0 (0 = all);
    ``min_p`` in [0, 1]; ``frequency_penalty``/``presence_penalty`` in [-2, 2];
    ``repetition_penalty`` in (0, 10]; ``seed`` a uint64 (None = the engine draws one);
    ``n`` in [1, 16] outputs; ``logit_bias`` pairs (token id, bias in [-100, 100]), at most 1024;
    ``max_tokens`` None = the room left in context and KV pool, 0 = score the prompt only;
    ``min_tokens``: EOS and stop ids are not sampled before that many tokens;
    ``stop_token_ids`` at most 64; ``top_logprobs`` None = no logprobs, 0 = the sampled token's alone;
    ``prompt_logprobs`` likewise for the prompt (RAW only).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    def violations(self, vocab_size: int) -> list[tuple[str, str]]:
        """Every rule this object breaks, as ``(attribute, reason)``; empty when it is usable."""
        found = [
            (name, f"must be {rule}, got {getattr(self, name)}")
            for name, holds, rule in self._range_rules()
            if not holds
        ]
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            found.append(("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}"))
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                found.append(("logit_bias", f"token id {token_id} is outside the vocabulary of {vocab_size}"))
                break
            if not _within(bias, -100, 100):
                found.append(("logit_bias", f"bias of token {token_id} must be in [-100, 100], got {bias}"))
                break
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            found.append(("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}"))
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                found.append(("stop_token_ids", f"{token_id} is outside the vocabulary of {vocab_size}"))
                break
        if self.max_tokens is not None and 0 <= self.max_tokens < self.min_tokens:
            found.append(("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}"))
        if self.prompt_logprobs is not None and self.logprobs_mode is LogprobsMode.PROCESSED:
            found.append(("logprobs_mode", "PROCESSED is not defined for prompt_logprobs; use RAW"))
        return found

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` with every broken rule."""
        if found := self.violations(vocab_size):
            raise InvalidRequest(found)

    def _range_rules(self) -> list[tuple[str, bool, str]]:
        repetition = self.repetition_penalty
        return [
            ("temperature", _within(self.temperature, 0, 2), "in [0, 2]"),
            ("top_p", _within(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", _within(self.min_p, 0, 1), "in [0, 1]"),
            ("frequency_penalty", _within(self.frequency_penalty, -2, 2), "in [-2, 2]"),
            ("presence_penalty", _within(self.presence_penalty, -2, 2), "in [-2, 2]"),
            ("repetition_penalty", _within(repetition, 0, 10) and repetition > 0, "in (0, 10]"),
            ("seed", self.seed is None or 0 <= self.seed <= UINT64_MAX, "an unsigned 64-bit integer"),
            ("n", 1 <= self.n <= MAX_N, f"in [1, {MAX_N}]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("top_logprobs", _optional_within(self.top_logprobs), f"in [0, {MAX_LOGPROBS}]"),
            ("prompt_logprobs", _optional_within(self.prompt_logprobs), f"in [0, {MAX_LOGPROBS}]"),
        ]


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _optional_within(value: int | None) -> bool:
    return value is None or 0 <= value <= MAX_LOGPROBS
