"""Short hands for tests that speak to a server."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from protos.picovllm.inference.v1 import inference_pb2 as pb


def spec(text: str = "one two three", max_tokens: int | None = 8, **more: Any) -> pb.GenerationSpec:
    """A greedy request; ``more`` are fields of GenerationSpec."""
    more.setdefault("sampling", pb.Sampling(temperature=0))
    more.setdefault("stopping", pb.Stopping(max_tokens=max_tokens))
    if not {"chat", "token_ids"} & more.keys():
        more["text"] = text
    return pb.GenerationSpec(**more)


def generate(stub: Any, request: pb.GenerationSpec, **call: Any) -> pb.GenerateResponse:
    call.setdefault("timeout", 60)
    response: pb.GenerateResponse = stub.Generate(pb.GenerateRequest(spec=request), **call)
    return response


def stream(stub: Any, request: pb.GenerationSpec, options: pb.StreamOptions | None = None, **call: Any) -> Any:
    call.setdefault("timeout", 60)
    return stub.Stream(pb.StreamRequest(spec=request, stream_options=options), **call)


class Failure:
    """A failed call, taken apart. Asserts what holds for every failure of this server."""

    def __init__(self, error: Any) -> None:
        status = rpc_status.from_call(error)
        assert status is not None, f"no details: {error}"
        self.code: grpc.StatusCode = error.code()
        self.message: str = error.details()
        infos: list[ErrorInfo] = []
        self.violations: dict[str, str] = {}
        self.retry_after: float | None = None
        self.trailing: dict[str, Any] = dict(error.trailing_metadata())
        self.size = len(self.trailing["grpc-status-details-bin"]) + len(self.message.encode())
        for detail in status.details:
            if detail.Is(ErrorInfo.DESCRIPTOR):
                infos.append(_unpack(detail, ErrorInfo()))
            elif detail.Is(BadRequest.DESCRIPTOR):
                self.violations = {v.field: v.description for v in _unpack(detail, BadRequest()).field_violations}
            elif detail.Is(RetryInfo.DESCRIPTOR):
                self.retry_after = _unpack(detail, RetryInfo()).retry_delay.ToMilliseconds() / 1000
        (info,) = infos
        assert info.domain == "picovllm"
        assert self.size <= 4096
        self.reason: str = info.reason
        self.metadata = dict(info.metadata)


def _unpack(detail: Any, message: Any) -> Any:
    assert detail.Unpack(message)
    return message


def failure_of(call: Any) -> Failure:
    """Calls it (or iterates over it) and returns how it failed."""
    try:
        result = call() if callable(call) else call
        if isinstance(result, Iterable):
            for _ in result:
                pass
    except grpc.RpcError as error:
        return Failure(error)
    raise AssertionError("the call did not fail")


def wait_started(events: Any) -> pb.Started:
    """Reads the first event of a stream."""
    started: pb.Started = next(iter(events)).started
    return started
