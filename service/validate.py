"""Proto to plain data: a GenerationSpec becomes a `Generation`, with every bad field reported at once.

One law: a field that is set is honoured or refused. Unset sampling fields are the model's defaults.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from engine.sampling_params import LogprobsMode, SamplingParams
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.errors import Reason, ServiceError, field_errors
from service.prompts import (
    FIELD_OF_PROMPT,
    ChatPrompt,
    Prompt,
    TextPrompt,
    Violations,
    chat_prompt,
    check_ids,
    check_prompt,
    text_prompt,
)
from service.served_model import ServedModel

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_SALT_BYTES = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MODES = {
    pb.LOGPROBS_MODE_UNSPECIFIED: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed", "n",
)
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
_OUTPUT_FIELDS = ("top_logprobs", "prompt_logprobs", "logprobs_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checked request: what the engine gets (``params``), and what the front needs to make text of it.

    ``queue_timeout`` and ``max_duration`` in seconds. ``flush_tokens`` and ``max_flush_interval`` belong to streams.
    ``cache_salt`` and ``bypass_prefix_cache`` go to the engine; without a prefix cache both hold by themselves.
    """

    prompt: Prompt
    params: SamplingParams
    stop_strings: tuple[str, ...]
    include_stop_in_text: bool
    text: bool
    token_ids: bool
    skip_special_tokens: bool
    echo: bool
    priority: int
    queue_timeout: float | None
    max_duration: float | None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    flush_tokens: int = 1
    max_flush_interval: float | None = None
    path_of: dict[str, str] = field(default_factory=dict)


def check_generate(request: pb.GenerateRequest, info: ServedModel, model: str) -> Generation:
    """Raises `ServiceError`."""
    refuse_unknown_fields(request)
    found: Violations = []
    generation = _check_spec(request.spec, info, model, found)
    return _finish(generation, found)


def check_stream(request: pb.StreamRequest, info: ServedModel, model: str) -> Generation:
    """Raises `ServiceError`."""
    refuse_unknown_fields(request)
    found: Violations = []
    options = request.stream_options
    if options.HasField("flush_tokens") and options.flush_tokens < 1:
        found.append(("stream_options.flush_tokens", "must be at least 1, got 0"))
    interval = _positive_seconds(options, "max_flush_interval", "stream_options", found)
    generation = _check_spec(request.spec, info, model, found)
    flush_tokens = options.flush_tokens if options.HasField("flush_tokens") else 1
    return replace(_finish(generation, found), flush_tokens=flush_tokens, max_flush_interval=interval)


def check_tokenize(request: pb.TokenizeRequest, model: str) -> TextPrompt | ChatPrompt:
    """Raises `ServiceError`."""
    refuse_unknown_fields(request)
    check_model(request.model, model)
    found: Violations = []
    kind = request.WhichOneof("input")
    if kind is None:
        raise field_errors([("input", "set one of text and chat")])
    if kind != "text" and request.HasField("add_special_tokens"):
        found.append(("add_special_tokens", "is for text only"))
    prompt = chat_prompt(request.chat, "chat", found) if kind == "chat" else text_prompt(request)
    if found:
        raise field_errors(found)
    return prompt


def check_detokenize(request: pb.DetokenizeRequest, info: ServedModel, model: str) -> tuple[list[int], bool]:
    """Token ids and skip_special_tokens. Raises `ServiceError`."""
    refuse_unknown_fields(request)
    check_model(request.model, model)
    found: Violations = []
    ids = list(request.token_ids)
    check_ids(ids, "token_ids", info, found)
    if found:
        raise field_errors(found)
    return ids, request.skip_special_tokens if request.HasField("skip_special_tokens") else True


def check_model(asked: str, served: str) -> None:
    """An empty name is whichever model is served."""
    if asked and asked != served:
        raise ServiceError(Reason.MODEL_NOT_FOUND, f"model {asked[:200]!r} is not served here; {served!r} is")


def valid_request_id(request_id: str) -> bool:
    return _REQUEST_ID.fullmatch(request_id) is not None


def _finish(generation: Generation | None, found: Violations) -> Generation:
    if found or generation is None:
        raise field_errors(found)
    return generation


