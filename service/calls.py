"""What every handler does: end with a status from the error table, echo the request id, honour the deadline."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from service.errors import DETAILS_KEY, Reason, ServiceError, to_status
from service.metrics import Metrics

log = logging.getLogger(__name__)
REQUEST_ID_KEY = "x-request-id"
ATTEMPTS_KEY = "grpc-previous-rpc-attempts"
MAX_REQUEST_SECONDS = 3600.0
_MARGIN_SECONDS = 0.020
_MARGIN_SHARE = 0.10
T = TypeVar("T")


def deadline_of(context: grpc.aio.ServicerContext, arrival: float) -> float:
    """The monotonic time at which we end the call ourselves.

    A little before the client's own timer, so that the client sees our details; at most `MAX_REQUEST_SECONDS`.
    """
    left = context.time_remaining()
    if left is None or left > MAX_REQUEST_SECONDS:
        return arrival + MAX_REQUEST_SECONDS
    return arrival + left - min(_MARGIN_SECONDS, _MARGIN_SHARE * left)


def is_retry(context: grpc.aio.ServicerContext) -> bool:
    """Whether the client's library sent this call again by itself."""
    return any(key == ATTEMPTS_KEY and value not in ("", "0") for key, value in context.invocation_metadata() or ())


async def abort(context: grpc.aio.ServicerContext, error: ServiceError, request_id: str = "") -> None:
    """Ends the call. Trailers only when nothing was sent before, so that clients may retry."""
    status = to_status(error)
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if request_id:
        trailing.append((REQUEST_ID_KEY, request_id))
    try:
        await context.abort(error.code, status.message, tuple(trailing))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as fault:  # the connection is gone: there is nobody to tell
        log.debug("status not sent: %s", fault)
        raise asyncio.CancelledError from fault


async def answer(
    context: grpc.aio.ServicerContext,
    method: str,
    metrics: Metrics,
    body: Callable[[], Awaitable[T]],
    request_id: str = "",
) -> T:
    """Runs the body of a handler: whatever it raises becomes one status, one line in the log, one count."""
    begin = time.monotonic()
    try:
        result = await body()
    except ServiceError as failure:
        error = failure
    except asyncio.CancelledError:
        _note(method, metrics, request_id, begin, ServiceError(Reason.CLIENT_CANCELLED, "the client cancelled"))
        raise
    except Exception:
        log.exception("%s %s failed", method, request_id)
        error = ServiceError(Reason.BUG, "internal error; the server's log has it under this request id")
    else:
        _note(method, metrics, request_id, begin, None)
        return result
    _note(method, metrics, request_id, begin, error)
    await abort(context, error, request_id)
    raise AssertionError("abort returned")


def _note(method: str, metrics: Metrics, request_id: str, begin: float, error: ServiceError | None) -> None:
    metrics.call_ended(method, error)
    result = "OK" if error is None else f"{error.code.name} {error.reason.value}"
    level = logging.DEBUG if error is None else logging.INFO
    log.log(level, "%s %s %s %.3f s", method, request_id, result, time.monotonic() - begin)
