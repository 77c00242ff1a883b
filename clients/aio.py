"""AsyncPicoClient and AsyncAdminClient: `clients.client` for asyncio, method for method.

    async with AsyncPicoClient("127.0.0.1:50051") as client:
        reply = await client.generate("The capital of France is", max_tokens=8, temperature=0)
        async with client.stream([{"role": "user", "content": "Hello!"}]) as stream:
            async for piece in stream.texts():
                print(piece, end="", flush=True)

A client belongs to the event loop it was made in.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc

from clients.channel import ADMIN_OPTIONS, INFERENCE_OPTIONS, open_async_channel
from clients.errors import translated
from clients.requests import cancel_request, drain_request, log_level_request, shutdown_request, tokenize_request
from clients.spec import Message, Prompt, Seconds, SpecOptions, build_spec
from clients.streams import AsyncGenerationStream, AsyncStream
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.admin.v1.admin_pb2_grpc import AdminServiceStub
from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1.inference_pb2_grpc import InferenceServiceStub


class _AsyncClient:
    """Owns a channel, which `close` or the end of the ``async with`` block closes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class AsyncPicoClient(_AsyncClient):
    """InferenceService at ``address``, a gRPC target; plaintext unless ``credentials`` are given."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        super().__init__(open_async_channel(address, INFERENCE_OPTIONS, credentials))
        self._stub: Any = InferenceServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[SpecOptions]
    ) -> pb.GenerateResponse:
        """Run a request to its end."""
        request = pb.GenerateRequest(spec=build_spec(prompt, options))
        with translated():
            return cast(pb.GenerateResponse, await self._stub.Generate(request, timeout=timeout))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        stream_options: pb.StreamOptions | None = None,
        **options: Unpack[SpecOptions],
    ) -> AsyncGenerationStream:
        """A request to be run in a ``async with`` block; leaving the block cancels what is left of it."""
        request = pb.StreamRequest(spec=build_spec(prompt, options), stream_options=stream_options)
        return AsyncGenerationStream(lambda: self._stub.Stream(request, timeout=timeout))

    async def tokenize(
        self,
        text: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text or of a chat."""
        request = tokenize_request(text, add_special_tokens, model)
        with translated():
            return list((await self._stub.Tokenize(request, timeout=timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with translated():
            return str((await self._stub.Detokenize(request, timeout=timeout)).text)

    async def model_info(self, *, model: str = "", timeout: float | None = None) -> pb.GetModelInfoResponse:
        """Identity, limits, features and defaults of the served model."""
        with translated():
            reply = await self._stub.GetModelInfo(pb.GetModelInfoRequest(model=model), timeout=timeout)
            return cast(pb.GetModelInfoResponse, reply)


class AsyncAdminClient(_AsyncClient):
    """AdminService at ``address``, the admin listener of one instance."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        super().__init__(open_async_channel(address, ADMIN_OPTIONS, credentials))
        self._stub: Any = AdminServiceStub(self._channel)

    async def _call(self, rpc: str, request: Any, timeout: float | None) -> Any:
        with translated():
            return await getattr(self._stub, rpc)(request, timeout=timeout)

    async def status(self, *, timeout: float | None = None) -> admin.Status:
        return cast(admin.Status, (await self._call("GetStatus", admin.GetStatusRequest(), timeout)).status)

    def watch(self, *, timeout: float | None = None) -> AsyncStream[admin.WatchStatusResponse]:
        """The status now and at every change, in a ``async with`` block; ends when the instance has stopped."""
        return AsyncStream(lambda: self._stub.WatchStatus(admin.WatchStatusRequest(), timeout=timeout))

    async def load(self, *, timeout: float | None = None) -> admin.GetLoadResponse:
        return cast(admin.GetLoadResponse, await self._call("GetLoad", admin.GetLoadRequest(), timeout))

    async def drain(
        self,
        *,
        lame_duck: Seconds | None = None,
        drain_timeout: Seconds | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> admin.Status:
        """Begin to drain; None leaves the server's setting. `watch` tells when it is done."""
        return cast(
            admin.Status, (await self._call("Drain", drain_request(lame_duck, drain_timeout, reason), timeout)).status
        )

    async def undrain(self, *, timeout: float | None = None) -> admin.Status:
        return cast(admin.Status, (await self._call("Undrain", admin.UndrainRequest(), timeout)).status)

    async def shutdown(
        self, *, drain_timeout: Seconds | None = None, immediate: bool = False, timeout: float | None = None
    ) -> admin.Status:
        """Begin to shut down: drain, then exit."""
        return cast(
            admin.Status, (await self._call("Shutdown", shutdown_request(drain_timeout, immediate), timeout)).status
        )

    async def list_requests(self, *, timeout: float | None = None) -> list[admin.RequestInfo]:
        return list((await self._call("ListRequests", admin.ListRequestsRequest(), timeout)).requests)

    async def cancel_requests(
        self, ids: Sequence[str] | None, *, timeout: float | None = None
    ) -> admin.CancelRequestsResponse:
        """Cancel live requests by id; None = all of them."""
        return cast(admin.CancelRequestsResponse, await self._call("CancelRequests", cancel_request(ids), timeout))

    async def flush_cache(self, *, timeout: float | None = None) -> admin.FlushCacheResponse:
        """Forget all cached prefixes; says how many KV blocks that freed, and how many live requests hold."""
        return cast(admin.FlushCacheResponse, await self._call("FlushCache", admin.FlushCacheRequest(), timeout))

    async def set_log_level(
        self, logger: str, level: admin.LogLevel, *, ttl: Seconds | None = None, timeout: float | None = None
    ) -> admin.LogLevel:
        """Set the level of ``logger`` ("" = all), for ``ttl`` or for good; returns the one before."""
        request = log_level_request(logger, level, ttl)
        return cast(admin.LogLevel, (await self._call("SetLogLevel", request, timeout)).previous_level)

    async def metrics(self, *, timeout: float | None = None) -> str:
        """All metrics in the Prometheus text format."""
        return str((await self._call("GetMetrics", admin.GetMetricsRequest(), timeout)).text)
