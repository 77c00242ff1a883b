import grpc
import pytest

from clients.client import AdminClient, PicoClient
from clients.errors import FieldViolation, PicoError
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.clients.fake_server import WORDS, FakeServer


def test_generate(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        reply = client.generate("hi", max_tokens=8, temperature=0)
    assert reply.outputs[0].text == "".join(WORDS)
    (request,) = server.inference.requests
    assert request.spec == pb.GenerationSpec(
        text="hi", sampling=pb.Sampling(temperature=0), stopping=pb.Stopping(max_tokens=8)
    )


def test_stream_to_its_end(server: FakeServer) -> None:
    with PicoClient(server.address) as client, client.stream([{"role": "user", "content": "hi"}]) as stream:
        assert list(stream.texts()) == list(WORDS)
    assert stream.progress.started is not None
    assert stream.progress.finished[0].finish_reason == pb.FINISH_REASON_STOP
    assert stream.progress.completed is not None
    assert stream.progress.completed.usage.completion_tokens == len(WORDS)


def test_leaving_a_stream_by_break_cancels_it(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        with client.stream("forever") as stream:
            for _ in stream.texts():
                break
        assert server.inference.cancelled.wait(5)


def test_leaving_a_stream_by_an_exception_cancels_it(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        with pytest.raises(KeyboardInterrupt), client.stream("forever") as stream:
            next(stream.texts())
            raise KeyboardInterrupt
        assert server.inference.cancelled.wait(5)


def test_a_stream_cannot_be_used_without_its_block(server: FakeServer) -> None:
    with PicoClient(server.address) as client, pytest.raises(RuntimeError, match="with"):
        next(iter(client.stream("hi")))
    assert server.inference.requests == []


def test_tokenize_detokenize_and_info(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        assert client.tokenize("ab") == [97, 98]
        assert client.detokenize([97, 98]) == "ab"
        assert client.model_info().architecture == "FakeForCausalLM"
        client.tokenize([{"role": "user", "content": "hi"}], add_special_tokens=False)
    assert server.inference.requests[-1].chat.messages[0].content == "hi"
    assert server.inference.requests[-1].HasField("add_special_tokens")


def test_all_bad_fields_are_told(server: FakeServer) -> None:
    with PicoClient(server.address) as client, pytest.raises(PicoError) as failure:
        client.generate("bad fields")
    error = failure.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert error.message == "refused: FIELD_INVALID"
    assert error.metadata == {"limit": "4"}
    assert error.request_id == "r-7"
    assert error.violations == (
        FieldViolation("spec.sampling.top_p", "is wrong"),
        FieldViolation("spec.stopping.max_tokens", "is wrong"),
    )


def test_a_stream_fails_with_the_advice_when_to_retry(server: FakeServer) -> None:
    with PicoClient(server.address) as client, client.stream("full") as stream, pytest.raises(PicoError) as failure:
        list(stream)
    assert (failure.value.reason, failure.value.retry_after) == ("QUEUE_FULL", 1.5)


def test_unavailable_is_tried_three_times(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        assert client.generate("flaky").model == "fake"
    assert server.inference.attempts == 3


def test_a_deadline_reaches_the_server_and_ends_the_call(server: FakeServer) -> None:
    with (
        PicoClient(server.address) as client,
        client.stream("forever", timeout=0.4) as stream,
        pytest.raises(PicoError) as failure,
    ):
        list(stream)
    assert failure.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
    (deadline,) = server.inference.deadlines
    assert deadline is not None
    assert 0 < deadline <= 0.4


def test_no_deadline_unless_asked_for(server: FakeServer) -> None:
    with PicoClient(server.address) as client:
        client.generate("hi")
    assert server.inference.deadlines == [None]


def test_no_server_is_an_error_without_reason() -> None:
    with PicoClient("127.0.0.1:1") as client, pytest.raises(PicoError) as failure:
        client.generate("hi", timeout=10)
    assert (failure.value.code, failure.value.reason) == (grpc.StatusCode.UNAVAILABLE, "")


def test_a_server_that_is_not_ready_is_not_asked(server: FakeServer) -> None:
    server.set_ready(False)
    with PicoClient(server.address) as client, pytest.raises(PicoError) as failure:
        client.generate("hi", timeout=10)
    assert failure.value.code == grpc.StatusCode.UNAVAILABLE
    assert server.inference.requests == []


def test_admin(server: FakeServer) -> None:
    with AdminClient(server.address) as client:
        assert client.status().state == admin.INSTANCE_STATE_SERVING
        assert client.load().kv_blocks_used == 7
        assert client.drain(lame_duck=0, drain_timeout=2, reason="test").state == admin.INSTANCE_STATE_DRAINING
        assert client.undrain().state == admin.INSTANCE_STATE_SERVING
        assert client.list_requests()[0].request_id == "r1"
        assert client.cancel_requests(["r1"]).cancelled_ids == ["r1"]
        client.cancel_requests(None)
        assert (client.flush_cache().kv_blocks_freed, client.flush_cache().kv_blocks_held) == (5, 7)
        assert client.set_log_level("service", admin.LOG_LEVEL_DEBUG, ttl=3) == admin.LOG_LEVEL_INFO
        assert client.metrics().startswith("picovllm_requests")
        client.shutdown(immediate=True)
        with client.watch() as states:
            assert [event.status.state for event in states][-1] == admin.INSTANCE_STATE_STOPPED
    drain, cancel, cancel_all, _, _, level, shutdown = server.admin.requests
    assert drain.HasField("lame_duck")
    assert (drain.timeout.seconds, drain.reason) == (2, "test")
    assert list(cancel.ids.ids) == ["r1"]
    assert cancel_all.all
    assert (level.logger, level.ttl.seconds) == ("service", 3)
    assert shutdown.immediate
    assert not shutdown.HasField("timeout")
