"""AdminService: what it shows of a running instance, and log levels. Draining is in test_lifecycle."""

import re
import time

import pytest
from google.protobuf.duration_pb2 import Duration

from protos.picovllm.admin.v1 import admin_pb2 as pb
from protos.picovllm.inference.v1 import inference_pb2
from tests.service.conftest import StartServer
from tests.service.rpc import failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ServerProcess


def test_status(fake_server: ServerProcess) -> None:
    generate(fake_server.stub(), spec())
    status = fake_server.status()
    assert status.state == pb.INSTANCE_STATE_SERVING
    assert status.role == pb.ROLE_PREFILL_DECODE
    assert {worker.name: worker.kind for worker in status.workers} == {"front-0": 1, "engine-0": 2}
    assert all(worker.alive and worker.pid > 1 for worker in status.workers)
    assert 0 < status.start_time.ToSeconds() <= time.time()
    assert abs(status.last_step_time.ToNanoseconds() / 1e9 - time.time()) < 5
    assert status.model == "tiny"
    assert status.effective_config["max_num_seqs"] == 64
    assert status.effective_config["listen"] == "127.0.0.1:0"
    assert not status.HasField("drain")


def test_load_and_requests(start_fake: StartServer) -> None:
    server = start_fake("--max-num-seqs", "2")
    stub = server.stub()
    first = stream(stub, spec(max_tokens=8000, request_id="first", priority=4))
    wait_started(first)
    second = stream(stub, spec(max_tokens=8000, request_id="second"))
    wait_started(second)
    third = stream(stub, spec(max_tokens=2, request_id="third"))
    while server.load().queued_requests == 0:
        time.sleep(0.01)
    time.sleep(1.2)
    load = server.load()
    assert (load.queued_requests, load.queued_prompt_tokens, load.decoding_requests) == (1, 3, 2)
    assert load.kv_blocks_total == 4096
    assert 0 < load.kv_blocks_used < 2000
    assert load.oldest_queued_duration.ToMilliseconds() > 1000
    assert load.generated_tokens_per_second > 50
    assert load.rate_duration.ToMilliseconds() > 100
    requests = server.admin.ListRequests(pb.ListRequestsRequest()).requests
    assert [request.request_id for request in requests] == ["first", "second", "third"]
    assert [request.state for request in requests] == [3, 3, 1]
    assert (requests[0].priority, requests[0].prompt_tokens) == (4, 3)
    assert requests[0].completion_tokens > 50
    response = server.admin.CancelRequests(pb.CancelRequestsRequest(all=True))
    assert sorted(response.cancelled_ids) == ["first", "second", "third"]
    for events in (first, second, third):
        assert failure_of(events).reason == "ADMIN_CANCELLED"
    assert server.wait_idle().kv_blocks_used == 0
    for request, field in (
        (pb.CancelRequestsRequest(), "target"), (pb.CancelRequestsRequest(all=False), "all"),
        (pb.CancelRequestsRequest(ids=pb.RequestIds()), "ids.ids"),
    ):
        failure = failure_of(lambda r=request: server.admin.CancelRequests(r))
        assert failure.violations.keys() == {field}


def test_metrics_are_prometheus_text(fake_server: ServerProcess) -> None:
    stub = fake_server.stub()
    generate(stub, spec())
    failure_of(lambda: generate(stub, spec(model="x")))
    text = fake_server.admin.GetMetrics(pb.GetMetricsRequest()).text
    line = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+0-9.e]+)')
    assert all(line.fullmatch(each) for each in text.splitlines())
    assert re.search(r'calls_total\{method="Generate",code="OK",reason=""\} [1-9]', text)
    assert re.search(r'calls_total\{method="Generate",code="NOT_FOUND",reason="MODEL_NOT_FOUND"\} [1-9]', text)
    assert "picovllm_ready 1.0" in text
    assert re.search(r"picovllm_time_to_first_token_seconds_count [1-9]", text)
    assert re.search(r'picovllm_request_seconds_bucket\{le="\+Inf"\} [1-9]', text)
    names = re.findall(r"# TYPE (\w+)", text)
    assert len(names) == len(set(names))


def test_log_levels_come_and_go_in_every_process(start_fake: StartServer) -> None:
    server = start_fake()
    set_level = server.admin.SetLogLevel
    assert set_level(pb.SetLogLevelRequest(level=pb.LOG_LEVEL_DEBUG)).previous_level == pb.LOG_LEVEL_INFO
    generate(server.stub(), spec(request_id="seen"))
    server.wait_log(r"(service.calls: Generate seen OK)", timeout=5)
    request = pb.SetLogLevelRequest(level=pb.LOG_LEVEL_ERROR, ttl=Duration(nanos=300_000_000))
    assert set_level(request).previous_level == pb.LOG_LEVEL_DEBUG
    generate(server.stub(), spec(request_id="unseen"))
    time.sleep(0.5)
    generate(server.stub(), spec(request_id="again"))
    server.wait_log(r"(service.calls: Generate again OK)", timeout=5)
    assert "unseen" not in server.log
    name = pb.SetLogLevelRequest(logger="service.calls", level=pb.LOG_LEVEL_WARNING)
    assert set_level(name).previous_level == pb.LOG_LEVEL_DEBUG
    assert set_level(name).previous_level == pb.LOG_LEVEL_WARNING
    bad = pb.SetLogLevelRequest(ttl=Duration(seconds=-1))
    assert failure_of(lambda: set_level(bad)).violations.keys() == {"level", "ttl"}


def test_logs_carry_the_request_id_and_never_the_prompt(start_fake: StartServer) -> None:
    server = start_fake("--log-level", "debug")
    secret = "swordfish"
    stub = server.stub()
    salted = inference_pb2.CacheOptions(cache_salt=secret)
    generate(stub, spec(f"the password is {secret}", request_id="logged-1", cache=salted))
    failure_of(lambda: generate(stub, spec(f"{secret} " * 5000, request_id="logged-2")))
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=secret)])
    generate(stub, spec(chat=chat, request_id="logged-3"))
    server.wait_log(r"(logged-3)")
    for request_id in ("logged-1", "logged-2", "logged-3"):
        assert request_id in server.log
    assert secret not in server.log


@pytest.mark.parametrize("listener", ["inference", "admin"])
def test_services_stay_on_their_listener(fake_server: ServerProcess, listener: str) -> None:
    import grpc

    from protos.picovllm.admin.v1 import admin_pb2_grpc

    call = fake_server.stub(fake_server.admin_address).GetModelInfo if listener == "admin" else (
        admin_pb2_grpc.AdminServiceStub(fake_server.channel()).GetStatus
    )
    request = inference_pb2.GetModelInfoRequest() if listener == "admin" else pb.GetStatusRequest()
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
