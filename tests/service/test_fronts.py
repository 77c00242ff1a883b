"""Several front processes of one instance: to clients and operators they are one server."""

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.picovllm.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.health import INFERENCE_SERVICE
from tests.service.conftest import StartServer
from tests.service.many_fronts import front_calls, stub_per_front
from tests.service.raw_client import RawClient
from tests.service.results import assemble, both
from tests.service.rpc import failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ServerProcess

LONG = 8000
THREE = ("--front-processes", "3")
ADMIN = admin_pb2


def connections(server: ServerProcess) -> list[int]:
    """Connections of clients to the inference port, by front."""
    port = int(server.inference_address.rpartition(":")[2])
    return [
        sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port for c in psutil.Process(pid).net_connections())
        for pid in server.front_pids()
    ]


def wait_until(condition: Any, timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_thirty_connections_reach_all_fronts_and_get_what_one_front_gives(
    start_tiny: StartServer, tiny_server: ServerProcess
) -> None:
    """The real engine, one request at a time: bit for bit."""
    server = start_tiny(*THREE, "--num-gpu-blocks", "2048")
    requests = [
        spec(
            f"number {i}", sampling=pb.Sampling(temperature=i % 2, seed=i), output=pb.OutputOptions(top_logprobs=1),
            stopping=pb.Stopping(max_tokens=8 + i, stop_strings=["e"] if i % 3 == 0 else []),
        )
        for i in range(30)
    ]
    expected = [generate(tiny_server.stub(), request).outputs for request in requests]
    stubs = [server.stub() for _ in requests]
    streamed = [assemble(list(stream(stub, each))).outputs for stub, each in zip(stubs, requests, strict=True)]
    assert streamed == expected
    reached = connections(server)
    assert sum(reached) == 30
    assert min(reached) > 0, reached
    counted = front_calls(server)
    assert counted["front-1"] + counted["front-2"] == sum(reached[1:])
    assert [counted["front-1"], counted["front-2"]] == reached[1:]


def test_each_front_serves_health_reflection_and_every_call(start_fake: StartServer) -> None:
    server = start_fake(*THREE)
    for stub, channel in _stubs_and_channels(server):
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)).status == 1
        assert both(stub, spec()).usage.completion_tokens == 8
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).model == "tiny"
        ids = stub.Tokenize(pb.TokenizeRequest(text="one two")).token_ids
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "one two"
        with pytest.raises(grpc.RpcError) as caught:
            admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    workers = server.status().workers
    assert [worker.name for worker in workers] == ["front-0", "front-1", "front-2", "engine-0"]
    assert all(worker.alive and psutil.pid_exists(worker.pid) for worker in workers)
    assert server.status().effective_config["front_processes"] == 3


def _stubs_and_channels(server: ServerProcess) -> list[tuple[Any, grpc.Channel]]:
    """One per front; the channel is the newest that the server handed out when the stub was made."""
    made: dict[int, tuple[Any, grpc.Channel]] = {}
    original = server.stub

    def remember(address: str | None = None) -> Any:
        stub = original(address)
        made[id(stub)] = (stub, server._channels[-1])
        return stub

    server.stub = remember  # type: ignore[method-assign]
    return [made[id(stub)] for stub in stub_per_front(server, 3)]


