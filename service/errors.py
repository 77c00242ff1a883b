"""The error table: every reason a call can fail for, its gRPC code, and the google.rpc details it carries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from engine.errors import DuplicateRequest, EngineError, ExceedsKVCapacity, InvalidRequest, Overloaded, PromptTooLong

DOMAIN = "picovllm"
DETAILS_KEY = "grpc-status-details-bin"
MAX_STATUS_BYTES = 4096
_MAX_MESSAGE_BYTES = 1024
_MAX_DESCRIPTION = 200
_MAX_METADATA_VALUE = 200


class Reason(Enum):
    """``ErrorInfo.reason``; the names are part of the contract."""

    FIELD_INVALID = "FIELD_INVALID"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    EXCEEDS_KV_CAPACITY = "EXCEEDS_KV_CAPACITY"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    DRAIN_TIMEOUT = "DRAIN_TIMEOUT"
    WORKER_LOST = "WORKER_LOST"
    DEADLINE_QUEUED = "DEADLINE_QUEUED"
    DEADLINE_PREFILL = "DEADLINE_PREFILL"
    DEADLINE_DECODE = "DEADLINE_DECODE"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    ADMIN_CANCELLED = "ADMIN_CANCELLED"
    ALREADY_DRAINING = "ALREADY_DRAINING"
    NOT_DRAINING = "NOT_DRAINING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    NAN_LOGITS = "NAN_LOGITS"
    BUG = "BUG"


@dataclass(frozen=True, slots=True)
class Row:
    """``retry_after``: seconds for RetryInfo; None = none is sent."""

    code: grpc.StatusCode
    retry_after: float | None = None


TABLE: Mapping[Reason, Row] = {
    Reason.FIELD_INVALID: Row(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.PROMPT_TOO_LONG: Row(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.EXCEEDS_KV_CAPACITY: Row(grpc.StatusCode.INVALID_ARGUMENT),
    Reason.FEATURE_UNSUPPORTED: Row(grpc.StatusCode.UNIMPLEMENTED),
    Reason.MODEL_NOT_FOUND: Row(grpc.StatusCode.NOT_FOUND),
    Reason.DUPLICATE_REQUEST_ID: Row(grpc.StatusCode.ALREADY_EXISTS),
    Reason.QUEUE_FULL: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
    Reason.QUEUE_TIMEOUT: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
    Reason.SLOW_CONSUMER: Row(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=1.0),
    Reason.STARTING: Row(grpc.StatusCode.UNAVAILABLE),
    Reason.DRAINING: Row(grpc.StatusCode.UNAVAILABLE),
    Reason.DRAIN_TIMEOUT: Row(grpc.StatusCode.UNAVAILABLE),
    Reason.WORKER_LOST: Row(grpc.StatusCode.UNAVAILABLE),
    Reason.DEADLINE_QUEUED: Row(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.DEADLINE_PREFILL: Row(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.DEADLINE_DECODE: Row(grpc.StatusCode.DEADLINE_EXCEEDED),
    Reason.CLIENT_CANCELLED: Row(grpc.StatusCode.CANCELLED),
    Reason.ADMIN_CANCELLED: Row(grpc.StatusCode.ABORTED),
    Reason.ALREADY_DRAINING: Row(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.NOT_DRAINING: Row(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.SHUTTING_DOWN: Row(grpc.StatusCode.FAILED_PRECONDITION),
    Reason.NAN_LOGITS: Row(grpc.StatusCode.INTERNAL),
    Reason.BUG: Row(grpc.StatusCode.INTERNAL),
}


class ServiceError(Exception):
    """A call that fails for a stated reason. ``violations`` are (proto path, description) pairs."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        violations: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})

    @property
    def code(self) -> grpc.StatusCode:
        return TABLE[self.reason].code


def field_errors(violations: Sequence[tuple[str, str]]) -> ServiceError:
    """All bad fields of a request as one error."""
    message = "; ".join(f"{path}: {description}" for path, description in violations)
    return ServiceError(Reason.FIELD_INVALID, message, violations=violations)


def from_engine(error: EngineError, path_of: Mapping[str, str]) -> ServiceError:
    """The engine's refusal as a service error; ``path_of`` maps its field names to proto paths."""
    match error:
        case InvalidRequest():
            return field_errors([(path_of.get(field, field), reason) for field, reason in error.violations])
        case PromptTooLong():
            return _over_limit(Reason.PROMPT_TOO_LONG, error)
        case ExceedsKVCapacity():
            return _over_limit(Reason.EXCEEDS_KV_CAPACITY, error)
        case DuplicateRequest():
            return ServiceError(Reason.DUPLICATE_REQUEST_ID, str(error))
        case Overloaded():
            return ServiceError(Reason.QUEUE_FULL, str(error))
    return ServiceError(Reason.BUG, f"unexpected refusal: {type(error).__name__}")


def _over_limit(reason: Reason, error: PromptTooLong | ExceedsKVCapacity) -> ServiceError:
    numbers = {"requested": str(error.requested), "limit": str(error.limit)}
    return ServiceError(reason, str(error), metadata=numbers)


def to_status(error: ServiceError) -> Status:
    """The google.rpc.Status of an error. With the grpc-message header it is at most `MAX_STATUS_BYTES`."""
    row = TABLE[error.reason]
    status = Status(code=row.code.value[0], message=_shorten(error.message, _MAX_MESSAGE_BYTES))
    metadata = {key: value[:_MAX_METADATA_VALUE] for key, value in error.metadata.items()}
    _pack(status, ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata))
    if row.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(int(row.retry_after * 1000))
        _pack(status, RetryInfo(retry_delay=delay))
    if error.violations:
        _pack(status, _bad_request(error.violations, MAX_STATUS_BYTES - status_bytes(status) - 64))
    return status


def status_bytes(status: Status) -> int:
    """What a status takes in the trailers: its details and the percent-encoded message beside them."""
    return int(status.ByteSize()) + len(quote(status.message))


def _bad_request(violations: Sequence[tuple[str, str]], budget: int) -> BadRequest:
    """As many violations as fit; when some do not, the last entry says how many are missing."""
    bad = BadRequest()
    reserve = 48
    for index, (path, description) in enumerate(violations):
        entry = BadRequest.FieldViolation(field=path[:_MAX_DESCRIPTION], description=description[:_MAX_DESCRIPTION])
        if bad.ByteSize() + entry.ByteSize() + 4 > budget - reserve:
            bad.field_violations.add(description=f"and {len(violations) - index} more")
            break
        bad.field_violations.append(entry)
    return bad


def _pack(status: Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _shorten(message: str, limit: int) -> str:
    """The message is sent twice, once percent-encoded: that is the form that must fit."""
    if len(quote(message)) <= limit:
        return message
    low, high = 0, len(message)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(quote(message[:middle])) <= limit - 3 else (low, middle - 1)
    return message[:low] + "..."
