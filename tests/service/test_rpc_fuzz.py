"""Any request: a result, the same streamed and unary, or a refusal for a stated reason; never INTERNAL."""

import math
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.results import both
from tests.service.rpc import Failure
from tests.service.server_process import ServerProcess

REFUSALS = {"FIELD_INVALID", "PROMPT_TOO_LONG", "EXCEEDS_KV_CAPACITY", "FEATURE_UNSUPPORTED", "MODEL_NOT_FOUND"}
words = st.text(st.sampled_from("abc é你😀\n<|im_end|>"), max_size=12)
good_floats = st.sampled_from([0.5, 1.0, 0.25])
odd_floats = st.one_of(
    *[good_floats] * 12, st.sampled_from([0.0, 2.0, -1.0, 11.0, math.nan, math.inf, 1e-40])
)
models = st.sampled_from(["", "tiny", "tiny", "tiny", "x"])
roles = st.sampled_from(["user", "system", "x"])
stop_words = st.text(st.sampled_from("abc é你😀\n<|im_end|>"), min_size=1, max_size=12)
token_ids = st.lists(st.integers(10, 49_151), min_size=1, max_size=20)


def message(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A message with any subset of the fields, None meaning unset."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def struct_of(values: dict[str, Any]) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


chats = message(
    pb.Chat,
    messages=st.lists(message(pb.ChatMessage, role=roles, content=words), max_size=3),
    add_generation_prompt=st.booleans(),
    template_kwargs=st.dictionaries(words, st.one_of(words, st.integers(0, 9)), max_size=2).map(struct_of),
)
samplings = message(
    pb.Sampling, temperature=odd_floats, top_p=odd_floats, top_k=st.integers(0, 9), min_p=odd_floats,
    frequency_penalty=odd_floats, presence_penalty=odd_floats, repetition_penalty=odd_floats,
    seed=st.integers(0, 2**64 - 1), n=st.integers(1, 17),
    logit_bias=st.dictionaries(st.integers(0, 49_200), odd_floats, max_size=2),
)
stoppings = message(
    pb.Stopping, max_tokens=st.integers(0, 40), min_tokens=st.integers(0, 10), ignore_eos=st.booleans(),
    stop_strings=st.lists(stop_words, max_size=3), stop_token_ids=st.lists(st.integers(0, 49_160), max_size=2),
    include_stop_in_text=st.booleans(),
).map(lambda stopping: stopping if stopping.HasField("max_tokens") else pb.Stopping(max_tokens=9))
outputs = message(
    pb.OutputOptions, text=st.booleans(), token_ids=st.booleans(), top_logprobs=st.integers(0, 21),
    prompt_logprobs=st.integers(0, 21), logprobs_mode=st.integers(0, 1), skip_special_tokens=st.booleans(),
    echo=st.booleans(),
)
specs = st.one_of(
    *(
        message(
            pb.GenerationSpec, **{kind: prompt}, sampling=samplings, output=outputs, model=models,
            priority=st.integers(-(2**31), 2**31 - 1),
            max_duration=st.integers(0, 20).map(lambda seconds: Duration(seconds=seconds)),
        )
        for kind, prompt in (
            ("text", words), ("chat", chats), ("token_ids", token_ids.map(lambda ids: pb.TokenIds(ids=ids))),
        )
    )
)


@pytest.mark.parametrize("examples", [pytest.param(100), pytest.param(1500, marks=pytest.mark.slow)])
def test_every_request_is_answered_or_refused_for_a_reason(fake_server: ServerProcess, examples: int) -> None:
    stub = fake_server.stub()
    answered: list[pb.GenerateResponse] = []
    refused: list[str] = []

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(specs, stoppings)
    def run(spec: pb.GenerationSpec, stopping: pb.Stopping) -> None:
        spec.stopping.CopyFrom(stopping)
        try:
            result = both(stub, spec)
        except grpc.RpcError as error:
            refused.append(Failure(error).reason)
            return
        answered.append(result)
        assert len(result.outputs) == max(spec.sampling.n, 1)

    run()
    assert set(refused) <= REFUSALS
    assert len(answered) > examples // 40
    print(f"{len(answered)} answered, {len(refused)} refused")
    assert fake_server.wait_idle().kv_blocks_used == 0
