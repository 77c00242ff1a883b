"""`make demo`: start a server with the default model, ask it one question through the client, drain it, end.

Exits 0 when all of that went well, the server's own exit included.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clients.client import AdminClient, PicoClient
from clients.commands import is_drained
from clients.display import timings_line, usage_line
from clients.errors import PicoError

QUESTION = "What is the capital of France?"
START_TIMEOUT, STOP_TIMEOUT = 300.0, 30.0
LOOPBACK = "127.0.0.1:0"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "server.log").open("w+") as log:
        try:
            with server(Path(folder) / "ready.json", log) as (process, addresses):
                ask(addresses["inference"])
                stop(process, addresses["admin"])
        except (DemoError, PicoError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            print(log.read(), f"demo failed: {error}", sep="\n", file=sys.stderr)
            return 1
    return 0


class DemoError(Exception):
    """What went wrong, in one line."""


@contextmanager
def server(ready_file: Path, log: IO[str]) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A server on free loopback ports, with its addresses; killed if it still runs at the end."""
    options = {"model": "smollm2", "device": "cpu", "listen": LOOPBACK, "admin-listen": LOOPBACK}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "service", *arguments, "--ready-file", str(ready_file)]
    print("$ python", *command[1:-2], flush=True)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        begun = time.monotonic()
        addresses = wait_until_ready(process, ready_file)
        print(f"ready after {time.monotonic() - begun:.1f} s on {addresses['inference']}\n", flush=True)
        yield process, addresses
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_TIMEOUT
    while not ready_file.exists():
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise DemoError(f"the server was not ready after {START_TIMEOUT:.0f} s")
        time.sleep(0.05)
    return dict(json.loads(ready_file.read_text(encoding="utf-8")))


def ask(address: str) -> None:
    """Print the answer as it comes, then what it took."""
    print(f"> {QUESTION}")
    with (
        PicoClient(address) as client,
        client.stream([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=64, timeout=120) as stream,
    ):
        for piece in stream.texts():
            print(piece, end="", flush=True)
    print("\n")
    done = stream.progress.completed
    if done is None:
        raise DemoError("the stream ended without `completed`")
    print(usage_line(done.usage), timings_line(done.usage, done.timings), sep="\n", flush=True)


def stop(process: subprocess.Popen[bytes], admin_address: str) -> None:
    """Drain, shut down, and require exit code 0."""
    with AdminClient(admin_address) as admin, admin.watch(timeout=STOP_TIMEOUT) as events:
        watching = iter(events)
        next(watching)
        admin.drain(lame_duck=0, reason="the demo is over", timeout=STOP_TIMEOUT)
        if not any(is_drained(event.status) for event in watching):
            raise DemoError("the server ended its watch before it was drained")
        admin.shutdown(timeout=STOP_TIMEOUT)
    if (code := process.wait(STOP_TIMEOUT)) != 0:
        raise DemoError(f"the server ended with exit code {code}")
    print("server drained, exit code 0")


if __name__ == "__main__":
    sys.exit(main())
