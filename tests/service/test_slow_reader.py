"""Readers that stop reading, and a front that stops: what is buffered is bounded and the engine never waits."""

import os
import signal
import time

import psutil
import pytest

from protos.picovllm.admin.v1 import admin_pb2
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.errors import Reason, ServiceError
from service.output_budget import OutputBudget
from tests.service.conftest import StartServer
from tests.service.raw_client import RawClient
from tests.service.rpc import generate, spec, stream, wait_started
from tests.service.server_process import ServerProcess

STREAM = "/picovllm.inference.v1.InferenceService/Stream"
HEAVY = pb.OutputOptions(top_logprobs=20, token_ids=True)


def test_a_stalled_reader_is_ended_and_its_memory_freed_first(start_fake: StartServer) -> None:
    server = start_fake("--slow-consumer-timeout", "1")
    with RawClient(server.inference_address, window=4000) as client:
        begin = time.monotonic()
        client.call(STREAM, pb.StreamRequest(spec=spec(max_tokens=8000, output=HEAVY)))
        client.read(0.3, acknowledge=False)
        assert server.load().decoding_requests == 1
        assert server.wait_idle(5).kv_blocks_used == 0
        assert 1.0 <= time.monotonic() - begin < 2.5
        assert generate(server.stub(), spec()).usage.completion_tokens == 8, "others are served"
        client.open_window()
        client.read(5)
        assert client.ended
        assert client.trailers["grpc-status"] == "8"
        assert b"SLOW_CONSUMER" in client.details().SerializeToString()


def test_a_reader_that_is_slow_but_reads_gets_everything(start_fake: StartServer) -> None:
    """What accumulates meanwhile goes out as few larger messages."""
    server = start_fake("--slow-consumer-timeout", "2")
    request = spec(max_tokens=2000, output=pb.OutputOptions(token_ids=True))
    with RawClient(server.inference_address, window=2000) as client:
        client.call(STREAM, pb.StreamRequest(spec=request))
        client.read(1.5, acknowledge=False)
        client.open_window()
        client.read(10)
        assert client.ended
        assert client.trailers["grpc-status"] == "0"
    position, deltas, tokens = 0, 0, 0
    while position < len(client.data):
        size = int.from_bytes(client.data[position + 1 : position + 5], "big")
        event = pb.StreamResponse.FromString(client.data[position + 5 : position + 5 + size])
        position += 5 + size
        deltas += event.HasField("delta")
        tokens += len(event.delta.token_ids)
    assert tokens == 2000
    assert deltas < 1500


def test_a_stopped_front_holds_up_nobody(start_fake: StartServer) -> None:
    """The engine steps on at its pace while the front is stopped for 3 s, and nothing is lost or doubled."""
    server = start_fake("--fake-step-time", "0.002")
    front, engine = server.pid_of("front-0"), psutil.Process(server.pid_of("engine-0"))
    request = spec("one two three four", max_tokens=4000, output=pb.OutputOptions(token_ids=True))
    streams = [stream(server.stub(), request) for _ in range(8)]
    for events in streams:
        wait_started(events)
    steps = server.status().last_step_time
    assert steps.seconds > 0
    before, memory, begin = _steps(server), engine.memory_info().rss, time.monotonic()
    os.kill(front, signal.SIGSTOP)
    time.sleep(3)
    os.kill(front, signal.SIGCONT)
    stopped_rate = (_steps(server) - before) / (time.monotonic() - begin)
    grown = engine.memory_info().rss - memory
    for events in streams:
        tokens = [token for event in events for token in event.delta.token_ids]
        assert len(tokens) == 4000
        assert tokens[:8] == tokens[4:12]
    begin, before = time.monotonic(), _steps(server)
    events = stream(server.stub(), spec(max_tokens=8000))
    wait_started(events)
    time.sleep(1)
    free_rate = (_steps(server) - before) / (time.monotonic() - begin)
    assert stopped_rate > 0.7 * free_rate, (stopped_rate, free_rate)
    assert grown < 32 << 20


def _steps(server: ServerProcess) -> int:
    """The engine's step count, from the metrics."""
    text = server.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    return int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("picovllm_steps_total "))))


class _Holder:
    def __init__(self) -> None:
        self.buffered_bytes = 0
        self.reasons: list[Reason] = []

    def fail(self, error: ServiceError) -> None:
        self.reasons.append(error.reason)


def test_the_budget_fails_the_request_that_passes_a_bound() -> None:
    budget = OutputBudget(request_bytes=100, front_bytes=150)
    first, second = _Holder(), _Holder()

    def grow(holder: _Holder, amount: int) -> None:
        holder.buffered_bytes += amount
        budget.change(holder, amount)

    grow(first, 90)
    grow(second, 60)
    assert first.reasons == second.reasons == []
    grow(second, 1)
    assert second.reasons == [Reason.SLOW_CONSUMER]
    budget.change(second, -61)
    grow(first, 11)
    assert first.reasons == [Reason.SLOW_CONSUMER]
    budget.change(first, -101)
    assert budget.used_bytes == 0


@pytest.mark.slow
def test_the_bound_of_a_request_is_kept_in_the_real_server(start_fake: StartServer) -> None:
    """A client that never reads 16 MiB of logprobs is ended by the bound, long before the write's time is over."""
    server = start_fake("--fake-step-time", "0.0001", "--slow-consumer-timeout", "60", "--num-gpu-blocks", "9999")
    with RawClient(server.inference_address, window=1000) as client:
        request = spec(max_tokens=8000, sampling=pb.Sampling(n=16), output=HEAVY)
        client.call(STREAM, pb.StreamRequest(spec=request))
        client.read(0.2, acknowledge=False)
        assert server.wait_idle(50).kv_blocks_used == 0
        client.open_window()
        client.read(10)
        assert client.trailers["grpc-status"] == "8"
        assert "16777216 bytes" in client.trailers["grpc-message"]
