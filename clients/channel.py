"""Channels as this client opens them: balanced, health-checked, retrying. See service_config.json."""

from pathlib import Path

import grpc

SERVICE_CONFIG = (Path(__file__).parent / "service_config.json").read_text(encoding="utf-8")

ChannelOptions = list[tuple[str, str | int]]

INFERENCE_OPTIONS: ChannelOptions = [
    ("grpc.service_config", SERVICE_CONFIG),
    # The published configuration is ours to use; one from DNS is not looked for.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 1),
    # A connection that lost its peer is noticed within 40 s, also while a stream is silent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# The admin listener is one instance: not balanced, not health-checked (it answers while draining), and no call of
# it is repeated behind the operator's back.
ADMIN_OPTIONS: ChannelOptions = [("grpc.enable_retries", 0), ("grpc.service_config_disable_resolution", 1)]


def open_channel(address: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """``address`` is any gRPC target, such as ``127.0.0.1:50051`` or ``unix:/run/picovllm.sock``."""
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(
    address: str, options: ChannelOptions, credentials: grpc.ChannelCredentials | None
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
