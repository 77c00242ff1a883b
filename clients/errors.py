"""PicoError: a failed call, with the details the server sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request: its path, such as ``spec.sampling.top_p``, and what is wrong with it."""

    field: str
    description: str


class PicoError(Exception):
    """A call that ended with another status than OK.

    ``reason`` is the server's own word for the cause, such as ``QUEUE_FULL``; empty when the failure did not come from
    the server (a connection that could not be made, a deadline that passed here). ``violations`` are all bad fields of
    an INVALID_ARGUMENT. ``retry_after`` is in seconds, None when the server gave no advice. ``request_id`` is empty
    when the server named none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        self.code, self.message, self.reason = code, message, reason
        self.metadata = metadata or {}
        self.violations, self.retry_after, self.request_id = violations, retry_after, request_id
        super().__init__(f"{code.name}{'/' + reason if reason else ''}: {message}")

    @classmethod
    def from_rpc(cls, error: grpc.RpcError) -> "PicoError":
        """Read the status and its details off the exception of a sync or asyncio call."""
        call = cast(_FailedCall, error)
        trailing = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
        found = cls(call.code(), call.details() or "", request_id=trailing.get("x-request-id", ""))
        status = _rich_status(call)
        return found if status is None else found._with_details(status)

    def _with_details(self, status: status_pb2.Status) -> "PicoError":
        info, bad_request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        retry_after = None
        for detail in status.details:
            if detail.Unpack(retry):
                retry_after = retry.retry_delay.ToTimedelta().total_seconds()
            elif not detail.Unpack(info):
                detail.Unpack(bad_request)
        return PicoError(
            self.code,
            self.message,
            reason=info.reason,
            metadata=dict(info.metadata),
            violations=tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
            retry_after=retry_after,
            request_id=self.request_id,
        )


@contextmanager
def translated() -> Iterator[None]:
    """Turn every gRPC error that leaves the block into a `PicoError`."""
    try:
        yield
    except grpc.RpcError as error:
        raise PicoError.from_rpc(error) from error


class _FailedCall(Protocol):
    """What the exceptions of sync and asyncio calls have in common."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None: ...


def _rich_status(call: _FailedCall) -> status_pb2.Status | None:
    try:
        return cast("status_pb2.Status | None", rpc_status.from_call(call))
    except ValueError:  # details of another status than the call's, as proxies make them
        return None
