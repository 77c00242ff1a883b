"""A real gRPC server with made-up answers, and a record of what it saw."""

import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.admin.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

WORDS = ("The", " capital", " of", " France", " is", " Paris.")


class FakeInference(InferenceServiceServicer):
    """Answers with `WORDS`, or endlessly, or fails: as the prompt text asks."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.attempts = 0
        self.fail_next = False  # refuse one Stream as full
        self.deadlines: list[float | None] = []
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._see(request, context)
        _fail_if_asked(request.spec.text, context)
        if request.spec.text == "flaky" and self.attempts < 3:
            _abort(context, grpc.StatusCode.UNAVAILABLE, "STARTING")
        output = pb.Output(text="".join(WORDS), finish_reason=pb.FINISH_REASON_STOP)
        return pb.GenerateResponse(model="fake", outputs=[output], usage=_usage())

    def Stream(self, request: pb.StreamRequest, context: grpc.ServicerContext) -> Iterator[pb.StreamResponse]:
        self._see(request, context)
        context.add_callback(self.cancelled.set)
        _fail_if_asked(request.spec.text, context)
        if self.fail_next:
            self.fail_next = False
            _fail_if_asked("full", context)
        turns = request.spec.chat.messages
        endless = "forever" in (request.spec.text or (turns[-1].content if turns else ""))
        yield pb.StreamResponse(started=pb.Started(request_id="r1", model="fake", prompt_tokens=5, max_tokens=99))
        for offset, word in enumerate(_words(endless)):
            if not context.is_active():
                return
            yield pb.StreamResponse(delta=pb.Delta(token_offset=offset, text=word))
            if endless:
                self.cancelled.wait(0.02)
        yield pb.StreamResponse(finished=pb.Finished(finish_reason=pb.FINISH_REASON_STOP, token_count=len(WORDS)))
        yield pb.StreamResponse(completed=pb.Completed(usage=_usage()))

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self._see(request, context)
        return pb.TokenizeResponse(token_ids=request.text.encode())

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        self._see(request, context)
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        self._see(request, context)
        return pb.GetModelInfoResponse(model="fake", architecture="FakeForCausalLM")

    def _see(self, request: Any, context: grpc.ServicerContext) -> None:
        self.attempts += 1
        self.requests.append(request)
        remaining = context.time_remaining()
        self.deadlines.append(remaining if remaining is not None and remaining < 1e9 else None)


class FakeAdmin(AdminServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def GetStatus(self, request: admin.GetStatusRequest, context: grpc.ServicerContext) -> admin.GetStatusResponse:
        return admin.GetStatusResponse(status=_status(admin.INSTANCE_STATE_SERVING))

    def WatchStatus(
        self, request: admin.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[admin.WatchStatusResponse]:
        for state in (admin.INSTANCE_STATE_SERVING, admin.INSTANCE_STATE_DRAINING, admin.INSTANCE_STATE_STOPPED):
            yield admin.WatchStatusResponse(status=_status(state))

    def GetLoad(self, request: admin.GetLoadRequest, context: grpc.ServicerContext) -> admin.GetLoadResponse:
        return admin.GetLoadResponse(decoding_requests=3, kv_blocks_used=7, kv_blocks_reusable=5, kv_blocks_total=40)

    def FlushCache(self, request: admin.FlushCacheRequest, context: grpc.ServicerContext) -> admin.FlushCacheResponse:
        self.requests.append(request)
        return admin.FlushCacheResponse(kv_blocks_freed=5, kv_blocks_held=7)

    def Drain(self, request: admin.DrainRequest, context: grpc.ServicerContext) -> admin.DrainResponse:
        self.requests.append(request)
        return admin.DrainResponse(status=_status(admin.INSTANCE_STATE_DRAINING))

    def Undrain(self, request: admin.UndrainRequest, context: grpc.ServicerContext) -> admin.UndrainResponse:
        return admin.UndrainResponse(status=_status(admin.INSTANCE_STATE_SERVING))

    def Shutdown(self, request: admin.ShutdownRequest, context: grpc.ServicerContext) -> admin.ShutdownResponse:
        self.requests.append(request)
        return admin.ShutdownResponse(status=_status(admin.INSTANCE_STATE_DRAINING))

    def ListRequests(
        self, request: admin.ListRequestsRequest, context: grpc.ServicerContext
    ) -> admin.ListRequestsResponse:
        info = admin.RequestInfo(request_id="r1", state=admin.REQUEST_STATE_DECODING, prompt_tokens=5)
        return admin.ListRequestsResponse(requests=[info])

    def CancelRequests(
        self, request: admin.CancelRequestsRequest, context: grpc.ServicerContext
    ) -> admin.CancelRequestsResponse:
        self.requests.append(request)
        return admin.CancelRequestsResponse(cancelled_ids=["r1"])

    def SetLogLevel(
        self, request: admin.SetLogLevelRequest, context: grpc.ServicerContext
    ) -> admin.SetLogLevelResponse:
        self.requests.append(request)
        return admin.SetLogLevelResponse(previous_level=admin.LOG_LEVEL_INFO)

    def GetMetrics(self, request: admin.GetMetricsRequest, context: grpc.ServicerContext) -> admin.GetMetricsResponse:
        return admin.GetMetricsResponse(text="picovllm_requests 1\n")


class FakeServer:
    """Both services on one loopback port."""

    def __init__(self) -> None:
        self.inference, self.admin = FakeInference(), FakeAdmin()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        add_InferenceServiceServicer_to_server(self.inference, self._server)
        add_AdminServiceServicer_to_server(self.admin, self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(True)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("picovllm.inference.v1.InferenceService", state)

    def stop(self) -> None:
        self._server.stop(0.2).wait()


def _words(endless: bool) -> Iterator[str]:
    yield from WORDS
    while endless:
        yield " and"


def _usage() -> pb.Usage:
    return pb.Usage(prompt_tokens=5, completion_tokens=len(WORDS), total_tokens=5 + len(WORDS))


def _status(state: admin.InstanceState) -> admin.Status:
    return admin.Status(state=state, model="fake", server_version="0.1.0")


def _fail_if_asked(text: str, context: grpc.ServicerContext) -> None:
    if text == "bad fields":
        paths = ("spec.sampling.top_p", "spec.stopping.max_tokens")
        violations = [error_details_pb2.BadRequest.FieldViolation(field=p, description="is wrong") for p in paths]
        detail = error_details_pb2.BadRequest(field_violations=violations)
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", [detail])
    if text == "full":
        detail_retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
        _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", [detail_retry])


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, more: Sequence[Message] = ()) -> None:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain="picovllm", metadata={"limit": "4"}),
        *more,
    ]
    packed = []
    for detail in details:
        any_message = AnyMessage()
        any_message.Pack(detail)
        packed.append(any_message)
    status = status_pb2.Status(code=code.value[0], message=f"refused: {reason}", details=packed)
    translated = rpc_status.to_status(status)
    context.abort_with_status(_WithRequestId(translated))


class _WithRequestId(grpc.Status):
    """A rich status that also carries the request id, as the real server's do."""

    def __init__(self, status: Any) -> None:
        self.code, self.details = status.code, status.details
        self.trailing_metadata = (*status.trailing_metadata, ("x-request-id", "r-7"))
