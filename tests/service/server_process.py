"""ServerProcess: a real server in a process of its own, and typed stubs for it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.picovllm.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.picovllm.inference.v1 import inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]


class ServerProcess:
    """Started at construction, serving when it returns. `close` kills what is left."""

    def __init__(self, directory: Path, *options: str, module: str = "service", wait: bool = True) -> None:
        self.ready_file = directory / "ready.json"
        self._log_path = directory / "log.txt"
        command = [
            sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
            "--ready-file", str(self.ready_file), *options,
        ]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        self._channels: list[grpc.Channel] = []
        self.inference_address = self.admin_address = ""
        if wait:
            self.wait_until_ready()

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def channel(self, address: str | None = None) -> grpc.Channel:
        channel = grpc.insecure_channel(address or self.inference_address, options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        return channel

    def stub(self, address: str | None = None) -> Any:
        """A new connection to the inference service."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel(address))

    def wait_log(self, pattern: str, timeout: float = 30) -> str:
        """Until the log matches; the pattern's group."""
        end = time.monotonic() + timeout
        while (match := re.search(pattern, self.log)) is None:
            assert time.monotonic() < end, f"the log has no {pattern}:\n{self.log}"
            time.sleep(0.02)
        return match[1]

    def health(self, service: str = "", address: str | None = None) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel(address))
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)

    def load(self) -> admin_pb2.GetLoadResponse:
        response: admin_pb2.GetLoadResponse = self.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=10)
        return response

    def live_requests(self) -> int:
        """That the engine has."""
        load = self.load()
        return load.queued_requests + load.prefilling_requests + load.decoding_requests

    def status(self) -> admin_pb2.Status:
        status: admin_pb2.Status = self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).status
        return status

    def pid_of(self, name: str) -> int:
        return next(worker.pid for worker in self.status().workers if worker.name == name)

    def front_pids(self) -> list[int]:
        """By the number of the front."""
        fronts = [worker for worker in self.status().workers if worker.kind == admin_pb2.WORKER_KIND_FRONT]
        return [worker.pid for worker in fronts]

    def processes(self) -> list[psutil.Process]:
        """Supervisor and all that it started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30) -> int:
        """The exit code."""
        return self.process.wait(timeout)

    def wait_idle(self, timeout: float = 10) -> admin_pb2.GetLoadResponse:
        """Until no request is live and no block is held; the load then, or at the end of the time."""
        end = time.monotonic() + timeout
        while True:
            load = self.load()
            live = load.queued_requests + load.prefilling_requests + load.decoding_requests
            if (live == 0 and load.kv_blocks_used == 0) or time.monotonic() > end:
                return load
            time.sleep(0.02)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def wait_until_ready(self, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"the server did not start (code {self.process.returncode}):\n{self.log}")
            time.sleep(0.05)
        addresses = json.loads(self.ready_file.read_text())
        assert addresses["pid"] == self.process.pid
        self.inference_address, self.admin_address = addresses["inference"], addresses["admin"]
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel(self.admin_address))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
