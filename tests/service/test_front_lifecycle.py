"""Several front processes: drains, every kind of death, the port, and that nothing stays behind."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.picovllm.admin.v1 import admin_pb2 as pb
from tests.service.conftest import StartServer
from tests.service.many_fronts import stub_per_front
from tests.service.rpc import failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ServerProcess, open_files
from tests.service.test_lifecycle import LONG, UNAVAILABLE, Collector, assert_gone, run, wait_state

THREE = ("--front-processes", "3")


def watches_of(server: ServerProcess, count: int) -> list[Any]:
    """Health watches on ``count`` connections."""
    stubs = [health_pb2_grpc.HealthStub(server.channel()) for _ in range(count)]
    return [stub.Watch(health_pb2.HealthCheckRequest(service="")) for stub in stubs]


def leftovers() -> set[str]:
    """Names of shared memory and semaphores."""
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("how", ["signal", "administrator"])
def test_a_drain_lets_streams_finish_on_all_fronts(start_fake: StartServer, how: str) -> None:
    before = leftovers()
    server = start_fake(*THREE, "--lame-duck", "1", "--fake-step-time", "0.005")
    pids = [process.pid for process in server.processes()]
    assert len([pid for pid in pids if pid in server.front_pids()]) == 3
    stubs = stub_per_front(server, 3)
    watches = watches_of(server, 20)
    assert [next(watch).status for watch in watches] == [1] * 20
    running = [Collector(stream(stub, spec(max_tokens=500 + 100 * i))) for i, stub in enumerate(stubs)]
    if how == "signal":
        server.terminate()
    else:
        server.admin.Shutdown(pb.ShutdownRequest())
    assert [next(watch).status for watch in watches] == [2] * 20, "not ready on any front"
    wait_state(server, pb.INSTANCE_STATE_LAME_DUCK)
    assert [generate(stub, spec()).usage.completion_tokens for stub in stubs] == [8] * 3, "but accepting"
    status = wait_state(server, pb.INSTANCE_STATE_DRAINING)
    assert (status.drain.requests_at_start, status.drain.requests_left) == (3, 3)
    for stub in stubs:
        failure = failure_of(lambda s=stub: generate(s, spec()))
        assert (failure.code, failure.reason) == (UNAVAILABLE, "DRAINING")
    for collector in running:
        collector.join(20)
        assert collector.failure is None
        assert collector.received[-1].HasField("completed")
    assert server.wait(5) == 0
    for watch in watches:
        assert list(watch) == []
    assert_gone(pids)
    assert leftovers() == before
    assert "without it" not in server.log


def test_refusal_is_on_every_front_the_moment_the_drain_is_answered(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--lame-duck", "0")
    stubs = stub_per_front(server, 3)
    for _ in range(30):
        server.admin.Drain(pb.DrainRequest())
        assert [failure_of(lambda s=stub: generate(s, spec())).reason for stub in stubs] == ["DRAINING"] * 3
        server.admin.Undrain(pb.UndrainRequest())
        assert [generate(stub, spec()).usage.completion_tokens for stub in stubs] == [8] * 3
    watches = watches_of(server, 12)
    assert [next(watch).status for watch in watches] == [1] * 12
    server.admin.Drain(pb.DrainRequest())
    assert [next(watch).status for watch in watches] == [2] * 12
    server.admin.Undrain(pb.UndrainRequest())
    assert [next(watch).status for watch in watches] == [1] * 12


def test_the_last_stream_of_whatever_front_ends_the_drain(start_fake: StartServer) -> None:
    """The progress is told of all fronts, and the end comes at once after the last one."""
    server = start_fake(*THREE, "--lame-duck", "0", "--drain-timeout", "60")
    stubs = stub_per_front(server, 3)
    running = [Collector(stream(stub, spec(max_tokens=300 * (i + 1)))) for i, stub in enumerate(stubs)]
    left = [
        event.status.drain.requests_left
        for event in _watch_until_stopped(server)
    ]
    ended = time.monotonic()
    for collector in running:
        collector.join(10)
        assert collector.failure is None
    assert left[0] == 3
    assert left == sorted(left, reverse=True)
    assert set(left) == {3, 2, 1, 0}
    assert server.wait(5) == 0
    assert time.monotonic() - ended < 3


def _watch_until_stopped(server: ServerProcess) -> list[pb.WatchStatusResponse]:
    server.admin.Shutdown(pb.ShutdownRequest())
    return list(server.admin.WatchStatus(pb.WatchStatusRequest(), timeout=60))


@pytest.mark.parametrize("second", [False, True])
def test_the_rest_is_cut_on_all_fronts(start_fake: StartServer, second: bool) -> None:
    """When the drain is over, or when a second signal comes."""
    server = start_fake(*THREE, "--lame-duck", "0", "--drain-timeout", "60" if second else "0.5")
    running = [Collector(stream(stub, spec(max_tokens=LONG))) for stub in stub_per_front(server, 3)]
    server.terminate()
    status = wait_state(server, pb.INSTANCE_STATE_DRAINING)
    assert status.drain.requests_left == 3
    if second:
        time.sleep(0.3)  # sooner it would count as the first one's echo
        server.terminate()
    assert server.wait(10) == 0
    for collector in running:
        collector.join(5)
        assert collector.failure is not None
        assert (collector.failure.code, collector.failure.reason) == (UNAVAILABLE, "DRAIN_TIMEOUT")


def test_a_killed_further_front_ends_its_own_streams_only(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-step-time", "0.005", "--lame-duck", "0")
    stubs = stub_per_front(server, 3)
    engine, control = server.pid_of("engine-0"), server.pid_of("front-0")
    files = open_files(engine), open_files(control)
    streams = [[stream(stub, spec(max_tokens=1500)) for _ in range(4)] for stub in stubs]
    for each in streams:
        for events in each:
            wait_started(events)
    assert server.live_requests() == 12
    os.kill(server.pid_of("front-1"), signal.SIGKILL)
    begin = time.monotonic()
    for events in streams[1]:
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        assert caught.value.code() is UNAVAILABLE
    while (live := server.live_requests()) != 8:
        assert time.monotonic() - begin < 2, live
    status = server.status()
    assert (status.state, status.reason) == (pb.INSTANCE_STATE_DEGRADED, "without front-1, which ended")
    assert [worker.alive for worker in status.workers] == [True, False, True, True]
    assert server.health() == 1, "the others serve"
    assert len(server.admin.ListRequests(pb.ListRequestsRequest()).requests) == 8
    for each in (streams[0], streams[2]):
        for events in each:
            assert list(events)[-1].HasField("completed")
    assert server.wait_idle().kv_blocks_used == 0
    assert [generate(server.stub(), spec()).usage.completion_tokens for _ in range(20)] == [8] * 20
    assert generate(stubs[1], spec()).usage.completion_tokens == 8, "its clients connect to another one"
    assert open_files(engine) < files[0]
    assert open_files(control) <= files[1] + 25
    assert "picovllm-front-1 ended with code -9; the instance goes on without it" in server.log
    server.admin.Drain(pb.DrainRequest())
    server.admin.Undrain(pb.UndrainRequest())
    assert server.status().state == pb.INSTANCE_STATE_DEGRADED
    assert server.health() == 1
    server.terminate()
    assert server.wait(10) == 0


def test_a_front_killed_in_a_drain_does_not_hold_it_up(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--lame-duck", "0", "--drain-timeout", "60")
    stubs = stub_per_front(server, 3)
    lost = stream(stubs[2], spec(max_tokens=LONG))
    wait_started(lost)
    server.terminate()
    assert wait_state(server, pb.INSTANCE_STATE_DRAINING).drain.requests_left == 1
    os.kill(server.pid_of("front-2"), signal.SIGKILL)
    assert server.wait(5) == 0


def test_a_stopped_front_holds_up_nobody_else(start_fake: StartServer) -> None:
    """Its own clients wait. Others, the administration but for the list, and the end of the instance do not."""
    server = start_fake(*THREE, "--lame-duck", "0", "--drain-timeout", "1", "--fake-step-time", "0.002")
    stubs = stub_per_front(server, 3)
    stuck = stream(stubs[1], spec(max_tokens=2000))
    wait_started(stuck)
    pid = server.pid_of("front-1")
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    other = list(stream(stubs[2], spec(max_tokens=300)))
    assert other[-1].HasField("completed")
    assert time.monotonic() - begin < 3
    assert server.live_requests() <= 1
    assert "picovllm_live_requests" in server.admin.GetMetrics(pb.GetMetricsRequest(), timeout=5).text
    failure = failure_of(lambda: server.admin.ListRequests(pb.ListRequestsRequest(), timeout=5))
    assert (failure.reason, failure.message) == ("WORKER_LOST", "front-1 does not answer")
    os.kill(pid, signal.SIGCONT)
    assert list(stuck)[-1].HasField("completed")
    os.kill(pid, signal.SIGSTOP)
    server.terminate()
    assert server.wait(20) == 0
    assert_gone([pid])


def test_the_control_front_takes_the_instance_with_it(start_fake: StartServer) -> None:
    server = start_fake(*THREE)
    pids = [process.pid for process in server.processes()]
    stubs = stub_per_front(server, 3)
    running = [Collector(stream(stub, spec(max_tokens=LONG))) for stub in stubs[1:]]
    os.kill(server.pid_of("front-0"), signal.SIGKILL)
    assert server.wait(10) == 1
    for collector in running:
        collector.join(5)
        assert collector.failure is not None
        assert (collector.failure.code, collector.failure.reason) == (UNAVAILABLE, "WORKER_LOST")
    assert_gone(pids)


def test_the_engine_takes_all_with_it(start_fake: StartServer) -> None:
    server = start_fake(*THREE)
    pids = [process.pid for process in server.processes()]
    running = [Collector(stream(stub, spec(max_tokens=LONG))) for stub in stub_per_front(server, 3)]
    os.kill(server.pid_of("engine-0"), signal.SIGKILL)
    for collector in running:
        collector.join(5)
        assert collector.failure is not None
        assert (collector.failure.code, collector.failure.reason) == (UNAVAILABLE, "WORKER_LOST")
    assert server.wait(10) == 1
    assert_gone(pids)


def test_a_killed_supervisor_leaves_nothing(start_fake: StartServer) -> None:
    before = leftovers()
    server = start_fake(*THREE)
    pids = [process.pid for process in server.processes()]
    streams = [stream(stub, spec(max_tokens=LONG)) for stub in stub_per_front(server, 3)]
    for events in streams:
        wait_started(events)
    server.process.kill()
    assert_gone(pids)
    assert leftovers() == before


def test_many_calls_leave_no_descriptor(start_fake: StartServer) -> None:
    server = start_fake(*THREE)
    pids = [*server.front_pids(), server.pid_of("engine-0"), server.process.pid]

    def some() -> None:
        for stub in stub_per_front(server, 3):
            for _ in range(10):
                generate(stub, spec())
                events = stream(stub, spec(max_tokens=LONG))
                wait_started(events)
                events.cancel()
        for channel in server._channels:
            if channel is not admin_channel:
                channel.close()

    admin_channel = server._channels[0]
    some()
    time.sleep(0.5)
    before = [open_files(pid) for pid in pids]
    for _ in range(3):
        some()
    time.sleep(0.5)
    assert all(open_files(pid) <= count + 2 for pid, count in zip(pids, before, strict=True))
    assert server.wait_idle().kv_blocks_used == 0


# ---- starts


def test_a_signal_while_loading_ends_all_at_once(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-load-time", "30", wait=False)
    address = server.wait_log(r"listening on (\S+) and")
    server.wait_log(r"(front-2 \S+ listening)")
    pids = [process.pid for process in server.processes()]
    failure = failure_of(lambda: generate(server.stub(address), spec()))
    assert failure.reason == "STARTING"
    server.terminate()
    assert server.wait(8) == 0
    assert_gone(pids)


def test_a_front_that_ends_while_starting_stops_the_start(start_fake: StartServer) -> None:
    server = start_fake(*THREE, "--fake-load-time", "30", wait=False)
    server.wait_log(r"(front-2 \S+ listening)")
    pids = [process.pid for process in server.processes()]
    (front,) = [p.pid for p in server.processes() if server.process.pid != p.pid and _is_front(p.pid, server, 2)]
    os.kill(front, signal.SIGKILL)
    assert server.wait(10) == 1
    assert_gone(pids)


def _is_front(pid: int, server: ServerProcess, index: int) -> bool:
    """Children are spawned in the order engine, front-1, front-2, front-0, beside the tracker of resources."""
    spawned = [p for p in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    order = sorted(spawned, key=lambda process: process.create_time())
    return order[index].pid == pid


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--front-processes", "2", "--listen", "unix:/tmp/x.sock"], "--front-processes 2: only one process can"),
        (["--front-processes", "0"], "--front-processes must be 1 to 64, got 0"),
        (["--front-processes", "65"], "--front-processes must be 1 to 64, got 65"),
    ],
)
def test_unusable_numbers_of_fronts_stop_the_start(tiny_dir: Path, options: list[str], said: str) -> None:
    from tests.service.test_lifecycle import serve

    code, errors = serve("--model", str(tiny_dir), *options)
    assert code == 2
    assert said in errors
    assert "Traceback" not in errors


def test_a_model_that_the_engine_refuses_stops_the_start(tiny_dir: Path) -> None:
    options = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--log-level", "error", *THREE)
    code, errors = run("--model", str(tiny_dir), "--max-model-len", "666", *options)
    assert (code, errors) == (2, "picovllm-serve: the fake model refuses this length")


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_stranger_on_the_port_stops_the_start(tiny_dir: Path, shares: bool, host: str) -> None:
    """Also one that would share it: half of our clients would end there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        other.bind((host, 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        options = ("--listen", address, "--admin-listen", "127.0.0.1:0", "--log-level", "error", *THREE)
        code, errors = run("--model", str(tiny_dir), *options)
        assert code == 2
        assert f"picovllm-serve: --listen {address}: cannot listen there; is the address in use?" in errors
        assert "Traceback" not in errors


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_second_instance_on_the_port_is_refused(start_fake: StartServer, tiny_dir: Path, count: str) -> None:
    server = start_fake(*THREE)
    options = ("--listen", server.inference_address, "--admin-listen", "127.0.0.1:0", "--log-level", "error")
    code, errors = run("--model", str(tiny_dir), "--front-processes", count, *options)
    assert code == 2
    assert f"--listen {server.inference_address}: cannot listen there" in errors
    assert [generate(server.stub(), spec()).usage.completion_tokens for _ in range(10)] == [8] * 10


def test_an_instance_starts_again_on_its_port_at_once(start_fake: StartServer) -> None:
    """Connections of the one before may linger."""
    server = start_fake(*THREE, "--lame-duck", "0")
    stubs = [server.stub() for _ in range(10)]
    for stub in stubs:
        generate(stub, spec())
    server.admin.Shutdown(pb.ShutdownRequest(timeout=Duration(seconds=1)))
    assert server.wait(5) == 0
    again = start_fake(*THREE, "--listen", server.inference_address)
    assert again.inference_address == server.inference_address
    assert generate(again.stub(), spec()).usage.completion_tokens == 8


@pytest.mark.parametrize("host", ["localhost", "[::1]", "0.0.0.0", "[::]"])
def test_every_kind_of_address_can_be_shared(start_fake: StartServer, host: str) -> None:
    if host.startswith("[") and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    server = start_fake(*THREE, "--listen", f"{host}:0", "--insecure")
    port = server.inference_address.rpartition(":")[2]
    target = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    stubs = [server.stub(f"{target}:{port}") for _ in range(12)]
    assert [generate(stub, spec()).usage.completion_tokens for stub in stubs] == [8] * 12
