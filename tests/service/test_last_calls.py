"""Calls in the very moment a drained server stops: each gets the server's answer, or does not reach it at all."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from service.stop_gate import StopGate
from tests.service.conftest import StartServer
from tests.service.rpc import Failure, generate, spec

ANSWERED, UNREACHABLE = "DRAINING", "unreachable"


def call_until_unreachable(stub: Any, ends: Counter[str]) -> None:
    while not ends[UNREACHABLE]:
        try:
            generate(stub, spec(max_tokens=1))
            ends["OK"] += 1
        except grpc.RpcError as error:
            ends[_end_of(error)] += 1


def _end_of(error: Any) -> str:
    if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in error.details():
        return UNREACHABLE
    assert error.code() is not grpc.StatusCode.CANCELLED
    return Failure(error).reason


@pytest.mark.parametrize("fronts", ["1", "3"])
def test_who_calls_on_and_on_is_answered_until_nobody_listens(start_fake: StartServer, fronts: str) -> None:
    server = start_fake("--front-processes", fronts, "--lame-duck", "0", "--log-level", "warning")
    ends: list[Counter[str]] = [Counter() for _ in range(8)]
    threads = [threading.Thread(target=call_until_unreachable, args=(server.stub(), each)) for each in ends]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    server.terminate()
    assert server.wait(10) == 0
    for thread in threads:
        thread.join(30)
    assert all(set(each) == {"OK", ANSWERED, UNREACHABLE} for each in ends), ends


def test_waiting_calls_go_on_once_the_stop_has_begun_and_the_wait_is_bounded() -> None:
    async def scenario() -> None:
        gate = StopGate()
        order: list[str] = []

        async def call(name: str) -> None:
            await gate.passing()
            order.append(name)

        async def stop() -> None:
            order.append("stop")
            await asyncio.sleep(0.05)
            order.append("stopped")

        async def flood() -> None:
            while "stop" not in order:
                calls.append(asyncio.ensure_future(call("call")))
                await asyncio.sleep(0.01)

        calls: list[asyncio.Future[None]] = []
        await call("early")
        flooding = asyncio.ensure_future(flood())
        begin = time.monotonic()
        await gate.stop(stop)
        assert 0.5 <= time.monotonic() - begin < 2
        await asyncio.gather(flooding, *calls)
        assert order[:3] == ["early", "stop", "call"]
        assert order[-1] == "stopped"

    asyncio.run(scenario())


def test_a_quiet_server_stops_soon() -> None:
    async def scenario() -> float:
        begin = time.monotonic()

        async def stop() -> None:
            pass

        await StopGate().stop(stop)
        return time.monotonic() - begin

    assert asyncio.run(scenario()) < 0.4
