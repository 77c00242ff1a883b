"""A stub per front process: connections are opened until the kernel has given one to each."""

import re
from typing import Any

from protos.picovllm.admin.v1 import admin_pb2
from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.server_process import ServerProcess


def front_calls(server: ServerProcess) -> dict[str, int]:
    """Calls that ended, by the name of the front."""
    text = server.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    return {name: int(count) for name, count in re.findall(r'front_calls_total\{front="([\w-]+)"\} (\d+)', text)}


def front_of(server: ServerProcess, stub: Any) -> str:
    """The front that this connection is with. Nobody else may call meanwhile."""
    before = front_calls(server)
    for _ in range(5):  # the control front also counts the administrator's calls
        stub.GetModelInfo(pb.GetModelInfoRequest())
    after = front_calls(server)
    return max(after, key=lambda name: after[name] - before[name])


def stub_per_front(server: ServerProcess, count: int) -> list[Any]:
    """By the number of the front. Each is a connection of its own."""
    found: dict[str, Any] = {}
    for _ in range(40 * count):
        stub = server.stub()
        found.setdefault(front_of(server, stub), stub)
        if len(found) == count:
            return [found[f"front-{index}"] for index in range(count)]
    raise AssertionError(f"only {sorted(found)} of {count} fronts were reached")
