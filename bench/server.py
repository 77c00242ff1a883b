"""A picovllm-serve process for a benchmark, or one that runs already: addresses, processes, CPU time, start time."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from clients.client import AdminClient, PicoClient

START_SECONDS, STOP_SECONDS = 600.0, 60.0
LOOPBACK = "127.0.0.1:0"


@dataclass
class Server:
    """``ready_seconds`` and ``first_token_seconds`` count from the start of the process; None for one found running.

    ``workers``: its processes by name, empty when the admin address of a running server is not known.
    """

    address: str
    vocab_size: int
    workers: dict[str, int]
    ready_seconds: float | None = None
    first_token_seconds: float | None = None

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time that each process has used so far."""
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.workers.items()}
        return {name: used.user + used.system for name, used in times.items()}


def running(address: str, admin_address: str | None) -> Server:
    """A server that somebody else started."""
    return Server(address, _vocab_size(address), _workers(admin_address) if admin_address else {})


@contextmanager
def started(options: list[str], folder: Path) -> Iterator[Server]:
    """A server on free loopback ports, ended with the block; its log is ``folder``/server.log."""
    ready_file, log_path = folder / "ready.json", folder / "server.log"
    ready_file.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "service", "--listen", LOOPBACK, "--admin-listen", LOOPBACK, "--lame-duck", "0",
        "--ready-file", str(ready_file), *options,
    ]  # fmt: skip
    begun = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        addresses = _wait_until_ready(process, ready_file, log_path)
        ready = time.monotonic() - begun
        with PicoClient(addresses["inference"]) as client:
            client.generate([3, 4, 5], max_tokens=1, temperature=0, ignore_eos=True, timeout=START_SECONDS)
        first_token = time.monotonic() - begun
        workers = {"supervisor": process.pid, **_workers(addresses["admin"])}
        yield Server(addresses["inference"], _vocab_size(addresses["inference"]), workers, ready, first_token)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, log_path: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log_path.read_text(errors='replace')[-4000:]}")
        time.sleep(0.02)
    return dict(json.loads(ready_file.read_text(encoding="utf-8")))


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _vocab_size(address: str) -> int:
    with PicoClient(address) as client:
        return client.model_info(timeout=60).limits.vocab_size


def _workers(admin_address: str) -> dict[str, int]:
    with AdminClient(admin_address) as admin:
        return {worker.name: worker.pid for worker in admin.status(timeout=60).workers}
