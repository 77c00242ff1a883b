"""Results over gRPC with the fake engine, which generates the prompt's own tokens again: we choose the text."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.results import assemble, both
from tests.service.rpc import generate, spec, stream
from tests.service.server_process import ServerProcess
from tests.service.test_text import LANGUAGES


@pytest.fixture(scope="module")
def stub(fake_server: ServerProcess) -> Any:
    return fake_server.stub()


def tokenize(stub: Any, text: str) -> list[int]:
    return list(stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_language_comes_whole_and_in_valid_pieces(stub: Any, name: str) -> None:
    text = LANGUAGES[name]
    result = both(stub, spec(text, max_tokens=len(tokenize(stub, text)), output=pb.OutputOptions(token_ids=True)))
    assert result.outputs[0].text == text
    assert result.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_stop_strings_across_tokens_and_their_counts(stub: Any) -> None:
    text = "one two three four five six"
    for stops, expected, matched, include, visible in (
        (["ree fo"], "one two th", "ree fo", False, 3),
        (["ree fo"], "one two three fo", "ree fo", True, 4),
        (["five six", "four"], "one two three ", "four", False, 4),
        ([" nothing"], text, "", False, 6),
    ):
        stopping = pb.Stopping(max_tokens=6, stop_strings=stops, include_stop_in_text=include)
        result = both(stub, spec(text, stopping=stopping, output=pb.OutputOptions(token_ids=True)))
        (output,) = result.outputs
        assert output.text == expected
        assert output.stop_match.stop_text == matched
        assert output.finish_reason == (pb.FINISH_REASON_STOP if matched else pb.FINISH_REASON_LENGTH)
        assert result.usage.completion_tokens == len(output.token_ids) == (4 if matched else 6)
        assert output.visible_token_count == visible


def test_eos_and_stop_tokens(stub: Any) -> None:
    words = tokenize(stub, "alpha beta gamma")
    ids = [*words[:-1], 2, words[-1]]
    result = both(stub, spec(token_ids=pb.TokenIds(ids=ids), max_tokens=20, output=pb.OutputOptions(token_ids=True)))
    (output,) = result.outputs
    assert list(output.token_ids) == [*words[:-1], 2], "EOS is among the ids"
    assert output.stop_match == pb.StopMatch(eos_token_id=2)
    assert output.text == "alpha beta"
    assert result.usage.completion_tokens == len(words)
    stopping = pb.Stopping(max_tokens=20, include_stop_in_text=True)
    assert both(stub, spec(token_ids=pb.TokenIds(ids=ids), stopping=stopping)).outputs[0].text == "alpha beta<|im_end|>"
    stopping = pb.Stopping(max_tokens=20, stop_token_ids=[words[1]])
    (output,) = both(stub, spec(token_ids=pb.TokenIds(ids=ids), stopping=stopping)).outputs
    assert output.stop_match == pb.StopMatch(stop_token_id=words[1])
    assert output.visible_token_count == 1
    stopping = pb.Stopping(max_tokens=len(ids), ignore_eos=True)
    assert both(stub, spec(token_ids=pb.TokenIds(ids=ids), stopping=stopping)).outputs[0].text == "alpha beta gamma"


def test_min_tokens_holds_for_stop_strings_too(stub: Any) -> None:
    stopping = pb.Stopping(max_tokens=12, min_tokens=7, stop_strings=[" two"])
    result = both(stub, spec("one two three", stopping=stopping))
    assert result.usage.completion_tokens == 8
    assert result.outputs[0].stop_match.stop_text == " two"


def test_n_outputs_logprobs_and_echo(stub: Any) -> None:
    output = pb.OutputOptions(token_ids=True, top_logprobs=2, prompt_logprobs=1, echo=True)
    result = both(stub, spec("one two three", max_tokens=4, sampling=pb.Sampling(n=3, seed=5), output=output))
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert result.outputs[0].text == "one two three" "one two three" "one"
    assert result.outputs[1].text == "one two three" "one"
    assert result.seed == 5
    assert list(result.prompt_token_ids) == tokenize(stub, "one two three")
    assert len(result.prompt_logprobs) == 3
    assert result.usage == pb.Usage(prompt_tokens=3, completion_tokens=12, total_tokens=15)
    entry = result.outputs[2].logprobs[1]
    assert entry.token_bytes == b" two"
    assert [alternative.rank for alternative in entry.top] == [1, 2]
    assert len(result.outputs[2].logprobs) == 4


def test_no_text_when_not_asked_for(stub: Any) -> None:
    result = both(stub, spec("one two", max_tokens=3, output=pb.OutputOptions(text=False, token_ids=True)))
    assert result.outputs[0].text == ""
    assert result.outputs[0].visible_token_count == 0
    assert len(result.outputs[0].token_ids) == 3


def test_scoring_only(stub: Any) -> None:
    output = pb.OutputOptions(prompt_logprobs=3, echo=True)
    result = both(stub, spec("a b c d", max_tokens=0, output=output))
    assert result.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert result.outputs[0].text == "a b c d"
    assert result.usage.completion_tokens == 0
    assert len(result.prompt_logprobs) == 4


def test_chat_equals_its_tokens(stub: Any) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids
    assert ids[0] == 1
    result = generate(stub, spec(chat=chat, max_tokens=0, output=pb.OutputOptions(echo=True)))
    assert list(result.prompt_token_ids) == list(ids)
    text = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)).text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_unset_maximum_is_the_room_there_is_and_is_reported(stub: Any) -> None:
    events = stream(stub, spec("one two three", max_tokens=None, stopping=pb.Stopping(stop_strings=["three"])))
    assert next(iter(events)).started.max_tokens == 8192 - 3


def test_max_duration_ends_with_what_there_is(stub: Any) -> None:
    request = spec("one two", max_tokens=8000, max_duration=Duration(nanos=300_000_000))
    result = generate(stub, request)
    assert result.outputs[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert 10 < result.usage.completion_tokens < 1000
    assert result.timings.total_duration.ToMilliseconds() < 600


def test_flush_options_bundle_tokens_but_never_the_first(stub: Any) -> None:
    def deltas(options: pb.StreamOptions) -> list[int]:
        request = spec("one two three", max_tokens=30, output=pb.OutputOptions(token_ids=True))
        return [len(e.delta.token_ids) for e in stream(stub, request, options) if e.HasField("delta")]

    assert sum(deltas(pb.StreamOptions())) == 30
    bundled = deltas(pb.StreamOptions(flush_tokens=10))
    assert bundled[0] == 1
    assert all(size >= 10 for size in bundled[1:-1])
    assert sum(bundled) == 30
    timed = deltas(pb.StreamOptions(flush_tokens=1000, max_flush_interval=Duration(nanos=15_000_000)))
    assert timed[0] == 1
    assert 3 <= len(timed) <= 15
    assert len(deltas(pb.StreamOptions(flush_tokens=1000))) == 2


def test_large_results_come_in_messages_of_bounded_size(stub: Any) -> None:
    ids = list(range(1000, 3000))
    output = pb.OutputOptions(token_ids=True, top_logprobs=20, prompt_logprobs=20, echo=True)
    request = spec(token_ids=pb.TokenIds(ids=ids), max_tokens=1000, output=output)
    options = pb.StreamOptions(flush_tokens=1000)
    events = list(stream(stub, request, options))
    assert max(event.ByteSize() for event in events) <= 256 * 1024
    assert max(event.ByteSize() for event in events) > 50 * 1024
    streamed, unary = assemble(events), generate(stub, request)
    assert streamed.outputs == unary.outputs
    assert streamed.prompt_logprobs == unary.prompt_logprobs
    assert streamed.prompt_token_ids == unary.prompt_token_ids


def test_model_info(stub: Any) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest(model="tiny"))
    assert info.architecture == "FakeForCausalLM"
    assert (info.limits.vocab_size, info.limits.max_context_tokens, info.limits.kv_block_tokens) == (49_152, 8192, 16)
    assert info.limits.kv_capacity_tokens == 4096 * 16
    assert info.default_sampling.temperature == 0.5
    assert not info.default_sampling.HasField("seed")
    for field in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "n"):
        assert info.default_sampling.HasField(field)
    assert list(info.eos_token_ids) == [2]
    assert info.features.chat
    assert not info.features.constraint
    assert len(info.tokenizer_fingerprint) == 64


def test_the_request_id_is_in_the_initial_metadata(stub: Any) -> None:
    _, call = stub.Generate.with_call(pb.GenerateRequest(spec=spec(request_id="my.id:1-a_b")))
    assert dict(call.initial_metadata())["x-request-id"] == "my.id:1-a_b"
    events = stream(stub, spec())
    list(events)
    assert len(dict(events.initial_metadata())["x-request-id"]) == 32
