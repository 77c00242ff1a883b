"""Start, drain, stop and every kind of death: exit codes, what clients are told, and that nothing stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.picovllm.admin.v1 import admin_pb2 as pb
from protos.picovllm.inference.v1 import inference_pb2
from tests.service.conftest import StartServer
from tests.service.fake_engine import HANG_TOKEN
from tests.service.rpc import Failure, failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ROOT, ServerProcess, alive

LONG = 8000
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Collector(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, events: Any) -> None:
        super().__init__()
        self._events = events
        self.received: list[Any] = []
        self.failure: Failure | None = None
        wait_started(events)
        self.start()

    def run(self) -> None:
        try:
            self.received.extend(self._events)
        except grpc.RpcError as error:
            self.failure = Failure(error)


def wait_state(server: ServerProcess, state: int) -> pb.Status:
    end = time.monotonic() + 10
    while (status := server.status()).state != state:
        assert time.monotonic() < end, status
        time.sleep(0.02)
    return status


def assert_gone(pids: list[int], timeout: float = 5) -> None:
    end = time.monotonic() + timeout
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, f"still alive: {left}"
        time.sleep(0.05)


def test_sigterm_drains_step_by_step(start_fake: StartServer) -> None:
    """Lame duck accepts and is not ready; draining refuses; streams finish; watches end; exit 0; nothing is left."""
    server = start_fake("--lame-duck", "1", "--drain-timeout", "20", "--fake-step-time", "0.005")
    pids = [process.pid for process in server.processes()]
    stub = server.stub()
    health = health_pb2_grpc.HealthStub(server.channel())
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
    assert next(watch).status == 1
    statuses: list[pb.Status] = []
    watcher = threading.Thread(
        target=lambda: statuses.extend(event.status for event in server.admin.WatchStatus(pb.WatchStatusRequest()))
    )
    watcher.start()
    running = Collector(stream(stub, spec(max_tokens=500)))
    server.terminate()
    assert next(watch).status == 2, "not ready"
    wait_state(server, pb.INSTANCE_STATE_LAME_DUCK)
    assert generate(stub, spec()).usage.completion_tokens == 8, "but accepting"
    assert server.health("liveness") == 1
    status = wait_state(server, pb.INSTANCE_STATE_DRAINING)
    assert status.drain.requests_left == 1
    assert status.drain.shutdown
    failure = failure_of(lambda: generate(stub, spec()))
    assert (failure.code, failure.reason) == (UNAVAILABLE, "DRAINING")
    assert server.health("liveness") == 1
    running.join(20)
    assert running.failure is None
    assert running.received[-1].HasField("completed")
    assert server.wait(5) == 0
    assert list(watch) == []
    watcher.join(5)
    assert statuses[-1].state == pb.INSTANCE_STATE_STOPPED
    assert [status.epoch for status in statuses] == sorted(status.epoch for status in statuses)
    assert_gone(pids)
    assert not server.ready_file.exists()


def test_the_rest_is_cut_when_the_drain_is_over(start_fake: StartServer) -> None:
    server = start_fake("--lame-duck", "0", "--drain-timeout", "0.5")
    running = [Collector(stream(server.stub(), spec(max_tokens=LONG))) for _ in range(3)]
    begin = time.monotonic()
    server.terminate()
    assert server.wait(10) == 0
    assert 0.5 <= time.monotonic() - begin < 3
    for collector in running:
        collector.join(5)
        assert collector.failure is not None
        assert (collector.failure.code, collector.failure.reason) == (UNAVAILABLE, "DRAIN_TIMEOUT")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_is_immediate(start_fake: StartServer, number: signal.Signals) -> None:
    server = start_fake("--lame-duck", "30", "--drain-timeout", "60")
    pids = [process.pid for process in server.processes()]
    running = Collector(stream(server.stub(), spec(max_tokens=LONG, max_duration=Duration(seconds=60))))
    first = time.monotonic()
    server.process.send_signal(number)
    wait_state(server, pb.INSTANCE_STATE_LAME_DUCK)
    time.sleep(max(first + 0.3 - time.monotonic(), 0))  # sooner it would count as the first one's echo
    begin = time.monotonic()
    server.process.send_signal(number)
    assert server.wait(10) == 0
    assert time.monotonic() - begin < 3
    running.join(5)
    assert running.failure is not None
    assert running.failure.reason == "DRAIN_TIMEOUT"
    assert_gone(pids)


@pytest.mark.slow
def test_a_signal_does_not_shorten_a_longer_shutdown_of_an_administrator(start_fake: StartServer) -> None:
    """By its own options the server would be killed 15.1 s after the signal; the request needs longer."""
    server = start_fake("--lame-duck", "0", "--drain-timeout", "0.1", "--fake-step-time", "0.005")
    running = Collector(stream(server.stub(), spec(max_tokens=3600)))
    server.admin.Shutdown(pb.ShutdownRequest(timeout=Duration(seconds=60)))
    wait_state(server, pb.INSTANCE_STATE_DRAINING)
    begin = time.monotonic()
    server.terminate()
    assert server.wait(40) == 0
    assert time.monotonic() - begin > 15.5, "too short to show anything"
    running.join(5)
    assert running.failure is None


def test_a_signal_to_the_whole_group_drains_as_well(start_fake: StartServer) -> None:
    """Some programs send it to the process and to its group: the supervisor gets it twice."""
    server = start_fake("--lame-duck", "0.3")
    running = Collector(stream(server.stub(), spec(max_tokens=300)))
    server.process.send_signal(signal.SIGTERM)
    for process in server.processes():
        process.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0
    running.join(5)
    assert running.failure is None


def test_a_signal_while_loading_ends_at_once(start_fake: StartServer) -> None:
    server = start_fake("--fake-load-time", "30", wait=False)
    server.wait_log(r"listening on (\S+)")
    pids = [process.pid for process in server.processes()]
    server.terminate()
    assert server.wait(8) == 0
    assert_gone(pids)


def test_drain_and_undrain(start_fake: StartServer) -> None:
    server = start_fake("--lame-duck", "0")
    stub, admin = server.stub(), server.admin
    assert _fails(lambda: admin.Undrain(pb.UndrainRequest())) == "NOT_DRAINING"
    running = Collector(stream(stub, spec(max_tokens=LONG)))
    long = Duration(seconds=60)
    admin.Drain(pb.DrainRequest(lame_duck=Duration(seconds=0), timeout=long, reason="maintenance"))
    status = server.status()
    assert (status.state, status.reason) == (pb.INSTANCE_STATE_DRAINING, "maintenance")
    assert (status.drain.requests_at_start, status.drain.requests_left, status.drain.shutdown) == (1, 1, False)
    assert _fails(lambda: admin.Drain(pb.DrainRequest())) == "ALREADY_DRAINING"
    assert _fails(lambda: generate(stub, spec())) == "DRAINING"
    assert admin.Undrain(pb.UndrainRequest()).status.state == pb.INSTANCE_STATE_SERVING
    assert generate(stub, spec()).usage.completion_tokens == 8
    admin.Drain(pb.DrainRequest(timeout=Duration()))
    running.join(5)
    assert running.failure is not None
    assert running.failure.reason == "DRAIN_TIMEOUT"
    assert server.status().drain.requests_cut == 1
    assert server.process.poll() is None, "drained, not ended"
    assert admin.Undrain(pb.UndrainRequest()).status.state == pb.INSTANCE_STATE_SERVING
    assert server.health() == 1
    bad = pb.DrainRequest(lame_duck=Duration(seconds=-1), timeout=Duration(nanos=-1), reason="x" * 257)
    assert failure_of(lambda: admin.Drain(bad)).violations.keys() == {"lame_duck", "timeout", "reason"}
    ages = Duration(seconds=315_576_000_000)  # a valid duration, whose end no timestamp can hold
    bad = pb.DrainRequest(lame_duck=ages, timeout=ages)
    assert failure_of(lambda: admin.Drain(bad)).violations.keys() == {"lame_duck", "timeout"}
    assert failure_of(lambda: admin.Shutdown(pb.ShutdownRequest(timeout=ages))).violations.keys() == {"timeout"}
    assert server.status().state == pb.INSTANCE_STATE_SERVING


def test_admin_shutdown_is_a_drain_and_an_exit(start_fake: StartServer) -> None:
    server = start_fake("--lame-duck", "0")
    running = Collector(stream(server.stub(), spec(max_tokens=200)))
    status = server.admin.Shutdown(pb.ShutdownRequest(scope=pb.SHUTDOWN_SCOPE_INSTANCE)).status
    assert status.state == pb.INSTANCE_STATE_DRAINING
    assert _fails(lambda: server.admin.Shutdown(pb.ShutdownRequest())) == "SHUTTING_DOWN"
    assert _fails(lambda: server.admin.Undrain(pb.UndrainRequest())) == "SHUTTING_DOWN"
    running.join(10)
    assert running.failure is None
    assert server.wait(5) == 0


def test_an_immediate_shutdown_cuts_a_running_one_short(start_fake: StartServer) -> None:
    server = start_fake("--lame-duck", "20")
    running = Collector(stream(server.stub(), spec(max_tokens=LONG)))
    unknown: Any = 7
    bad = pb.ShutdownRequest(immediate=True, timeout=Duration(seconds=1), scope=unknown)
    assert failure_of(lambda: server.admin.Shutdown(bad)).violations.keys() == {"timeout", "scope"}
    server.admin.Shutdown(pb.ShutdownRequest())
    server.admin.Shutdown(pb.ShutdownRequest(immediate=True))
    assert server.wait(5) == 0
    running.join(5)
    assert running.failure is not None
    assert running.failure.reason == "DRAIN_TIMEOUT"


def test_a_killed_engine_ends_streams_and_the_instance(start_fake: StartServer) -> None:
    server = start_fake()
    pids = [process.pid for process in server.processes()]
    running = [Collector(stream(server.stub(), spec(max_tokens=LONG))) for _ in range(3)]
    os.kill(server.pid_of("engine-0"), signal.SIGKILL)
    for collector in running:
        collector.join(5)
        assert collector.failure is not None
        assert (collector.failure.code, collector.failure.reason) == (UNAVAILABLE, "WORKER_LOST")
    assert server.wait(10) == 1
    assert_gone(pids)


def test_a_killed_front_ends_the_instance(start_fake: StartServer) -> None:
    server = start_fake()
    pids = [process.pid for process in server.processes()]
    os.kill(server.pid_of("front-0"), signal.SIGKILL)
    assert server.wait(10) == 1
    assert_gone(pids)


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_supervisor_leaves_nothing(start_fake: StartServer, busy: bool) -> None:
    server = start_fake()
    pids = [process.pid for process in server.processes()]
    assert len(pids) >= 3
    if busy:
        request = spec(token_ids=inference_pb2.TokenIds(ids=[50, HANG_TOKEN]), max_tokens=10)
        wait_started(stream(server.stub(), request))
    server.process.kill()
    assert_gone(pids)


def _fails(call: Any) -> str:
    return failure_of(call).reason


# ---- starts that must not succeed


def run(*options: str) -> tuple[int, str]:
    """Exit code and what was said, for a start that ends by itself."""
    command = [sys.executable, "-m", "tests.service.fake_server", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    return done.returncode, done.stderr.strip()


def serve(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "service", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--lame", "1"], "unrecognized arguments: --lame"),
        (["--listen", "0.0.0.0:0"], "--insecure"),
        (["--admin-listen", "0.0.0.0:0"], "--insecure"),
        (["--listen", "nonsense"], "--listen must be HOST:PORT or unix:PATH"),
        (["--block-size", "7"], "--block-size"),
        (["--served-model-name", ""], "--served-model-name must be a printable name"),
        (["--served-model-name", "a\nb"], "--served-model-name must be a printable name"),
        (["--lame-duck", "-1"], "--lame-duck must be 0 or more"),
        (["--drain-timeout", "1e300"], "--drain-timeout must be 0 or more seconds, at most 86400"),
        (["--ready-file", "/no/such/place/ready.json"], "--ready-file /no/such/place/ready.json"),
        (["--ready-file", str(ROOT)], "is a directory"),
        (["--max-num-seqs", "0"], "max_num_seqs must be positive"),
        (["--max-inter-token-ms", "0"], "max_inter_token_ms must be positive milliseconds"),
        (["--gpu-memory-utilization", "2"], "gpu_memory_utilization must be in (0, 1]"),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization is for cuda"),
        (["--num-gpu-blocks", "9", "--cpu-kv-bytes", "9999999"], "num_gpu_blocks fixes the KV pool"),
    ],
)
def test_unusable_options_stop_the_start(tiny_dir: Path, options: list[str], said: str) -> None:
    code, errors = serve("--model", str(tiny_dir), *options)
    assert code == 2
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("model", "said"),
    [("./no/such/dir", "there is no such directory"), ("no such thing", "there is no such directory")],
)
def test_an_unknown_model_stops_the_start(model: str, said: str) -> None:
    code, errors = serve("--model", model)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert said in errors


def test_a_directory_that_is_no_model_stops_the_start(tmp_path: Path) -> None:
    code, errors = serve("--model", str(tmp_path), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    assert code == 2
    (told,) = [line for line in errors.splitlines() if line.startswith("picovllm-serve:")]
    assert "missing" in told or "config.json" in told
    assert "Traceback" not in errors


def test_a_truncated_weight_file_stops_the_start(tmp_path: Path, tiny_dir: Path) -> None:
    for file in tiny_dir.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tiny_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    code, errors = serve("--model", str(tmp_path), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    assert code == 2
    (told,) = [line for line in errors.splitlines() if line.startswith("picovllm-serve:")]
    assert "model.safetensors" in told
    assert "Traceback" not in errors


def test_a_refusal_has_a_line_of_its_own_beside_the_progress_bar(tmp_path: Path, tiny_dir: Path) -> None:
    for file in tiny_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    code, errors = serve("--model", str(tmp_path), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    assert code == 2
    (told,) = [line for line in errors.splitlines() if line.startswith("picovllm-serve:")]
    assert "tensor model.layers.2." in told


def test_a_model_that_the_engine_refuses_stops_the_start(tiny_dir: Path) -> None:
    options = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--log-level", "error")
    code, errors = run("--model", str(tiny_dir), "--max-model-len", "666", *options)
    assert (code, errors) == (2, "picovllm-serve: the fake model refuses this length")


@pytest.mark.parametrize("option", ["--listen", "--admin-listen"])
def test_a_port_in_use_stops_the_start(tiny_dir: Path, option: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        free = "--admin-listen" if option == "--listen" else "--listen"
        begin = time.monotonic()
        code, errors = run("--model", str(tiny_dir), option, address, free, "127.0.0.1:0", "--log-level", "error")
        assert code == 2
        assert f"picovllm-serve: {option} {address}: cannot listen there; is the address in use?" in errors
        assert "Traceback" not in errors
        assert time.monotonic() - begin < 8


def test_a_unix_socket_in_use_stops_the_start(start_fake: StartServer, tiny_dir: Path, tmp_path: Path) -> None:
    """gRPC alone would take it away from the server that listens there. What a dead one left is replaced."""
    address = f"unix:{tmp_path}/x.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.removeprefix("unix:"))
    server = start_fake("--listen", address)
    code, errors = run("--model", str(tiny_dir), "--listen", address, "--admin-listen", "127.0.0.1:0")
    assert code == 2
    assert f"--listen {address}: cannot listen there" in errors
    assert generate(server.stub(address), spec()).usage.completion_tokens == 8
    both = f"unix:{tmp_path}/both.sock"
    code, errors = run("--model", str(tiny_dir), "--listen", both, "--admin-listen", both)
    assert code == 2
    assert f"--admin-listen {both}: cannot listen there" in errors


def test_unix_sockets(start_fake: StartServer, tmp_path: Path) -> None:
    paths = [f"unix:{tmp_path}/{name}.sock" for name in ("inference", "admin")]
    server = start_fake("--listen", paths[0], "--admin-listen", paths[1])
    assert json.loads(server.ready_file.read_text())["inference"] == paths[0]
    assert generate(server.stub(), spec()).usage.completion_tokens == 8
    assert server.status().state == pb.INSTANCE_STATE_SERVING
