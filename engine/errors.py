"""Domain exceptions of the engine.

The service maps each to one gRPC status in one table; nothing here knows of gRPC.
"""

from collections.abc import Sequence


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """An option that cannot be used. One line: which option, why, what to do."""


class ModelError(EngineError):
    """A model directory that cannot be served. One line that names the file or tensor."""


class InvalidRequest(EngineError):
    """A request with bad fields; every bad field is reported at once.

    ``violations`` are ``(field, reason)`` pairs; ``field`` is the attribute name of
    `SamplingParams` (or ``prompt_token_ids``), so a caller can map it to its own path.
    """

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{field}: {reason}" for field, reason in self.violations))


class PromptTooLong(EngineError):
    """The prompt (plus ``max_tokens`` when set) exceeds the model's context."""

    def __init__(self, requested: int, limit: int) -> None:
        self.requested, self.limit = requested, limit
        super().__init__(
            f"the prompt and max_tokens need {requested} tokens of context, the model has {limit}; "
            "shorten the prompt or lower max_tokens"
        )


class ExceedsKVCapacity(EngineError):
    """The request could never fit the KV pool, even alone."""

    def __init__(self, requested: int, limit: int) -> None:
        self.requested, self.limit = requested, limit
        super().__init__(
            f"the request needs {requested} KV blocks, the pool has {limit}; "
            "shorten the prompt, lower max_tokens or n, or give the server more KV blocks"
        )


class DuplicateRequest(EngineError):
    """A request with this id is alive."""


class Overloaded(EngineError):
    """The waiting queue is full (requests or prompt tokens)."""
