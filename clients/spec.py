"""From Python arguments to a GenerationSpec."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from google.protobuf.duration_pb2 import Duration

from protos.picovllm.inference.v1 import inference_pb2 as pb

# One turn of a chat: {"role": ..., "content": ...}.
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message] | pb.Chat
Seconds = float | timedelta


class SpecOptions(TypedDict, total=False):
    """Everything a request can set besides its prompt; each is the GenerationSpec field of that name.

    What is left out is not sent: the server's or the model's default holds. ``stop`` is ``stopping.stop_strings``.
    """

    request_id: str
    model: str
    add_special_tokens: bool
    priority: int
    queue_timeout: Seconds
    max_duration: Seconds
    constraint: pb.Constraint
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    n: int
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_text: bool
    text: bool
    token_ids: bool
    top_logprobs: int
    prompt_logprobs: int
    logprobs_mode: pb.LogprobsMode
    skip_special_tokens: bool
    echo: bool
    bypass_prefix_cache: bool
    cache_salt: str


# Where in the spec each option is: the message it belongs to ("" = the spec itself).
_PARTS: dict[str, tuple[type[Any] | None, tuple[str, ...]]] = {
    "": (
        None,
        ("request_id", "model", "add_special_tokens", "priority", "queue_timeout", "max_duration", "constraint"),
    ),
    "sampling": (pb.Sampling, tuple(pb.Sampling.DESCRIPTOR.fields_by_name)),
    "stopping": (pb.Stopping, tuple(pb.Stopping.DESCRIPTOR.fields_by_name)),
    "output": (pb.OutputOptions, tuple(pb.OutputOptions.DESCRIPTOR.fields_by_name)),
    "cache": (pb.CacheOptions, tuple(pb.CacheOptions.DESCRIPTOR.fields_by_name)),
}
_PART_OF = {field: part for part, (_, fields) in _PARTS.items() for field in fields}


def build_spec(prompt: Prompt, options: SpecOptions) -> pb.GenerationSpec:
    """The spec of a request. Raises TypeError for an unknown option or a prompt that is none."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in _normalised(options).items():
        if name not in _PART_OF:
            raise TypeError(f"unknown option {name!r}")
        parts[_PART_OF[name]][name] = value
    messages = {
        part: message(**parts[part]) for part, (message, _) in _PARTS.items() if message is not None and parts[part]
    }
    return pb.GenerationSpec(**_prompt_field(prompt), **parts[""], **messages)


def to_chat(messages: Sequence[Message]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**turn) for turn in messages])


def to_duration(value: Seconds | None) -> Duration | None:
    """None stays None: an unset field."""
    if value is None:
        return None
    duration = Duration()
    duration.FromTimedelta(value if isinstance(value, timedelta) else timedelta(seconds=value))
    return duration


def _normalised(options: SpecOptions) -> dict[str, Any]:
    values: dict[str, Any] = dict(options)
    if "stop" in values:
        stop = values.pop("stop")
        values["stop_strings"] = [stop] if isinstance(stop, str) else list(stop)
    for name in ("queue_timeout", "max_duration"):
        if name in values:
            values[name] = to_duration(values[name])
    return values


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, pb.Chat):
        return {"chat": prompt}
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        return {"chat": to_chat(prompt)}  # type: ignore[arg-type]
    if len(prompt) > 0:
        return {"token_ids": pb.TokenIds(ids=prompt)}  # type: ignore[arg-type]
    raise TypeError("a prompt is a text, a chat, or a sequence of token ids or messages that is not empty")
