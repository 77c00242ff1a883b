from datetime import timedelta
from typing import Any, get_type_hints

import pytest
from google.protobuf.duration_pb2 import Duration

from clients.spec import SpecOptions, build_spec
from protos.picovllm.inference.v1 import inference_pb2 as pb


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    assert build_spec("hi", {}) == pb.GenerationSpec(text="hi")


def test_zero_is_a_value() -> None:
    spec = build_spec("hi", {"temperature": 0, "max_tokens": 0, "seed": 0, "top_logprobs": 0, "text": False})
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.HasField("seed")
    assert spec.stopping.HasField("max_tokens")
    assert spec.output.HasField("top_logprobs")
    assert spec.output.HasField("text")


def test_each_option_goes_to_its_message() -> None:
    spec = build_spec(
        [1, 2],
        {
            "request_id": "r",
            "seed": 2**64 - 1,
            "logit_bias": {5: -1.5},
            "stop": "END",
            "echo": True,
            "cache_salt": "s",
            "queue_timeout": 1.5,
            "max_duration": timedelta(milliseconds=20),
        },
    )
    assert spec == pb.GenerationSpec(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.Sampling(seed=2**64 - 1, logit_bias={5: -1.5}),
        stopping=pb.Stopping(stop_strings=["END"]),
        output=pb.OutputOptions(echo=True),
        cache=pb.CacheOptions(cache_salt="s"),
        queue_timeout=Duration(seconds=1, nanos=500_000_000),
        max_duration=Duration(nanos=20_000_000),
    )


def test_every_field_of_the_spec_has_an_option() -> None:
    parts = (pb.Sampling, pb.Stopping, pb.OutputOptions, pb.CacheOptions)
    fields = {name for part in parts for name in part.DESCRIPTOR.fields_by_name} - {"stop_strings"} | {"stop"}
    prompt_and_parts = {"text", "token_ids", "chat", "sampling", "stopping", "output", "cache"}
    fields |= set(pb.GenerationSpec.DESCRIPTOR.fields_by_name) - prompt_and_parts
    assert set(get_type_hints(SpecOptions)) == fields


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("text", "text"),
        ("", "text"),
        ([1, 2, 3], "token_ids"),
        ([{"role": "user", "content": "hi"}], "chat"),
        (pb.Chat(messages=[pb.ChatMessage(role="user")]), "chat"),
    ],
)
def test_the_prompt_is_what_its_type_says(prompt: Any, field: str) -> None:
    assert build_spec(prompt, {}).WhichOneof("prompt") == field


def test_an_unknown_option_and_an_empty_prompt_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_spec("hi", {"temprature": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="not empty"):
        build_spec([], {})