def test_stop_strings_cancels_and_vanished_clients_work_from_every_front(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-step-time", "0.005")
    for index, stub in enumerate(stub_per_front(server, 3)):
        request = spec("alpha beta gamma", stopping=pb.Stopping(max_tokens=LONG, stop_strings=["gamma"]))
        events = list(stream(stub, request))
        assert events[-2].finished.stop_match.stop_text == "gamma"
        assert server.wait_idle(1).kv_blocks_used == 0, "the engine stopped, too"
        events = stream(stub, spec(max_tokens=LONG, request_id=f"cancel-{index}"))
        wait_started(events)
        assert server.live_requests() == 1
        events.cancel()
        assert server.wait_idle(1).kv_blocks_used == 0
    vanishing = []
    while min(connections(server)) < 2:  # each front has one of the stubs above
        client = RawClient(server.inference_address)
        vanishing.append(client)
        client.call("/picovllm.inference.v1.InferenceService/Stream", pb.StreamRequest(spec=spec(max_tokens=LONG)))
        wait_until(lambda: server.live_requests() == len(vanishing))
    for client in vanishing:
        client.__exit__(None, None, None)
    assert server.wait_idle(2).kv_blocks_used == 0


def test_an_id_is_unique_over_all_fronts(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-step-time", "0.005")
    stubs = stub_per_front(server, 3)
    for index, stub in enumerate(stubs):
        events = stream(stub, spec(max_tokens=LONG, request_id="twice"))
        wait_started(events)
        for other in stubs:
            for call in (generate, stream):
                failure = failure_of(lambda o=other, c=call: c(o, spec(request_id="twice")))
                assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
                assert failure.message == "request twice is alive"
                assert failure.trailing["x-request-id"] == "twice"
        next(events)
        assert [r.request_id for r in server.admin.ListRequests(ADMIN.ListRequestsRequest()).requests] == ["twice"]
        server.admin.CancelRequests(ADMIN.CancelRequestsRequest(all=True))
        assert failure_of(events).reason == "ADMIN_CANCELLED"
        again = stubs[(index + 1) % 3]
        assert generate(again, spec(request_id="twice")).usage.completion_tokens == 8, "free once its end is told"
        assert generate(stub, spec(request_id="twice")).usage.completion_tokens == 8


def test_a_transparent_retry_takes_over_from_whatever_front(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-step-time", "0.005")
    request = pb.GenerateRequest(spec=spec(max_tokens=3, request_id="again"))
    for stub in stub_per_front(server, 3):
        for _ in range(3):
            first = stream(stub, spec(max_tokens=LONG, request_id="again"))
            wait_started(first)
            with RawClient(server.inference_address) as client:
                client.call(
                    "/picovllm.inference.v1.InferenceService/Generate", request, ("grpc-previous-rpc-attempts", "1")
                )
                client.read(5)
                assert client.trailers["grpc-status"] == "0"
            failure = failure_of(first)
            assert (failure.reason, failure.message) == ("CLIENT_CANCELLED", "a retry of this request took over")


def test_the_bounds_of_the_queue_are_those_of_the_instance(start_fake: StartServer) -> None:
    """Of 60 that come at the same moment over 30 connections, three wait and the others are refused."""
    server = start_fake(*THREE, "--max-num-seqs", "1", "--max-queued-requests", "3", "--max-queued-tokens", "50")
    stubs = stub_per_front(server, 3)
    running = stream(stubs[1], spec(max_tokens=LONG))
    wait_started(running)
    for _ in range(3):
        more = [server.stub() for _ in range(30)]
        for stub in more:
            stub.GetModelInfo(pb.GetModelInfoRequest())
        with ThreadPoolExecutor(60) as pool:
            ends = Counter(pool.map(_end_of, more * 2))
        assert ends["QUEUE_TIMEOUT"] == 3, ends
        assert ends["3 requests wait already; try again later"] == 57, "none gets as far as the engine"
    waiting = stream(stubs[2], spec(token_ids=pb.TokenIds(ids=[5] * 40), max_tokens=2))
    wait_until(lambda: server.load().queued_prompt_tokens == 40)
    for stub in stubs:
        failure = failure_of(lambda s=stub: generate(s, spec(token_ids=pb.TokenIds(ids=[5] * 11))))
        assert (failure.reason, failure.retry_after) == ("QUEUE_FULL", 1.0)
        assert "40 prompt tokens wait already, 11 more would pass 50" in failure.message
    running.cancel()
    assert list(waiting)[-1].HasField("completed")
    assert generate(stubs[0], spec(token_ids=pb.TokenIds(ids=[50] * 50))).usage.completion_tokens == 8


def _end_of(stub: Any) -> str:
    failure = failure_of(lambda: generate(stub, spec(queue_timeout=Duration(seconds=2))))
    return failure.message if failure.reason == "QUEUE_FULL" else failure.reason


def test_administration_covers_all_fronts(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-step-time", "0.005")
    stubs = stub_per_front(server, 3)
    for stub in stubs:
        generate(stub, spec(max_tokens=5))
        failure_of(lambda s=stub: generate(s, spec(model="x")))
    streams = []
    for index, stub in enumerate(stubs):
        streams.append(stream(stub, spec(max_tokens=LONG, request_id=f"live-{index}")))
        wait_started(streams[-1])
    assert server.live_requests() == 3
    requests = server.admin.ListRequests(ADMIN.ListRequestsRequest()).requests
    assert [request.request_id for request in requests] == ["live-0", "live-1", "live-2"]
    assert all(request.state == ADMIN.REQUEST_STATE_DECODING and request.prompt_tokens == 3 for request in requests)
    text = server.admin.GetMetrics(ADMIN.GetMetricsRequest()).text
    assert 'calls_total{method="Generate",code="OK",reason=""} 3' in text
    assert 'calls_total{method="Generate",code="NOT_FOUND",reason="MODEL_NOT_FOUND"} 3' in text
    assert "picovllm_live_requests 3.0" in text
    assert re.search(r"picovllm_completion_tokens_total 15\b", text)
    assert "picovllm_request_seconds_count 3" in text
    ids = ADMIN.RequestIds(ids=["live-2", "no-such", "live-0"])
    response = server.admin.CancelRequests(ADMIN.CancelRequestsRequest(ids=ids))
    assert (sorted(response.cancelled_ids), response.unknown_ids) == (["live-0", "live-2"], ["no-such"])
    assert [failure_of(streams[i]).reason for i in (0, 2)] == ["ADMIN_CANCELLED"] * 2
    streams[0] = stream(stubs[0], spec(max_tokens=LONG, request_id="live-0"))
    wait_started(streams[0])
    response = server.admin.CancelRequests(ADMIN.CancelRequestsRequest(all=True))
    assert sorted(response.cancelled_ids) == ["live-0", "live-1"]
    assert [failure_of(streams[i]).reason for i in (0, 1)] == ["ADMIN_CANCELLED"] * 2
    assert server.wait_idle().kv_blocks_used == 0


def test_log_levels_reach_every_front(start_fake: StartServer) -> None:
    server = start_fake(*THREE)
    stubs = stub_per_front(server, 3)
    level = ADMIN.SetLogLevelRequest(level=ADMIN.LOG_LEVEL_DEBUG, ttl=Duration(nanos=500_000_000))
    server.admin.SetLogLevel(level)
    for index, stub in enumerate(stubs):
        generate(stub, spec(request_id=f"seen-{index}"))
        server.wait_log(rf"(front-{index} service.calls: Generate seen-{index} OK)", timeout=5)
    time.sleep(0.8)
    for index, stub in enumerate(stubs):
        generate(stub, spec(request_id=f"unseen-{index}"))
    generate(stubs[0], spec(request_id="last"))
    time.sleep(0.2)
    assert "Generate unseen" not in server.log
