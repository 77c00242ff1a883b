"""Requests to plain data: every bad field at once, every good one honoured."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from engine.limits import Limits
from engine.sampling_params import LogprobsMode, SamplingParams
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.errors import Reason, ServiceError
from service.prompts import ChatPrompt, TextPrompt, TokenPrompt
from service.served_model import ServedModel
from service.validate import (
    Generation,
    check_detokenize,
    check_generate,
    check_stream,
    check_tokenize,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ServedModel(
    architecture="A", fingerprint="f", dtype="float32", device="cpu",
    limits=Limits(vocab_size=1000, max_model_len=256, num_blocks=16, block_size=16, max_num_seqs=8),
    eos_token_ids=(2,), default_sampling=SamplingParams(temperature=0.5, top_p=0.75, top_k=7), pipeline_depth=1,
)


def check(**fields: Any) -> Generation:
    fields.setdefault("text", "hello") if not {"chat", "token_ids", "prompt"} & fields.keys() else None
    fields.pop("prompt", None)
    return check_generate(pb.GenerateRequest(spec=pb.GenerationSpec(**fields)), MODEL, "m")


def violations(**fields: Any) -> dict[str, str]:
    with pytest.raises(ServiceError) as caught:
        check(**fields)
    assert caught.value.reason is Reason.FIELD_INVALID
    return dict(caught.value.violations)


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
    ("frequency_penalty", 2.1), ("frequency_penalty", -math.inf), ("presence_penalty", -2.1),
    ("presence_penalty", math.nan), ("repetition_penalty", 0.0), ("repetition_penalty", 10.5),
    ("repetition_penalty", math.nan), ("n", 0), ("n", 17), ("n", 9),
    ("logit_bias", {5: math.nan}), ("logit_bias", {5: 101.0}), ("logit_bias", {1000: 1.0}),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
]
BAD_STOPPING: list[tuple[dict[str, Any], str]] = [
    ({"stop_strings": ["x"] * 17}, "stop_strings"), ({"stop_strings": ["ok", ""]}, "stop_strings[1]"),
    ({"stop_strings": ["é" * 129]}, "stop_strings[0]"), ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": range(65)}, "stop_token_ids"), ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
]
BAD_OUTPUT: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 21}, "top_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs_mode": 9}, "logprobs_mode"),
    ({"prompt_logprobs": 0, "logprobs_mode": pb.LOGPROBS_MODE_PROCESSED}, "logprobs_mode"),
]
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *(({"sampling": pb.Sampling(**{name: value})}, f"spec.sampling.{name}") for name, value in BAD_SAMPLING),
    *(({"stopping": pb.Stopping(**fields)}, f"spec.stopping.{path}") for fields, path in BAD_STOPPING),
    *(({"output": pb.OutputOptions(**fields)}, f"spec.output.{path}") for fields, path in BAD_OUTPUT),
    ({"request_id": "no spaces"}, "spec.request_id"),
    ({"request_id": "x" * 129}, "spec.request_id"),
    ({"prompt": None}, "spec.prompt"),
    ({"token_ids": pb.TokenIds()}, "spec.token_ids.ids"),
    ({"token_ids": pb.TokenIds(ids=[1, 1000])}, "spec.token_ids.ids[1]"),
    ({"token_ids": pb.TokenIds(ids=[1]), "add_special_tokens": True}, "spec.add_special_tokens"),
    ({"chat": pb.Chat()}, "spec.chat.messages"),
    ({"chat": pb.Chat(messages=[pb.ChatMessage(content="hi")])}, "spec.chat.messages[0].role"),
    ({"cache": pb.CacheOptions(cache_salt="é" * 65)}, "spec.cache.cache_salt"),
    ({"queue_timeout": Duration()}, "spec.queue_timeout"),
    ({"queue_timeout": Duration(seconds=-1)}, "spec.queue_timeout"),
    ({"max_duration": Duration(seconds=1, nanos=-5)}, "spec.max_duration"),
]


@pytest.mark.parametrize(("fields", "path"), BAD_FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_field_is_named_with_its_proto_path(fields: dict[str, Any], path: str) -> None:
    assert list(violations(**fields)) == [path]


def test_all_bad_fields_are_reported_at_once() -> None:
    found = violations(
        prompt=None, request_id="a b", add_special_tokens=True, max_duration=Duration(),
        sampling=pb.Sampling(temperature=3, top_p=0, n=0),
        stopping=pb.Stopping(stop_strings=[""], max_tokens=1, min_tokens=2), output=pb.OutputOptions(top_logprobs=50),
    )
    assert found.keys() == {
        "spec.prompt", "spec.request_id", "spec.add_special_tokens", "spec.max_duration", "spec.sampling.temperature",
        "spec.sampling.top_p", "spec.sampling.n", "spec.stopping.stop_strings[0]", "spec.stopping.min_tokens",
        "spec.output.top_logprobs",
    }


def test_unset_sampling_fields_are_the_models_defaults() -> None:
    params = check(sampling=pb.Sampling(top_p=0.25)).params
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.5, 0.25, 7, 1)
    assert params.max_tokens is None
    assert params.seed is not None, "the server draws a seed"
    assert check().params.seed != params.seed


def test_every_field_arrives() -> None:
    generation = check(
        text="hi", add_special_tokens=False, priority=-7, queue_timeout=Duration(seconds=2),
        max_duration=Duration(nanos=500_000_000), cache=pb.CacheOptions(bypass_prefix_cache=True, cache_salt="s"),
        sampling=pb.Sampling(
            temperature=0, top_p=0.5, top_k=0, min_p=0.25, frequency_penalty=1, presence_penalty=-1,
            repetition_penalty=1.5, seed=2**64 - 1, n=3, logit_bias={9: -100.0, 4: 2.0},
        ),
        stopping=pb.Stopping(
            max_tokens=5, min_tokens=2, stop_strings=["a", "b"], stop_token_ids=[3], ignore_eos=True,
            include_stop_in_text=True,
        ),
        output=pb.OutputOptions(
            text=False, token_ids=True, top_logprobs=2, skip_special_tokens=False, echo=True,
            logprobs_mode=pb.LOGPROBS_MODE_PROCESSED,
        ),
    )
    assert generation.params == SamplingParams(
        temperature=0, top_p=0.5, top_k=0, min_p=0.25, frequency_penalty=1, presence_penalty=-1,
        repetition_penalty=1.5, seed=2**64 - 1, n=3, logit_bias=((4, 2.0), (9, -100.0)), max_tokens=5, min_tokens=2,
        stop_token_ids=(3,), ignore_eos=True, top_logprobs=2, logprobs_mode=LogprobsMode.PROCESSED,
    )
    assert generation.prompt == TextPrompt("hi", add_special_tokens=False)
    assert (generation.priority, generation.queue_timeout, generation.max_duration) == (-7, 2.0, 0.5)
    assert (generation.bypass_prefix_cache, generation.cache_salt) == (True, "s")
    assert generation.stop_strings == ("a", "b")
    assert generation.include_stop_in_text
    assert generation.echo
    assert generation.token_ids
    assert not generation.text
    assert not generation.skip_special_tokens


def test_prompts_of_every_kind() -> None:
    assert check(token_ids=pb.TokenIds(ids=[1, 2])).prompt == TokenPrompt([1, 2])
    variables = Struct()
    variables.update({"tools": ["x", 2, {"deep": 2.5}]})
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], template_kwargs=variables)
    prompt = check(chat=chat).prompt
    assert prompt == ChatPrompt(({"role": "user", "content": "hi"},), True, {"tools": ["x", 2, {"deep": 2.5}]})
    variables.update({"messages": []})
    chat.template_kwargs.CopyFrom(variables)
    assert list(violations(chat=chat)) == ["spec.chat.template_kwargs"]


@pytest.mark.parametrize(
    "value",
    [
        Value(number_value=math.nan), Value(number_value=math.inf), Value(),
        Value(list_value=ListValue(values=[Value()])),
    ],
)
def test_template_variables_must_be_values(value: Value) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_kwargs.fields["x"].CopyFrom(value)
    assert list(violations(chat=chat)) == ["spec.chat.template_kwargs"]


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf_grammar", "choice", "json_object"])
def test_constraints_are_refused_as_unsupported(kind: str) -> None:
    values: dict[str, Any] = {"choice": pb.Choice(options=["a"]), "json_object": True}
    with pytest.raises(ServiceError) as caught:
        check(constraint=pb.Constraint(**{kind: values.get(kind, "x")}))
    assert caught.value.reason is Reason.FEATURE_UNSUPPORTED
    assert kind in caught.value.message


def test_another_model_is_not_found() -> None:
    assert check(model="m").params.n == 1
    with pytest.raises(ServiceError) as caught:
        check(model="other")
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize("where", ["", "spec", "spec.sampling", "spec.chat.messages"])
def test_a_field_this_build_does_not_know_is_refused(where: str) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    request = pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat, sampling=pb.Sampling(temperature=0)))
    target: Any = request
    for name in filter(None, where.split(".")):
        target = getattr(target, name)
    if where.endswith("messages"):
        target = target[0]
    target.MergeFromString(b"\xf8\x07\x01")  # field 127, varint 1
    with pytest.raises(ServiceError) as caught:
        check_generate(request, MODEL, "m")
    assert caught.value.reason is Reason.FEATURE_UNSUPPORTED
    assert "127" in caught.value.message


def test_stream_options() -> None:
    spec = pb.GenerationSpec(text="x")
    plain = check_stream(pb.StreamRequest(spec=spec), MODEL, "m")
    assert (plain.flush_tokens, plain.max_flush_interval) == (1, None)
    options = pb.StreamOptions(flush_tokens=5, max_flush_interval=Duration(nanos=250_000_000))
    slow = check_stream(pb.StreamRequest(spec=spec, stream_options=options), MODEL, "m")
    assert (slow.flush_tokens, slow.max_flush_interval) == (5, 0.25)
    with pytest.raises(ServiceError) as caught:
        options = pb.StreamOptions(flush_tokens=0, max_flush_interval=Duration())
        check_stream(pb.StreamRequest(spec=spec, stream_options=options), MODEL, "m")
    assert dict(caught.value.violations).keys() == {"stream_options.flush_tokens", "stream_options.max_flush_interval"}


def test_tokenize_and_detokenize() -> None:
    assert check_tokenize(pb.TokenizeRequest(text=""), "m") == TextPrompt("", add_special_tokens=True)
    for request, path in (
        (pb.TokenizeRequest(), "input"),
        (pb.TokenizeRequest(chat=pb.Chat()), "chat.messages"),
        (pb.TokenizeRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="u")]), add_special_tokens=True),
         "add_special_tokens"),
    ):
        with pytest.raises(ServiceError) as caught:
            check_tokenize(request, "m")
        assert [found for found, _ in caught.value.violations] == [path]
    assert check_detokenize(pb.DetokenizeRequest(token_ids=[1, 999]), MODEL, "m") == ([1, 999], True)
    with pytest.raises(ServiceError) as caught:
        check_detokenize(pb.DetokenizeRequest(token_ids=[1, 1000]), MODEL, "m")
    assert caught.value.violations[0][0] == "token_ids[1]"


def declared_fields(descriptor: Any, seen: set[str]) -> Iterator[str]:
    """Every field of a message and of our messages in it."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field.name
        inner = field.message_type
        if inner is not None and inner.file.package == descriptor.file.package and not inner.GetOptions().map_entry:
            yield from declared_fields(inner, seen)


@pytest.mark.parametrize(
    "message", [pb.GenerateRequest, pb.StreamRequest, pb.TokenizeRequest, pb.DetokenizeRequest, pb.GetModelInfoRequest]
)
def test_every_declared_field_is_looked_at(message: type[Message]) -> None:
    """A field that no code names would be accepted and ignored. Kinds of constraint are refused as one."""
    source = "".join(path.read_text() for path in sorted((ROOT / "service").glob("*.py")))
    kinds = {field.name for field in pb.Constraint.DESCRIPTOR.fields}
    unseen = [
        name
        for name in declared_fields(message.DESCRIPTOR, set())
        if name not in kinds and not re.search(rf"[.\"]{name}\b", source)
    ]
    assert unseen == []