def _check_spec(spec: pb.GenerationSpec, info: ServedModel, model: str, found: Violations) -> Generation | None:
    check_model(spec.model, model)
    if spec.HasField("constraint"):
        kind = spec.constraint.WhichOneof("kind") or "constraint"
        raise ServiceError(Reason.FEATURE_UNSUPPORTED, f"spec.constraint ({kind}) is not supported by this version")
    if spec.request_id and not valid_request_id(spec.request_id):
        found.append(("spec.request_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"))
    prompt = check_prompt(spec, info, found)
    params = _params(spec, info, found)
    stops = _stop_strings(spec.stopping.stop_strings, found)
    if (size := len(spec.cache.cache_salt.encode())) > MAX_SALT_BYTES:
        found.append(("spec.cache.cache_salt", f"at most {MAX_SALT_BYTES} bytes, got {size}"))
    queue_timeout = _positive_seconds(spec, "queue_timeout", "spec", found)
    max_duration = _positive_seconds(spec, "max_duration", "spec", found)
    if found or prompt is None:
        return None
    output = spec.output
    return Generation(
        prompt=prompt,
        params=params,
        stop_strings=stops,
        include_stop_in_text=spec.stopping.include_stop_in_text,
        text=output.text if output.HasField("text") else True,
        token_ids=output.token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        echo=output.echo,
        priority=spec.priority,
        queue_timeout=queue_timeout,
        max_duration=max_duration,
        cache_salt=spec.cache.cache_salt,
        bypass_prefix_cache=spec.cache.bypass_prefix_cache,
        path_of={**_PATH_OF, "prompt_token_ids": f"spec.{FIELD_OF_PROMPT[type(prompt)]}", "chat": "spec.chat"},
    )


def _params(spec: pb.GenerationSpec, info: ServedModel, found: Violations) -> SamplingParams:
    sampling, stopping, output = spec.sampling, spec.stopping, spec.output
    if output.logprobs_mode not in _MODES:
        found.append(("spec.output.logprobs_mode", f"unknown value {output.logprobs_mode}"))
    chosen = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS if sampling.HasField(name)}
    chosen.setdefault("seed", secrets.randbits(64))
    params = replace(
        info.default_sampling,
        **chosen,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        top_logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        logprobs_mode=_MODES.get(output.logprobs_mode, LogprobsMode.RAW),
    )
    found.extend((_PATH_OF[name], reason) for name, reason in params.violations(info.limits.vocab_size))
    seats = info.limits.max_num_seqs
    if seats < params.n <= 16:
        found.append(("spec.sampling.n", f"this server runs at most {seats} outputs at once, got {params.n}"))
    return params


def _stop_strings(stops: Sequence[str], found: Violations) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        found.append(("spec.stopping.stop_strings", f"at most {MAX_STOP_STRINGS}, got {len(stops)}"))
    for index, stop in enumerate(stops):
        if not 1 <= (size := len(stop.encode())) <= MAX_STOP_BYTES:
            found.append((f"spec.stopping.stop_strings[{index}]", f"must be 1 to {MAX_STOP_BYTES} bytes, got {size}"))
    return tuple(stops)


def _positive_seconds(holder: Message, name: str, path: str, found: Violations) -> float | None:
    """Seconds of a Duration field that must be positive; None when unset."""
    if not holder.HasField(name):
        return None
    value = duration_seconds(getattr(holder, name), f"{path}.{name}", found)
    if value is not None and value <= 0:
        found.append((f"{path}.{name}", f"must be positive, got {value:g} s"))
    return value


def duration_seconds(duration: Duration, path: str, found: Violations) -> float | None:
    """Seconds of a well-formed Duration; else a violation and None."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > 315_576_000_000 or abs(nanos) >= 10**9 or seconds * nanos < 0:
        found.append((path, "is not a valid duration"))
        return None
    return float(seconds + nanos / 1e9)


def refuse_unknown_fields(message: Message) -> None:
    """A field this build does not know is one it cannot honour. Raises `ServiceError`."""
    for path, number in _unknown_fields(message, ""):
        where = path or message.DESCRIPTOR.name
        raise ServiceError(Reason.FEATURE_UNSUPPORTED, f"{where}: field number {number} is not known to this version")


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield path, unknown.field_number
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        inner = f"{path}.{descriptor.name}" if path else descriptor.name
        for item in value if descriptor.is_repeated else (value,):
            yield from _unknown_fields(item, inner)


_PATH_OF = {
    **{name: f"spec.sampling.{name}" for name in (*_SAMPLING_FIELDS, "logit_bias")},
    **{name: f"spec.stopping.{name}" for name in _STOPPING_FIELDS},
    **{name: f"spec.output.{name}" for name in _OUTPUT_FIELDS},
}
