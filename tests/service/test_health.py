"""Health, reflection and transport: what probes, load balancers and foreign tools need."""

import json
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as pb_reflection

from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.health import INFERENCE_SERVICE
from tests.service.rpc import generate, spec, stream
from tests.service.server_process import ServerProcess

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
GRPCURL = shutil.which("grpcurl", path=str(Path(__file__).parents[2] / ".venv" / "bin")) or shutil.which("grpcurl")


def check_while(server: ServerProcess, work: Any, address: str | None = None) -> list[float]:
    """How long each health check took while ``work`` ran in another thread."""
    stub = health_pb2_grpc.HealthStub(server.channel(address))
    stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    thread = threading.Thread(target=work)
    thread.start()
    times = []
    while thread.is_alive():
        begin = time.perf_counter()
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == SERVING
        times.append(time.perf_counter() - begin)
        time.sleep(0.01)
    thread.join()
    return times


def test_check_and_watch(fake_server: ServerProcess) -> None:
    for service in ("", INFERENCE_SERVICE, "liveness"):
        assert fake_server.health(service) == SERVING
        assert fake_server.health(service, fake_server.admin_address) == SERVING
    stub = health_pb2_grpc.HealthStub(fake_server.channel())
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for service, status in (("", SERVING), ("nobody", UNKNOWN)):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert next(watch).status == status
        watch.cancel()


def test_health_answers_while_32_streams_run(fake_server: ServerProcess) -> None:
    def work() -> None:
        stub = fake_server.stub()
        streams = [stream(stub, spec(max_tokens=400, output=pb.OutputOptions(top_logprobs=5))) for _ in range(32)]
        for events in streams:
            assert list(events)[-1].HasField("completed")

    times = check_while(fake_server, work)
    assert len(times) > 10
    assert max(times) < 0.1, sorted(times)[-5:]


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
def test_health_answers_while_a_long_text_is_tokenised(fake_server: ServerProcess, method: str) -> None:
    sentence = "The quick brown fox jumps over the lazy dog. 你好世界 ".encode()
    text = (sentence * 80_000)[:3_900_000].decode(errors="ignore")

    def work() -> None:
        stub = fake_server.stub()
        if method == "Tokenize":
            assert len(stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids) > 500_000
            return
        with pytest.raises(grpc.RpcError, match="8192"):
            generate(stub, spec(text))

    times = check_while(fake_server, work)
    assert len(times) > 10
    assert max(times) < 0.1, sorted(times)[-5:]


def test_a_million_token_ids_fit_and_more_do_not(fake_server: ServerProcess) -> None:
    stub = fake_server.stub()
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=[100] * 1_000_000)).text
    with pytest.raises(grpc.RpcError) as caught:
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[20_000] * 1_500_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_reflection_v1_and_v1alpha(fake_server: ServerProcess) -> None:
    channel = fake_server.channel()
    for package in ("grpc.reflection.v1", "grpc.reflection.v1alpha"):
        ask = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb_reflection.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb_reflection.ServerReflectionResponse.FromString,
        )
        requests = [
            pb_reflection.ServerReflectionRequest(list_services=""),
            pb_reflection.ServerReflectionRequest(file_containing_symbol=INFERENCE_SERVICE),
            pb_reflection.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection"),
        ]
        listed, *files = list(ask(iter(requests), timeout=5))
        names = {service.name for service in listed.list_services_response.service}
        assert {INFERENCE_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names
        assert all(answer.file_descriptor_response.file_descriptor_proto for answer in files)


@pytest.mark.skipif(GRPCURL is None, reason="grpcurl is not installed")
def test_grpcurl(fake_server: ServerProcess) -> None:
    def grpcurl(*arguments: str) -> str:
        command = [str(GRPCURL), "-plaintext", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    address = fake_server.inference_address
    assert INFERENCE_SERVICE in grpcurl(address, "list")
    assert "picovllm.admin.v1.AdminService" in grpcurl(fake_server.admin_address, "list")
    body = json.dumps({"spec": {"text": "one two three", "stopping": {"maxTokens": 3}}})
    result = json.loads(grpcurl("-d", body, address, f"{INFERENCE_SERVICE}/Generate"))
    assert result["outputs"][0]["text"] == "one two three"
    events = grpcurl("-d", body, address, f"{INFERENCE_SERVICE}/Stream")
    assert events.count('"delta"') == 3
    assert '"completed"' in events
    assert "SERVING" in grpcurl(address, "grpc.health.v1.Health/Check")


def test_the_port_is_really_taken(fake_server: ServerProcess) -> None:
    host, _, port = fake_server.inference_address.rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
