"""Every row of the error table that a call can meet, over gRPC, with the fake engine."""

import threading
import time
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from protos.picovllm.admin.v1 import admin_pb2
from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.conftest import StartServer
from tests.service.fake_engine import CRASH_TOKEN, HANG_TOKEN, NAN_TOKEN
from tests.service.raw_client import RawClient
from tests.service.rpc import Failure, failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ServerProcess

CODES = grpc.StatusCode
LONG = 8000
GENERATE = "/picovllm.inference.v1.InferenceService/Generate"
STREAM = "/picovllm.inference.v1.InferenceService/Stream"


@pytest.fixture(scope="module")
def stub(fake_server: ServerProcess) -> Any:
    return fake_server.stub()


def check(failure: Failure, code: grpc.StatusCode, reason: str) -> Failure:
    assert (failure.code, failure.reason) == (code, reason)
    assert (failure.retry_after is not None) == (code is CODES.RESOURCE_EXHAUSTED)
    return failure


def both(stub: Any, request: pb.GenerationSpec, code: grpc.StatusCode, reason: str) -> Failure:
    check(failure_of(lambda: generate(stub, request)), code, reason)
    return check(failure_of(stream(stub, request)), code, reason)


def test_bad_fields(stub: Any) -> None:
    failure = both(
        stub, spec(sampling=pb.Sampling(temperature=3, top_p=-1), priority=3, request_id="bad id"),
        CODES.INVALID_ARGUMENT, "FIELD_INVALID",
    )
    assert failure.violations.keys() == {"spec.sampling.temperature", "spec.sampling.top_p", "spec.request_id"}


def test_a_refusal_is_trailers_only(fake_server: ServerProcess) -> None:
    """One frame of headers: after initial metadata of their own, clients would not retry."""
    requests = ((GENERATE, pb.GenerateRequest(spec=spec(model="x"))), (STREAM, pb.StreamRequest(spec=spec(model="x"))))
    for path, request in requests:
        with RawClient(fake_server.inference_address) as client:
            client.call(path, request)
            client.read(5)
            assert client.ended
            assert len(client.header_frames) == 1
            assert client.trailers["grpc-status"] == str(CODES.NOT_FOUND.value[0])


def test_an_empty_prompt_is_a_bad_field(stub: Any) -> None:
    assert both(stub, spec(""), CODES.INVALID_ARGUMENT, "FIELD_INVALID").violations.keys() == {"spec.text"}


def test_a_chat_that_the_template_refuses(stub: Any) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    chat.template_kwargs.update({"loop": None})
    generate(stub, spec(chat=chat))


ADMIN = "/picovllm.admin.v1.AdminService/"
HEALTH = "/grpc.health.v1.Health/"


def send(server: ServerProcess, path: str, data: bytes) -> Failure:
    """A unary or streamed call with these bytes as its request."""
    channel = server.channel(server.admin_address) if path.startswith(ADMIN) else server.channel()
    return failure_of(channel.unary_stream(path, bytes, bytes)(data, timeout=10))


