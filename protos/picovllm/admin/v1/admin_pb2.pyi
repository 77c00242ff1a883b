import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_SERVING: _ClassVar[InstanceState]
    INSTANCE_STATE_DEGRADED: _ClassVar[InstanceState]
    INSTANCE_STATE_LAME_DUCK: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_STOPPED: _ClassVar[InstanceState]
    INSTANCE_STATE_FAILED: _ClassVar[InstanceState]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL_DECODE: _ClassVar[Role]

class WorkerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_KIND_UNSPECIFIED: _ClassVar[WorkerKind]
    WORKER_KIND_FRONT: _ClassVar[WorkerKind]
    WORKER_KIND_ENGINE: _ClassVar[WorkerKind]

class ShutdownScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHUTDOWN_SCOPE_UNSPECIFIED: _ClassVar[ShutdownScope]
    SHUTDOWN_SCOPE_INSTANCE: _ClassVar[ShutdownScope]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_PREFILLING: _ClassVar[RequestState]
    REQUEST_STATE_DECODING: _ClassVar[RequestState]

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_SERVING: InstanceState
INSTANCE_STATE_DEGRADED: InstanceState
INSTANCE_STATE_LAME_DUCK: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_STOPPED: InstanceState
INSTANCE_STATE_FAILED: InstanceState
ROLE_UNSPECIFIED: Role
ROLE_PREFILL_DECODE: Role
WORKER_KIND_UNSPECIFIED: WorkerKind
WORKER_KIND_FRONT: WorkerKind
WORKER_KIND_ENGINE: WorkerKind
SHUTDOWN_SCOPE_UNSPECIFIED: ShutdownScope
SHUTDOWN_SCOPE_INSTANCE: ShutdownScope
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_PREFILLING: RequestState
REQUEST_STATE_DECODING: RequestState
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel

class Worker(_message.Message):
    __slots__ = ("name", "kind", "pid", "alive")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: WorkerKind
    pid: int
    alive: bool
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[WorkerKind, str]] = ..., pid: _Optional[int] = ..., alive: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("start_time", "deadline_time", "requests_at_start", "requests_left", "requests_cut", "shutdown")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_TIME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_AT_START_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_CUT_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    start_time: _timestamp_pb2.Timestamp
    deadline_time: _timestamp_pb2.Timestamp
    requests_at_start: int
    requests_left: int
    requests_cut: int
    shutdown: bool
    def __init__(self, start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., deadline_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., requests_at_start: _Optional[int] = ..., requests_left: _Optional[int] = ..., requests_cut: _Optional[int] = ..., shutdown: _Optional[bool] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "reason", "epoch", "role", "workers", "start_time", "last_step_time", "drain", "model", "server_version", "effective_config")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    state: InstanceState
    reason: str
    epoch: int
    role: Role
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    start_time: _timestamp_pb2.Timestamp
    last_step_time: _timestamp_pb2.Timestamp
    drain: DrainProgress
    model: str
    server_version: str
    effective_config: _struct_pb2.Struct
    def __init__(self, state: _Optional[_Union[InstanceState, str]] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_step_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., drain: _Optional[_Union[DrainProgress, _Mapping]] = ..., model: _Optional[str] = ..., server_version: _Optional[str] = ..., effective_config: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("queued_requests", "queued_prompt_tokens", "prefilling_requests", "transferring_requests", "decoding_requests", "kv_blocks_used", "kv_blocks_reusable", "kv_blocks_total", "prompt_tokens_per_second", "generated_tokens_per_second", "rate_duration", "oldest_queued_duration")
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DECODING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_REUSABLE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RATE_DURATION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_QUEUED_DURATION_FIELD_NUMBER: _ClassVar[int]
    queued_requests: int
    queued_prompt_tokens: int
    prefilling_requests: int
    transferring_requests: int
    decoding_requests: int
    kv_blocks_used: int
    kv_blocks_reusable: int
    kv_blocks_total: int
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    rate_duration: _duration_pb2.Duration
    oldest_queued_duration: _duration_pb2.Duration
    def __init__(self, queued_requests: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., prefilling_requests: _Optional[int] = ..., transferring_requests: _Optional[int] = ..., decoding_requests: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_reusable: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., prompt_tokens_per_second: _Optional[float] = ..., generated_tokens_per_second: _Optional[float] = ..., rate_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., oldest_queued_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("lame_duck", "timeout", "reason")
    LAME_DUCK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lame_duck: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    reason: str
    def __init__(self, lame_duck: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("timeout", "immediate", "scope")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    IMMEDIATE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    immediate: bool
    scope: ShutdownScope
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., immediate: _Optional[bool] = ..., scope: _Optional[_Union[ShutdownScope, str]] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("request_id", "state", "prompt_tokens", "completion_tokens", "priority", "tenant", "receive_time")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    prompt_tokens: int
    completion_tokens: int
    priority: int
    tenant: str
    receive_time: _timestamp_pb2.Timestamp
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., receive_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ...) -> None: ...

class RequestIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRequestsRequest(_message.Message):
    __slots__ = ("ids", "all")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    ids: RequestIds
    all: bool
    def __init__(self, ids: _Optional[_Union[RequestIds, _Mapping]] = ..., all: _Optional[bool] = ...) -> None: ...

class CancelRequestsResponse(_message.Message):
    __slots__ = ("cancelled_ids", "unknown_ids")
    CANCELLED_IDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    cancelled_ids: _containers.RepeatedScalarFieldContainer[str]
    unknown_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_ids: _Optional[_Iterable[str]] = ..., unknown_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("kv_blocks_freed", "kv_blocks_held")
    KV_BLOCKS_FREED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    kv_blocks_freed: int
    kv_blocks_held: int
    def __init__(self, kv_blocks_freed: _Optional[int] = ..., kv_blocks_held: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("logger", "level", "ttl")
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    logger: str
    level: LogLevel
    ttl: _duration_pb2.Duration
    def __init__(self, logger: _Optional[str] = ..., level: _Optional[_Union[LogLevel, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous_level",)
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: LogLevel
    def __init__(self, previous_level: _Optional[_Union[LogLevel, str]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
