"""PicoClient and AdminClient: the two services from ordinary Python.

    with PicoClient("127.0.0.1:50051") as client:
        reply = client.generate("The capital of France is", max_tokens=8, temperature=0)
        with client.stream([{"role": "user", "content": "Hello!"}]) as stream:
            for piece in stream.texts():
                print(piece, end="", flush=True)

Messages are those of the protos. A failed call raises `PicoError`. ``timeout`` is the deadline in seconds; None leaves
the server's maximum. Clients may be shared by threads.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc

from clients.channel import ADMIN_OPTIONS, INFERENCE_OPTIONS, open_channel
from clients.errors import translated
from clients.requests import cancel_request, drain_request, log_level_request, shutdown_request, tokenize_request
from clients.spec import Message, Prompt, Seconds, SpecOptions, build_spec
from clients.streams import GenerationStream, Stream
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.admin.v1.admin_pb2_grpc import AdminServiceStub
from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1.inference_pb2_grpc import InferenceServiceStub


class _Client:
    """Owns a channel, which `close` or the end of the ``with`` block closes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class PicoClient(_Client):
    """InferenceService at ``address``, a gRPC target; plaintext unless ``credentials`` are given."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        super().__init__(open_channel(address, INFERENCE_OPTIONS, credentials))
        self._stub: Any = InferenceServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[SpecOptions]
    ) -> pb.GenerateResponse:
        """Run a request to its end."""
        request = pb.GenerateRequest(spec=build_spec(prompt, options))
        with translated():
            return cast(pb.GenerateResponse, self._stub.Generate(request, timeout=timeout))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        stream_options: pb.StreamOptions | None = None,
        **options: Unpack[SpecOptions],
    ) -> GenerationStream:
        """A request to be run in a ``with`` block; leaving the block cancels what is left of it."""
        request = pb.StreamRequest(spec=build_spec(prompt, options), stream_options=stream_options)
        return GenerationStream(lambda: self._stub.Stream(request, timeout=timeout))

    def tokenize(
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
            return list(self._stub.Tokenize(request, timeout=timeout).token_ids)

    def detokenize(
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
            return str(self._stub.Detokenize(request, timeout=timeout).text)

    def model_info(self, *, model: str = "", timeout: float | None = None) -> pb.GetModelInfoResponse:
        """Identity, limits, features and defaults of the served model."""
        with translated():
            reply = self._stub.GetModelInfo(pb.GetModelInfoRequest(model=model), timeout=timeout)
            return cast(pb.GetModelInfoResponse, reply)


class AdminClient(_Client):
    """AdminService at ``address``, the admin listener of one instance."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        super().__init__(open_channel(address, ADMIN_OPTIONS, credentials))
        self._stub: Any = AdminServiceStub(self._channel)

    def _call(self, rpc: str, request: Any, timeout: float | None) -> Any:
        with translated():
            return getattr(self._stub, rpc)(request, timeout=timeout)

    def status(self, *, timeout: float | None = None) -> admin.Status:
        return cast(admin.Status, self._call("GetStatus", admin.GetStatusRequest(), timeout).status)

    def watch(self, *, timeout: float | None = None) -> Stream[admin.WatchStatusResponse]:
        """The status now and at every change, in a ``with`` block; ends when the instance has stopped."""
        return Stream(lambda: self._stub.WatchStatus(admin.WatchStatusRequest(), timeout=timeout))

    def load(self, *, timeout: float | None = None) -> admin.GetLoadResponse:
        return cast(admin.GetLoadResponse, self._call("GetLoad", admin.GetLoadRequest(), timeout))

    def drain(
        self,
        *,
        lame_duck: Seconds | None = None,
        drain_timeout: Seconds | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> admin.Status:
        """Begin to drain; None leaves the server's setting. `watch` tells when it is done."""
        return cast(admin.Status, self._call("Drain", drain_request(lame_duck, drain_timeout, reason), timeout).status)

    def undrain(self, *, timeout: float | None = None) -> admin.Status:
        return cast(admin.Status, self._call("Undrain", admin.UndrainRequest(), timeout).status)

    def shutdown(
        self, *, drain_timeout: Seconds | None = None, immediate: bool = False, timeout: float | None = None
    ) -> admin.Status:
        """Begin to shut down: drain, then exit."""
        return cast(admin.Status, self._call("Shutdown", shutdown_request(drain_timeout, immediate), timeout).status)

    def list_requests(self, *, timeout: float | None = None) -> list[admin.RequestInfo]:
        return list(self._call("ListRequests", admin.ListRequestsRequest(), timeout).requests)

    def cancel_requests(
        self, ids: Sequence[str] | None, *, timeout: float | None = None
    ) -> admin.CancelRequestsResponse:
        """Cancel live requests by id; None = all of them."""
        return cast(admin.CancelRequestsResponse, self._call("CancelRequests", cancel_request(ids), timeout))

    def flush_cache(self, *, timeout: float | None = None) -> admin.FlushCacheResponse:
        """Forget all cached prefixes; says how many KV blocks that freed, and how many live requests hold."""
        return cast(admin.FlushCacheResponse, self._call("FlushCache", admin.FlushCacheRequest(), timeout))

    def set_log_level(
        self, logger: str, level: admin.LogLevel, *, ttl: Seconds | None = None, timeout: float | None = None
    ) -> admin.LogLevel:
        """Set the level of ``logger`` ("" = all), for ``ttl`` or for good; returns the one before."""
        request = log_level_request(logger, level, ttl)
        return cast(admin.LogLevel, self._call("SetLogLevel", request, timeout).previous_level)

    def metrics(self, *, timeout: float | None = None) -> str:
        """All metrics in the Prometheus text format."""
        return str(self._call("GetMetrics", admin.GetMetricsRequest(), timeout).text)
