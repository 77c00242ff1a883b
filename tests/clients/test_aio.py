import asyncio
import threading
from collections.abc import Awaitable, Callable

import grpc
import pytest

from clients.aio import AsyncAdminClient, AsyncPicoClient
from clients.errors import PicoError
from protos.picovllm.admin.v1 import admin_pb2 as admin
from tests.clients.fake_server import WORDS, FakeServer


def with_client(server: FakeServer, scenario: Callable[[AsyncPicoClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncPicoClient(server.address) as client:
            await scenario(client)

    asyncio.run(main())


async def seen(event: threading.Event) -> bool:
    """Wait for the fake server without blocking the loop."""
    return await asyncio.to_thread(event.wait, 5)


def test_unary_calls(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        assert (await client.generate("hi")).outputs[0].text == "".join(WORDS)
        assert await client.tokenize("ab") == [97, 98]
        assert await client.detokenize([97, 98]) == "ab"
        assert (await client.model_info()).model == "fake"

    with_client(server, scenario)


def test_stream_to_its_end(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        async with client.stream("hi") as stream:
            assert [piece async for piece in stream.texts()] == list(WORDS)
        assert stream.progress.completed is not None

    with_client(server, scenario)


def test_leaving_a_stream_by_break_cancels_it(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        async with client.stream("forever") as stream:
            async for _ in stream.texts():
                break
        assert await seen(server.inference.cancelled)

    with_client(server, scenario)


def test_a_cancelled_task_cancels_its_stream(server: FakeServer) -> None:
    async def read(client: AsyncPicoClient, begun: asyncio.Event) -> None:
        async with client.stream("forever") as stream:
            async for _ in stream.texts():
                begun.set()

    async def scenario(client: AsyncPicoClient) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(read(client, begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await seen(server.inference.cancelled)

    with_client(server, scenario)


def test_errors_carry_their_details(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        with pytest.raises(PicoError) as unary:
            await client.generate("bad fields")
        assert [violation.field for violation in unary.value.violations] == [
            "spec.sampling.top_p",
            "spec.stopping.max_tokens",
        ]
        assert unary.value.request_id == "r-7"
        with pytest.raises(PicoError) as streamed:
            async with client.stream("full") as stream:
                [event async for event in stream]
        assert (streamed.value.reason, streamed.value.retry_after) == ("QUEUE_FULL", 1.5)

    with_client(server, scenario)


def test_unavailable_is_tried_three_times(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        assert (await client.generate("flaky")).model == "fake"

    with_client(server, scenario)
    assert server.inference.attempts == 3


def test_a_deadline_ends_the_call(server: FakeServer) -> None:
    async def scenario(client: AsyncPicoClient) -> None:
        with pytest.raises(PicoError) as failure:
            async with client.stream("forever", timeout=0.4) as stream:
                [event async for event in stream]
        assert failure.value.code == grpc.StatusCode.DEADLINE_EXCEEDED

    with_client(server, scenario)


def test_admin(server: FakeServer) -> None:
    async def main() -> None:
        async with AsyncAdminClient(server.address) as client:
            assert (await client.status()).state == admin.INSTANCE_STATE_SERVING
            assert (await client.load()).kv_blocks_total == 40
            assert (await client.drain(lame_duck=0)).state == admin.INSTANCE_STATE_DRAINING
            assert (await client.undrain()).state == admin.INSTANCE_STATE_SERVING
            assert (await client.list_requests())[0].request_id == "r1"
            assert (await client.cancel_requests(None)).cancelled_ids == ["r1"]
            assert (await client.flush_cache()).kv_blocks_freed == 5
            assert await client.set_log_level("", admin.LOG_LEVEL_ERROR) == admin.LOG_LEVEL_INFO
            assert "picovllm_requests" in await client.metrics()
            await client.shutdown(drain_timeout=1)
            async with client.watch() as states:
                assert [event.status.state async for event in states][-1] == admin.INSTANCE_STATE_STOPPED

    asyncio.run(main())
