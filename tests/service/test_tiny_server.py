"""The real server with the real engine on the tiny model: equality, cancels, vanished clients, leaks."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import grpc
import pytest

from protos.picovllm.admin.v1 import admin_pb2
from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1 import inference_pb2_grpc
from tests.service.conftest import StartServer
from tests.service.results import both
from tests.service.rpc import failure_of, generate, spec, stream, wait_started
from tests.service.server_process import ROOT, ServerProcess, open_files

LONG = 10_000
SAMPLINGS = {
    "greedy": pb.Sampling(temperature=0),
    "seeded": pb.Sampling(temperature=1, seed=7, top_p=0.9, top_k=500),
    "penalties": pb.Sampling(temperature=0.8, seed=8, frequency_penalty=0.5, presence_penalty=0.5, n=3),
}
VANISHING = """
import sys, time
from tests.service.rpc import spec, stream, wait_started
import grpc
from protos.picovllm.inference.v1 import inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
streams = [stream(stub, spec(max_tokens=10_000), timeout=600) for _ in range(8)]
for events in streams:
    wait_started(events)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", SAMPLINGS)
def test_stream_equals_unary(tiny_server: ServerProcess, name: str) -> None:
    """Bit for bit. With n > 1 no stop strings: where outputs stop decides the batch's shape, hence its rounding."""
    stops = ["e", "zz"] if SAMPLINGS[name].n <= 1 else []
    for text in ("The capital of France is", "你好，世界 😀", "x " * 700):
        request = spec(
            text, stopping=pb.Stopping(max_tokens=40, stop_strings=stops, min_tokens=5, ignore_eos=True),
            sampling=SAMPLINGS[name], output=pb.OutputOptions(token_ids=True, top_logprobs=2, echo=True),
        )
        result = both(tiny_server.stub(), request)
        assert all(output.text for output in result.outputs)


def test_scoring_and_prompt_logprobs(tiny_server: ServerProcess) -> None:
    request = spec("one two three " * 60, max_tokens=0, output=pb.OutputOptions(prompt_logprobs=2, echo=True))
    result = both(tiny_server.stub(), request)
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids) == result.usage.prompt_tokens
    assert not result.prompt_logprobs[0].HasField("logprob")
    assert result.prompt_logprobs[5].HasField("logprob")
    assert result.usage.completion_tokens == 0


def test_a_seed_gives_the_same_again_and_another_one_something_else(tiny_server: ServerProcess) -> None:
    def text(seed: int | None) -> tuple[str, int]:
        result = generate(tiny_server.stub(), spec(sampling=pb.Sampling(temperature=1, seed=seed)))
        return result.outputs[0].text, result.seed

    drawn, seed = text(None)
    assert text(seed) == (drawn, seed)
    assert text(seed ^ 1)[0] != drawn


def test_admission_shows_both_numbers(tiny_server: ServerProcess) -> None:
    stub = tiny_server.stub()
    failure = failure_of(lambda: generate(stub, spec("word " * 17_000)))
    assert (failure.reason, failure.metadata["limit"]) == ("PROMPT_TOO_LONG", "16384")
    assert int(failure.metadata["requested"]) > 17_000
    request = spec("word " * 8000, max_tokens=8000, sampling=pb.Sampling(n=16))
    failure = failure_of(lambda: generate(stub, request))
    assert (failure.reason, failure.metadata["limit"]) == ("EXCEEDS_KV_CAPACITY", "2048")


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_cancel_frees_its_blocks_in_time(tiny_server: ServerProcess, phase: str) -> None:
    """Within two steps or 200 ms, the later of the two."""
    stub = tiny_server.stub()
    request = spec(token_ids=pb.TokenIds(ids=[5] * 15_000), max_tokens=1000) if phase == "prefill" else (
        spec(max_tokens=LONG)
    )
    blockers = []
    if phase == "queue":
        blockers = [stream(stub, spec(max_tokens=500, sampling=pb.Sampling(n=16))) for _ in range(4)]
        for events in blockers:
            wait_started(events)
    before = tiny_server.load()
    events = stream(stub, request)
    if phase == "queue":
        while tiny_server.load().queued_requests == 0:
            time.sleep(0.005)
    else:
        wait_started(events)
    if phase == "decode":
        for _ in range(20):
            next(events)
        assert tiny_server.load().kv_blocks_used > before.kv_blocks_used
    begin = time.monotonic()
    events.cancel()
    live = len(blockers)
    while (load := tiny_server.load()).queued_requests + load.prefilling_requests + load.decoding_requests > live:
        assert time.monotonic() - begin < 5
    took = time.monotonic() - begin
    for blocker in blockers:
        blocker.cancel()
    assert tiny_server.wait_idle().kv_blocks_used == 0
    assert took < 0.2, took