@pytest.mark.parametrize("path", [GENERATE, STREAM, f"{ADMIN}Drain", f"{ADMIN}WatchStatus", f"{HEALTH}Check"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x04\x1a\x02\xff"])
def test_bytes_that_are_no_message(fake_server: ServerProcess, path: str, data: bytes) -> None:
    failure = check(send(fake_server, path, data), CODES.INVALID_ARGUMENT, "FIELD_INVALID")
    assert "cannot be read" in failure.message
    assert "Traceback" not in fake_server.log


@pytest.mark.parametrize("method", ["GetStatus", "WatchStatus", "GetLoad", "Drain", "Undrain", "Shutdown"])
def test_administration_refuses_fields_it_does_not_know(fake_server: ServerProcess, method: str) -> None:
    check(send(fake_server, f"{ADMIN}{method}", b"\xf8\x3f\x01"), CODES.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    assert fake_server.health() == 1


def test_unknown_fields_are_found_at_every_depth(fake_server: ServerProcess) -> None:
    path = "/picovllm.inference.v1.InferenceService/GetModelInfo"
    check(send(fake_server, path, b"\xf8\x3f\x01"), CODES.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    drain = b"\x0a\x05\x08\x01\xf8\x3f\x01"  # inside lame_duck
    failure = check(send(fake_server, f"{ADMIN}Drain", drain), CODES.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    assert "lame_duck" in failure.message
    assert fake_server.health() == 1


def test_prompt_too_long_and_over_the_pool(stub: Any) -> None:
    request = spec(token_ids=pb.TokenIds(ids=[5] * 9000))
    failure = both(stub, request, CODES.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert failure.metadata == {"requested": "9008", "limit": "8192"}
    request = spec(token_ids=pb.TokenIds(ids=[5] * 1000), max_tokens=7000, sampling=pb.Sampling(n=16))
    failure = both(stub, request, CODES.INVALID_ARGUMENT, "EXCEEDS_KV_CAPACITY")
    assert failure.metadata["limit"] == "4096"


def test_unsupported_unknown_and_duplicate(stub: Any) -> None:
    both(stub, spec(constraint=pb.Constraint(regex="a")), CODES.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    both(stub, spec(model="other"), CODES.NOT_FOUND, "MODEL_NOT_FOUND")
    events = stream(stub, spec(max_tokens=LONG, request_id="twice"))
    wait_started(events)
    failure = both(stub, spec(request_id="twice"), CODES.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert failure.trailing["x-request-id"] == "twice"
    events.cancel()


def test_a_transparent_retry_takes_over(fake_server: ServerProcess, stub: Any) -> None:
    """Libraries keep the header for themselves, so a raw client sends it."""
    first = stream(stub, spec(max_tokens=LONG, request_id="again"))
    wait_started(first)
    request = pb.GenerateRequest(spec=spec(max_tokens=3, request_id="again"))
    with RawClient(fake_server.inference_address) as client:
        client.call(GENERATE, request, ("grpc-previous-rpc-attempts", "0"))
        client.read(5)
        assert client.trailers["grpc-status"] == str(CODES.ALREADY_EXISTS.value[0])
    with RawClient(fake_server.inference_address) as client:
        client.call(GENERATE, request, ("grpc-previous-rpc-attempts", "1"))
        client.read(5)
        assert client.trailers["grpc-status"] == "0"
    check(failure_of(first), CODES.CANCELLED, "CLIENT_CANCELLED")


def test_nan_logits_end_one_request_only(stub: Any) -> None:
    other = stream(stub, spec(max_tokens=200))
    both(stub, spec(token_ids=pb.TokenIds(ids=[50, NAN_TOKEN])), CODES.INTERNAL, "NAN_LOGITS")
    assert list(other)[-1].HasField("completed")


def test_admin_cancel(fake_server: ServerProcess, stub: Any) -> None:
    events = stream(stub, spec(max_tokens=LONG, request_id="cancel-me"))
    wait_started(events)
    target = admin_pb2.RequestIds(ids=["cancel-me", "no-such"])
    response = fake_server.admin.CancelRequests(admin_pb2.CancelRequestsRequest(ids=target))
    assert (list(response.cancelled_ids), list(response.unknown_ids)) == (["cancel-me"], ["no-such"])
    check(failure_of(events), CODES.ABORTED, "ADMIN_CANCELLED")
    assert fake_server.wait_idle().kv_blocks_used == 0


def test_tokenize_and_detokenize_fail_in_the_same_way(stub: Any) -> None:
    failure = check(failure_of(lambda: stub.Tokenize(pb.TokenizeRequest())), CODES.INVALID_ARGUMENT, "FIELD_INVALID")
    assert failure.violations.keys() == {"input"}
    call = pb.DetokenizeRequest(token_ids=[60_000])
    failure = check(failure_of(lambda: stub.Detokenize(call)), CODES.INVALID_ARGUMENT, "FIELD_INVALID")
    assert failure.violations.keys() == {"token_ids[0]"}
    other = pb.TokenizeRequest(text="x", model="y")
    check(failure_of(lambda: stub.Tokenize(other)), CODES.NOT_FOUND, "MODEL_NOT_FOUND")


def test_queue_bounds_and_queue_timeout(start_fake: StartServer) -> None:
    server = start_fake("--max-num-seqs", "1", "--max-queued-requests", "2", "--max-queued-tokens", "50")
    stub = server.stub()
    running = stream(stub, spec(max_tokens=LONG))
    wait_started(running)
    both(stub, spec(token_ids=pb.TokenIds(ids=[5] * 51)), CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    begin = time.monotonic()
    request = spec(queue_timeout=Duration(nanos=200_000_000))
    check(failure_of(stream(stub, request)), CODES.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
    assert 0.15 < time.monotonic() - begin < 1
    waiting = [stream(stub, spec(max_tokens=2)) for _ in range(2)]
    while server.load().queued_requests < 2:
        time.sleep(0.02)
    both(stub, spec(), CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    running.cancel()
    assert all(list(events)[-1].HasField("completed") for events in waiting)
    assert server.wait_idle().queued_requests == 0


def test_deadlines_in_every_phase_show_our_details(start_fake: StartServer) -> None:
    """40 of 40 calls see the server's status and not their own timer."""
    server = start_fake("--max-num-seqs", "4", "--fake-step-time", "0.02")
    stub = server.stub()
    prefill = spec(token_ids=pb.TokenIds(ids=[5] * 8000), max_tokens=2, priority=5, sampling=pb.Sampling(n=1))
    for request, timeout, reason in (
        (spec(max_tokens=LONG), 0.25, "DEADLINE_DECODE"), (prefill, 0.22, "DEADLINE_PREFILL"),
    ):
        for call in (lambda r=request, t=timeout: generate(stub, r, timeout=t),
                     lambda r=request, t=timeout: stream(stub, r, timeout=t)):
            for _ in range(10):
                check(failure_of(call), CODES.DEADLINE_EXCEEDED, reason)
    block = [stream(stub, spec(max_tokens=LONG)) for _ in range(4)]
    for events in block:
        wait_started(events)
    for _ in range(20):
        check(failure_of(lambda: generate(stub, spec(), timeout=0.22)), CODES.DEADLINE_EXCEEDED, "DEADLINE_QUEUED")
    assert server.load().decoding_requests == 4
    for events in block:
        events.cancel()
    assert server.wait_idle().kv_blocks_used == 0


def test_a_deadline_holds_while_the_engine_is_busy(stub: Any) -> None:
    """The front ends the call by itself: the engine is in a step of a second."""
    begin = time.monotonic()
    request = spec(token_ids=pb.TokenIds(ids=[50, HANG_TOKEN, 51]))
    check(failure_of(stream(stub, request, timeout=0.4)), CODES.DEADLINE_EXCEEDED, "DEADLINE_DECODE")
    assert time.monotonic() - begin < 0.45


def test_an_engine_that_dies_ends_streams_with_worker_lost(start_fake: StartServer) -> None:
    server = start_fake()
    stub = server.stub()
    others = [stream(stub, spec(max_tokens=LONG)) for _ in range(4)]
    for events in others:
        wait_started(events)
    failures: list[Failure] = []
    threads = [threading.Thread(target=lambda e=events: failures.append(failure_of(e))) for events in others]
    for thread in threads:
        thread.start()
    check(
        failure_of(lambda: generate(stub, spec(token_ids=pb.TokenIds(ids=[CRASH_TOKEN])))),
        CODES.UNAVAILABLE, "WORKER_LOST",
    )
    for thread in threads:
        thread.join(10)
    assert len(failures) == 4
    for failure in failures:
        check(failure, CODES.UNAVAILABLE, "WORKER_LOST")
    assert server.wait() == 1
    assert "the fake engine crashes as asked" in server.log


def test_starting_is_said(start_fake: StartServer) -> None:
    """Requests are refused, not left waiting, until the model is loaded."""
    server = start_fake("--fake-load-time", "1.5", "--listen", "127.0.0.1:0", wait=False)
    address = server.wait_log(r"listening on (\S+)")
    stub = server.stub(address)
    check(failure_of(lambda: generate(stub, spec())), CODES.UNAVAILABLE, "STARTING")
    check(failure_of(lambda: stub.GetModelInfo(pb.GetModelInfoRequest())), CODES.UNAVAILABLE, "STARTING")
    assert server.health("liveness", address) == 1
    assert server.health("", address) == 2
    server.wait_until_ready()
    assert server.health() == 1
    assert generate(stub, spec()).usage.completion_tokens == 8
