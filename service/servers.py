"""The two gRPC servers of a front: their services and transport settings."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from protos.picovllm.admin.v1 import admin_pb2_grpc
from protos.picovllm.inference.v1 import inference_pb2_grpc
from service.admin_messages import Workers
from service.admin_servicer import AdminServicer
from service.calls import MAX_REQUEST_SECONDS
from service.drain import Drainer
from service.health import INFERENCE_SERVICE, HealthServicer
from service.inference_servicer import InferenceServicer
from service.model_info import MAX_REQUEST_BYTES
from service.peers import Peers
from service.reflection import add_reflection
from service.request_guard import RequestGuard
from service.runtime import Runtime

ADMIN_SERVICE = "picovllm.admin.v1.AdminService"
HEALTH_SERVICE = "grpc.health.v1.Health"
_COMMON: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Clients may ping every 10 s, with calls and without. Other spellings of these keys are ignored silently.
    ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # We ping, too: a client whose host vanished is noticed and its requests are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
_PUBLIC: tuple[tuple[str, Any], ...] = (
    ("grpc.max_connection_age_ms", 30 * 60 * 1000),
    ("grpc.max_connection_age_grace_ms", int(MAX_REQUEST_SECONDS * 1000)),
)


def inference_server(runtime: Runtime) -> grpc.aio.Server:
    options = (*_COMMON, *_PUBLIC, _so_reuseport(runtime.options.front_processes > 1))
    server = grpc.aio.server(options=options, interceptors=(RequestGuard(runtime.metrics, runtime.gate),))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(runtime), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(runtime.instance), server)
    add_reflection(server, (INFERENCE_SERVICE, HEALTH_SERVICE))
    return server


def admin_server(runtime: Runtime, drainer: Drainer, peers: Peers, workers: Workers) -> grpc.aio.Server:
    options = (*_COMMON, _so_reuseport(False))
    server = grpc.aio.server(options=options, interceptors=(RequestGuard(runtime.metrics, runtime.gate),))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(runtime, drainer, peers, workers), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(runtime.instance), server)
    add_reflection(server, (ADMIN_SERVICE, HEALTH_SERVICE))
    return server


def _so_reuseport(shared: bool) -> tuple[str, int]:
    """Off, so that a second server on the port fails, unless the port is claimed for several fronts: `PortClaim`."""
    return "grpc.so_reuseport", int(shared)
