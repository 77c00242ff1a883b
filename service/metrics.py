"""Metrics in the Prometheus text format, version 0.0.4.

Written by hand: two counter families, three histograms and a few gauges are less code than the glue to a client
library, and need no further dependency.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from engine.outputs import EngineLoad
from engine.prefix_cache import PrefixCacheStats
from service.errors import ServiceError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_PREFIX = "picovllm"


class Histogram:
    """Counts of observations by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add(self, other: "Histogram") -> None:
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """What one front counts."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], int] = {}
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._histograms = {
            "time_to_first_token_seconds": (Histogram(), "From receipt until the first token."),
            "queue_seconds": (Histogram(), "From receipt until first scheduled."),
            "request_seconds": (Histogram(), "From receipt until the end, of requests that finished."),
        }

    def call_ended(self, method: str, error: ServiceError | None) -> None:
        key = (method, "OK", "") if error is None else (method, error.code.name, error.reason.value)
        self._calls[key] = self._calls.get(key, 0) + 1

    def request_finished(
        self, prompt_tokens: int, completion_tokens: int, queue: float | None, first_token: float | None, total: float
    ) -> None:
        """Durations in seconds, from receipt."""
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        values = {"queue_seconds": queue, "time_to_first_token_seconds": first_token, "request_seconds": total}
        for name, value in values.items():
            if value is not None:
                self._histograms[name][0].observe(value)

    def add(self, other: "Metrics") -> None:
        for key, count in other._calls.items():
            self._calls[key] = self._calls.get(key, 0) + count
        self._prompt_tokens += other._prompt_tokens
        self._completion_tokens += other._completion_tokens
        for name, (histogram, _) in self._histograms.items():
            histogram.add(other._histograms[name][0])

    @property
    def num_calls(self) -> int:
        return sum(self._calls.values())

    def lines(self) -> list[str]:
        lines: list[str] = []
        _family(lines, "calls_total", "counter", "Calls that ended, by method, status code and reason.")
        for (method, code, reason), count in sorted(self._calls.items()):
            lines.append(f'{_PREFIX}_calls_total{{method="{method}",code="{code}",reason="{reason}"}} {count}')
        _scalar(lines, "prompt_tokens_total", "counter", self._prompt_tokens, "Prompt tokens of finished calls.")
        _scalar(
            lines, "completion_tokens_total", "counter", self._completion_tokens, "Generated tokens of finished calls."
        )
        for name, (histogram, text) in self._histograms.items():
            _family(lines, name, "histogram", text)
            lines.extend(histogram.lines(f"{_PREFIX}_{name}"))
        return lines


def metrics_text(
    by_front: Mapping[str, Metrics], gauges: Mapping[str, tuple[float, str]], load: EngineLoad | None
) -> str:
    """What the fronts of an instance counted together. ``gauges``: name to (value, help)."""
    total = Metrics()
    for metrics in by_front.values():
        total.add(metrics)
    lines = total.lines()
    _family(lines, "front_calls_total", "counter", "Calls that ended, by front process.")
    for front, metrics in by_front.items():
        lines.append(f'{_PREFIX}_front_calls_total{{front="{front}"}} {metrics.num_calls}')
    for name, (value, text) in gauges.items():
        _scalar(lines, name, "gauge", value, text)
    for name, kind, value, text in _engine_values(load):
        _scalar(lines, name, kind, value, text)
    return "\n".join(lines) + "\n"


def _scalar(lines: list[str], name: str, kind: str, value: float, text: str) -> None:
    _family(lines, name, kind, text)
    lines.append(f"{_PREFIX}_{name} {value!r}")


def _family(lines: list[str], name: str, kind: str, text: str) -> None:
    lines.append(f"# HELP {_PREFIX}_{name} {text}")
    lines.append(f"# TYPE {_PREFIX}_{name} {kind}")


def _engine_values(load: EngineLoad | None) -> list[tuple[str, str, float, str]]:
    if load is None:
        return []
    cache = load.prefix_cache or PrefixCacheStats()  # switched off it counts nothing
    return [
        ("queued_requests", "gauge", load.queued_requests, "Requests that wait in the engine."),
        ("queued_prompt_tokens", "gauge", load.queued_prompt_tokens, "Prompt tokens of these."),
        ("prefilling_requests", "gauge", load.prefilling_requests, "Requests whose prompt is being computed."),
        ("decoding_requests", "gauge", load.decoding_requests, "Requests that generate."),
        ("kv_blocks_used", "gauge", load.kv_blocks_used, "KV blocks that requests hold."),
        ("kv_blocks_cached", "gauge", load.kv_blocks_cached, "KV blocks that no request holds, kept for reuse."),
        ("kv_blocks", "gauge", load.kv_blocks_total, "All KV blocks."),
        ("steps_total", "counter", load.steps, "Engine steps."),
        ("prompt_tokens_computed_total", "counter", load.prompt_tokens_computed, "Prompt tokens computed."),
        ("tokens_generated_total", "counter", load.tokens_generated, "Tokens generated."),
        ("tokens_discarded_total", "counter", load.tokens_discarded, "Tokens computed past a stop and dropped."),
        ("preemptions_total", "counter", load.preemptions, "Requests that lost their memory to others."),
        ("prefix_cache_lookups_total", "counter", cache.lookups, "Requests scheduled that may use the prefix cache."),
        ("prefix_cache_hits_total", "counter", cache.hits, "Those of them that reused something."),
        ("prefix_cache_looked_up_tokens_total", "counter", cache.looked_up_tokens, "Prompt tokens of the lookups."),
        ("prefix_cache_hit_tokens_total", "counter", cache.hit_tokens, "Prompt tokens that were reused."),
        ("prefix_cache_copies_total", "counter", cache.copies, "Partly equal KV blocks that were copied."),
        ("prefix_cache_evicted_blocks_total", "counter", cache.evicted_blocks, "Cached KV blocks that made room."),
    ]