def test_a_client_that_vanishes_frees_its_blocks(tiny_server: ServerProcess) -> None:
    command = [sys.executable, "-c", VANISHING, tiny_server.inference_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        assert tiny_server.load().decoding_requests == 8
        client.kill()
        begin = time.monotonic()
        assert tiny_server.wait_idle().kv_blocks_used == 0
        assert time.monotonic() - begin < 1.5


def test_requests_of_every_kind_share_a_batch(tiny_server: ServerProcess) -> None:
    """48 at once: each gets what it gets alone."""
    requests = [
        spec(f"number {i} of many", max_tokens=20 + i, sampling=pb.Sampling(temperature=i % 2, seed=i, n=1 + i % 3))
        for i in range(16)
    ]
    stub = tiny_server.stub()
    alone = [generate(stub, request).outputs for request in requests]
    futures = [stub.Generate.future(pb.GenerateRequest(spec=request), timeout=120) for request in requests * 3]
    together = [future.result().outputs for future in futures]
    same = sum(one == two for one, two in zip(alone * 3, together, strict=True))
    assert same >= 44, f"only {same} of 48 equal: more than rounding explains"


def test_a_killed_engine_ends_streams_with_worker_lost(start_tiny: StartServer) -> None:
    server = start_tiny()
    streams = [stream(server.stub(), spec(max_tokens=LONG)) for _ in range(3)]
    for events in streams:
        wait_started(events)
    os.kill(server.pid_of("engine-0"), signal.SIGKILL)
    assert [failure_of(events).reason for events in streams] == ["WORKER_LOST"] * 3
    assert server.wait(10) == 1


def test_deadlines_with_the_real_engine(start_tiny: StartServer) -> None:
    server = start_tiny("--max-num-seqs", "16", "--num-gpu-blocks", "4096")
    stub = server.stub()
    for _ in range(10):
        assert failure_of(lambda: generate(stub, spec(max_tokens=LONG), timeout=0.3)).reason == "DEADLINE_DECODE"
        assert failure_of(stream(stub, spec(max_tokens=LONG), timeout=0.3)).reason == "DEADLINE_DECODE"
    full = stream(stub, spec(max_tokens=LONG // 5, sampling=pb.Sampling(n=16)))
    wait_started(full)
    for _ in range(20):
        assert failure_of(lambda: generate(stub, spec(), timeout=0.25)).reason == "DEADLINE_QUEUED"
    full.cancel()
    assert server.wait_idle().kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "fronts"), [("fake", 1), ("fake", 3), ("tiny", 1)])
def test_ten_thousand_cancels_leak_nothing(
    start_fake: StartServer, start_tiny: StartServer, engine: str, fronts: int
) -> None:
    """At random phases, unary and streamed, by cancel, deadline and admin: no block, task, file or byte stays."""
    start = start_fake if engine == "fake" else start_tiny
    options = ("--num-gpu-blocks", "2048", "--log-level", "warning", "--lame-duck", "0")
    server = start(*options, "--front-processes", str(fronts))
    asyncio.run(_many_cancels(server.inference_address, 100, -1))  # its last connections close late
    pids = [*server.front_pids(), server.pid_of("engine-0")]
    baseline, files = _gauges(server), [open_files(pid) for pid in pids]
    stop = threading.Event()
    admin = threading.Thread(target=_cancel_now_and_then, args=(server, stop))
    admin.start()
    seen: dict[str, int] = {}
    seed = 0
    while sum(seen.values()) < 10_000:
        asyncio.run(_many_cancels(server.inference_address, 1000, seed))
        seen, seed = _ends(server), seed + 1
    stop.set()
    admin.join()
    load = server.wait_idle()
    print(f"{engine}: {seen}")
    assert (load.kv_blocks_used, load.queued_requests, load.decoding_requests) == (0, 0, 0)
    for reason in ("CLIENT_CANCELLED", "ADMIN_CANCELLED", "DEADLINE_QUEUED", "DEADLINE_DECODE"):
        assert seen.get(reason, 0) > 0, seen
    time.sleep(1)
    after = _gauges(server)
    assert after["live_requests"] == 0
    assert after["output_buffer_bytes"] == 0
    assert after["event_loop_tasks"] <= baseline["event_loop_tasks"] + 2
    assert _differences(pids, files) == [], "open files"
    assert generate(server.stub(), spec()).usage.completion_tokens == 8
    server.terminate()
    assert server.wait(15) == 0


def _differences(pids: list[int], before: list[int]) -> list[tuple[int, int]]:
    """Files open before and now, of the processes that have more. Eight connections may be still open, or another's."""
    now = [open_files(pid) for pid in pids]
    return [(old, new) for old, new in zip(before, now, strict=True) if new > old + 8]


async def _many_cancels(address: str, count: int, seed: int) -> None:
    draw = random.Random(seed)
    async with contextlib.AsyncExitStack() as stack:
        stubs: list[Any] = []
        for _ in range(8):  # connections, so that each front gets some
            channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            stubs.append(inference_pb2_grpc.InferenceServiceStub(channel))
        numbers = iter(range(count))
        await asyncio.gather(*(_cancel_some(stubs[i % 8], numbers, draw) for i in range(32)))


async def _cancel_some(stub: Any, numbers: Any, draw: random.Random) -> None:
    for number in numbers:
        request = spec(
            "word " * draw.choice([1, 5, 40, 120]), max_tokens=draw.choice([50, 500]),
            sampling=pb.Sampling(temperature=0, n=draw.choice([1, 1, 1, 4])),
        )
        timeout = draw.choice([30, 30, 30, 0.05])
        if number % 3 == 0:
            call = stub.Generate(pb.GenerateRequest(spec=request), timeout=timeout)
        else:
            call = stub.Stream(pb.StreamRequest(spec=request), timeout=timeout)
        work = asyncio.ensure_future(_consume(call, number % 3 == 0))
        await asyncio.wait([work], timeout=draw.choice([0.005, 0.02, 0.05, 0.15]))
        call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await work


def _ends(server: ServerProcess) -> dict[str, int]:
    """Generate and Stream calls that did not end well, by reason."""
    text = server.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    pattern = r'calls_total\{method="(?:Generate|Stream)",code="\w+",reason="(\w+)"\} (\d+)'
    seen: dict[str, int] = {}
    for reason, number in re.findall(pattern, text):
        seen[reason] = seen.get(reason, 0) + int(number)
    return seen


async def _consume(call: Any, unary: bool) -> None:
    if unary:
        await call
        return
    async for _ in call:
        pass


def _cancel_now_and_then(server: ServerProcess, stop: threading.Event) -> None:
    while not stop.wait(0.2):
        server.admin.CancelRequests(admin_pb2.CancelRequestsRequest(all=True), timeout=30)


def _gauges(server: ServerProcess) -> dict[str, float]:
    text = server.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    lines = (line.split() for line in text.splitlines() if not line.startswith("#") and "{" not in line)
    return {name.removeprefix("picovllm_"): float(value) for name, value in lines}
