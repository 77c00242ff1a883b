"""The supervisor: spawns engine and front, watches them, owns the signals and the exit code. No gRPC, no torch.

SIGTERM, SIGINT or SIGHUP once: the front drains and ends, then the engine. A second one: at once. The children ignore
these signals, so that one sent to the whole process group works, and die with the supervisor.
"""

import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from service.engine_process import EngineProcessOptions, engine_main
from service.front_ready import FrontDraining, FrontProcessOptions, FrontReady
from service.options import ServeOptions
from service.process import ExitCode

log = logging.getLogger(__name__)
_STOP_MARGIN = 15.0  # s beyond the end of the drain until a front that does not end is killed
_IMMEDIATE_MARGIN = 5.0
_CHILD_EXIT_WAIT = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal was closed
_SPIN_COUNT = "3000"
_ONE_SIGNAL = 0.2  # s: what comes sooner after the first is the same one, sent to us and to our group


def _front_main(options: FrontProcessOptions, engine: socket.socket, supervisor: Connection) -> None:
    """Imports gRPC in the child only, and after the spawn; its own lines on stderr only if somebody asks for them."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from service.front import front_main

    front_main(options, engine, supervisor)


@dataclass(frozen=True, slots=True)
class _Child:
    process: SpawnProcess
    pipe: Connection


class Supervisor:
    """One instance. `run` returns its exit code."""

    def __init__(self, options: ServeOptions, engine: EngineProcessOptions) -> None:
        self._options = options
        self._engine_options = engine
        self._context: SpawnContext = multiprocessing.get_context("spawn")
        self._children: list[_Child] = []
        self._signals_seen = 0
        self._first_signal_at: float | None = None
        self._kill_at = float("inf")
        self._announced = False
        self._failure_told = False

    def run(self) -> ExitCode:
        wake, wake_end = socket.socketpair()
        wake.setblocking(False)
        wake_end.setblocking(False)
        signal.set_wakeup_fd(wake_end.fileno())
        for number in _SIGNALS:
            signal.signal(number, _noted)
        _shorten_openmp_spin()
        try:
            front_end, engine_end = socket.socketpair()
            engine = self._start("engine", engine_main, self._engine_options, engine_end)
            front_options = FrontProcessOptions(self._options, engine.process.pid or 0)
            front = self._start("front", _front_main, front_options, front_end)
            return self._watch(engine, front, wake)
        finally:
            self._end_children()
            signal.set_wakeup_fd(-1)
            wake.close()
            wake_end.close()
            self._remove_ready_file()

    def _start(self, name: str, target: Callable[..., None], options: object, peer: socket.socket) -> _Child:
        """Our copies of what the child inherits are closed: an end of file then means that the other side is gone."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(options, peer, theirs), name=f"picovllm-{name}")
        process.start()
        peer.close()
        theirs.close()
        child = _Child(process, ours)
        self._children.append(child)
        return child

    def _watch(self, engine: _Child, front: _Child, wake: socket.socket) -> ExitCode:
        """Until one child has ended; the exit code follows from which and how."""
        pipes = [engine.pipe, front.pipe]
        while True:
            timeout = None if self._kill_at == float("inf") else max(self._kill_at - time.monotonic(), 0.0)
            ready = wait([wake, engine.process.sentinel, front.process.sentinel, *pipes], timeout)
            pipes = [pipe for pipe in pipes if pipe not in ready or self._read(pipe)]
            if wake in ready:
                self._on_signals(wake, front)
            if front.process.sentinel in ready or engine.process.sentinel in ready:
                return self._ended(engine, front)
            if time.monotonic() >= self._kill_at:
                log.error("the front did not end in time; killing it")
                return ExitCode.FAILED

    def _read(self, pipe: Connection) -> bool:
        """A child's message: an error that stops the start, or that the front is ready. False at its end."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return False
        if isinstance(message, FrontReady):
            self._announce(message)
        elif isinstance(message, FrontDraining):  # it may be a longer one, asked for by an administrator
            if self._signals_seen == 1:
                self._kill_at = time.monotonic() + message.seconds + _STOP_MARGIN
        elif not self._failure_told:  # one line: engine and front may both miss something in a bad directory
            self._failure_told = True
            print(f"picovllm-serve: {message}", file=sys.stderr, flush=True)
        return True

    def _on_signals(self, wake: socket.socket, front: _Child) -> None:
        for number in wake.recv(64):
            now = time.monotonic()
            echo = self._first_signal_at is not None and now - self._first_signal_at < _ONE_SIGNAL
            if number not in _SIGNALS or echo:
                continue
            self._signals_seen += 1
            first = self._signals_seen == 1
            self._first_signal_at = self._first_signal_at or now
            log.info("%s: %s", signal.Signals(number).name, "draining" if first else "stopping at once")
            budget = self._options.lame_duck + self._options.drain_timeout + _STOP_MARGIN
            self._kill_at = time.monotonic() + (budget if first else _IMMEDIATE_MARGIN)
            try:
                front.pipe.send("drain" if first else "stop")
            except OSError:
                log.info("the front is gone already")

    def _ended(self, engine: _Child, front: _Child) -> ExitCode:
        """One of them has ended. The front then notices and tells its clients: it gets the time for that."""
        front.process.join(_CHILD_EXIT_WAIT)
        if front.process.exitcode != ExitCode.OK:
            engine.process.join(_CHILD_EXIT_WAIT if front.process.exitcode == ExitCode.FAILED else 0)
        self._drain_messages(front.pipe)
        self._drain_messages(engine.pipe)
        codes = front.process.exitcode, engine.process.exitcode
        if ExitCode.UNUSABLE in codes:
            return ExitCode.UNUSABLE
        if front.process.exitcode == ExitCode.OK:
            return ExitCode.OK
        log.error("the front ended with code %s, the engine with code %s", *codes)
        return ExitCode.FAILED

    def _drain_messages(self, pipe: Connection) -> None:
        try:
            while pipe.poll() and self._read(pipe):
                pass
        except OSError:
            log.debug("the pipe of a child is broken")

    def _announce(self, ready: FrontReady) -> None:
        """What is served and where, for people on stdout and for programs in the ready file."""
        self._announced = True
        model, limits = ready.model, ready.model.limits
        tokens = limits.num_blocks * limits.block_size
        print(
            f"{self._options.served_model_name}: {model.architecture}, {model.dtype} on {model.device}, "
            f"context {limits.max_model_len} tokens\n"
            f"KV cache: {limits.num_blocks} blocks of {limits.block_size} tokens = {tokens} tokens; "
            f"at most {limits.max_num_seqs} outputs at once\n"
            f"inference on {ready.inference}, administration on {ready.admin}",
            flush=True,
        )
        if self._options.ready_file is not None:
            content = {"inference": ready.inference, "admin": ready.admin, "pid": os.getpid()}
            path = Path(self._options.ready_file)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(json.dumps(content) + "\n")
            partial.replace(path)

    def _remove_ready_file(self) -> None:
        if self._options.ready_file is not None:
            Path(self._options.ready_file).unlink(missing_ok=True)

    def _end_children(self) -> None:
        """Front first; then a running engine ends by itself. One that is loading, or does not end, is killed."""
        for child in reversed(self._children):
            is_engine = child is self._children[0]
            if is_engine and self._announced:
                child.process.join(_CHILD_EXIT_WAIT)
            if child.process.is_alive():
                child.process.kill()
            child.process.join()


def _shorten_openmp_spin() -> None:
    """The engine's idle OpenMP threads sleep soon, instead of spinning for milliseconds on cores others need.

    Inherited by the children. With two other busy processes on two cores, decoding fell from 42 to 1-2 tokens/s
    without it and to 18 with it; alone it costs up to 4 % (docs/decisions.md). Whoever set a policy keeps it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def _noted(number: int, frame: object) -> None:
    """The wake-up descriptor has the signal; this handler only keeps the default action away."""
