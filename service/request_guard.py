"""RequestGuard: what a handler gets is a message that this build understands in full.

Bytes that are no such message would otherwise end UNKNOWN, with a Python error in the status.
"""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from service.calls import answer
from service.errors import Reason, ServiceError
from service.metrics import Metrics
from service.stop_gate import StopGate


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a request that could not be parsed."""

    problem: str


class RequestGuard(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to a request that cannot be parsed. Calls that stream requests pass as they are.

    Others pass ``gate`` first.
    """

    def __init__(self, metrics: Metrics, gate: StopGate) -> None:
        self._metrics = metrics
        self._gate = gate

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        details, handler = handler_call_details, await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        behavior = "unary_stream" if handler.response_streaming else "unary_unary"
        inner = getattr(handler, behavior)
        assert inspect.iscoroutinefunction(inner), f"{details.method}: only coroutines are guarded"
        method = details.method.rpartition("/")[2]

        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._gate.passing()
            if isinstance(request, _Unreadable):
                await answer(context, method, self._metrics, lambda: _refuse(request))
            return await inner(request, context)

        return handler._replace(request_deserializer=_tolerant(handler.request_deserializer), **{behavior: guarded})


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_say_why(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Unreadable(" ".join(str(error).split()))

    return parse_or_say_why


async def _refuse(request: _Unreadable) -> NoReturn:
    raise ServiceError(Reason.FIELD_INVALID, f"the request cannot be read: {request.problem}")
