"""Requests that are more than a message without fields, built alike for the sync and the asyncio client."""

from collections.abc import Sequence

from clients.spec import Message, Seconds, to_chat, to_duration
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.inference.v1 import inference_pb2 as pb


def tokenize_request(text: str | Sequence[Message], add_special_tokens: bool | None, model: str) -> pb.TokenizeRequest:
    if isinstance(text, str):
        return pb.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
    return pb.TokenizeRequest(model=model, chat=to_chat(text), add_special_tokens=add_special_tokens)


def drain_request(lame_duck: Seconds | None, drain_timeout: Seconds | None, reason: str) -> admin.DrainRequest:
    return admin.DrainRequest(lame_duck=to_duration(lame_duck), timeout=to_duration(drain_timeout), reason=reason)


def shutdown_request(drain_timeout: Seconds | None, immediate: bool) -> admin.ShutdownRequest:
    return admin.ShutdownRequest(
        timeout=to_duration(drain_timeout), immediate=immediate, scope=admin.SHUTDOWN_SCOPE_INSTANCE
    )


def cancel_request(ids: Sequence[str] | None) -> admin.CancelRequestsRequest:
    if ids is None:
        return admin.CancelRequestsRequest(all=True)
    return admin.CancelRequestsRequest(ids=admin.RequestIds(ids=ids))


def log_level_request(logger: str, level: admin.LogLevel, ttl: Seconds | None) -> admin.SetLogLevelRequest:
    return admin.SetLogLevelRequest(logger=logger, level=level, ttl=to_duration(ttl))
