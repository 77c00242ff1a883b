"""The error table: one row per reason, details as stated, never larger than clients can take."""

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import (
    DuplicateRequest,
    EngineError,
    ExceedsKVCapacity,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from engine.outputs import FailReason
from service.errors import DOMAIN, MAX_STATUS_BYTES, TABLE, Reason, ServiceError, from_engine, status_bytes, to_status

CODES = grpc.StatusCode
CONTRACT = {
    "FIELD_INVALID": CODES.INVALID_ARGUMENT, "PROMPT_TOO_LONG": CODES.INVALID_ARGUMENT,
    "EXCEEDS_KV_CAPACITY": CODES.INVALID_ARGUMENT, "FEATURE_UNSUPPORTED": CODES.UNIMPLEMENTED,
    "MODEL_NOT_FOUND": CODES.NOT_FOUND, "DUPLICATE_REQUEST_ID": CODES.ALREADY_EXISTS,
    "QUEUE_FULL": CODES.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT": CODES.RESOURCE_EXHAUSTED,
    "SLOW_CONSUMER": CODES.RESOURCE_EXHAUSTED, "STARTING": CODES.UNAVAILABLE, "DRAINING": CODES.UNAVAILABLE,
    "DRAIN_TIMEOUT": CODES.UNAVAILABLE, "WORKER_LOST": CODES.UNAVAILABLE,
    "DEADLINE_QUEUED": CODES.DEADLINE_EXCEEDED, "DEADLINE_PREFILL": CODES.DEADLINE_EXCEEDED,
    "DEADLINE_DECODE": CODES.DEADLINE_EXCEEDED, "CLIENT_CANCELLED": CODES.CANCELLED,
    "ADMIN_CANCELLED": CODES.ABORTED, "ALREADY_DRAINING": CODES.FAILED_PRECONDITION,
    "NOT_DRAINING": CODES.FAILED_PRECONDITION, "SHUTTING_DOWN": CODES.FAILED_PRECONDITION,
    "NAN_LOGITS": CODES.INTERNAL, "BUG": CODES.INTERNAL,
}
WITH_RETRY = {"QUEUE_FULL", "QUEUE_TIMEOUT", "SLOW_CONSUMER"}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_code_and_its_details(reason: Reason) -> None:
    status = to_status(ServiceError(reason, "why", violations=[("spec.x", "bad")], metadata={"limit": "3"}))
    assert status.code == CONTRACT[reason.value].value[0] == TABLE[reason].code.value[0]
    info, retry, bad = ErrorInfo(), RetryInfo(), BadRequest()
    assert [detail.Unpack(info) for detail in status.details].count(True) == 1
    assert (info.reason, info.domain, dict(info.metadata)) == (reason.value, DOMAIN, {"limit": "3"})
    assert any(detail.Unpack(retry) for detail in status.details) == (reason.value in WITH_RETRY)
    assert any(detail.Unpack(bad) for detail in status.details)
    assert [(v.field, v.description) for v in bad.field_violations] == [("spec.x", "bad")]


def test_the_table_is_whole() -> None:
    assert {reason.value for reason in Reason} == CONTRACT.keys()
    assert TABLE.keys() == set(Reason)
    assert {reason.value for reason in FailReason} - {"CANCELLED"} <= CONTRACT.keys()


@given(
    st.text(max_size=6000), st.lists(st.tuples(st.text(max_size=400), st.text(max_size=400)), max_size=60),
    st.dictionaries(st.sampled_from(["requested", "limit"]), st.text(max_size=300)),
)
def test_message_and_details_stay_small(
    message: str, violations: list[tuple[str, str]], metadata: dict[str, str]
) -> None:
    status = to_status(ServiceError(Reason.QUEUE_FULL, message, violations=violations, metadata=metadata))
    assert status_bytes(status) <= MAX_STATUS_BYTES


def test_violations_that_do_not_fit_are_counted() -> None:
    violations = [(f"spec.chat.messages[{i}].role", "must not be empty") for i in range(5000)]
    status = to_status(ServiceError(Reason.FIELD_INVALID, "many", violations=violations))
    bad = BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    shown = len(bad.field_violations) - 1
    assert shown > 30
    assert bad.field_violations[-1].description == f"and {5000 - shown} more"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequest([("top_p", "bad")]), Reason.FIELD_INVALID),
        (PromptTooLong(20, 10), Reason.PROMPT_TOO_LONG),
        (ExceedsKVCapacity(20, 10), Reason.EXCEEDS_KV_CAPACITY),
        (DuplicateRequest("x"), Reason.DUPLICATE_REQUEST_ID),
        (Overloaded("full"), Reason.QUEUE_FULL),
        (EngineError("what"), Reason.BUG),
    ],
)
def test_engine_errors_map_to_reasons(error: EngineError, reason: Reason) -> None:
    mapped = from_engine(error, {"top_p": "spec.sampling.top_p"})
    assert mapped.reason is reason
    if reason is Reason.FIELD_INVALID:
        assert mapped.violations == (("spec.sampling.top_p", "bad"),)
    if reason in (Reason.PROMPT_TOO_LONG, Reason.EXCEEDS_KV_CAPACITY):
        assert mapped.metadata == {"requested": "20", "limit": "10"}
