"""The supervisor: spawns engine and fronts, watches them, owns the signals and the exit code. No gRPC, no torch.

SIGTERM, SIGINT or SIGHUP once: the control front drains and ends all fronts, then the engine ends. A second one: at
once. The children ignore these signals, so that one sent to the whole process group works, and die with the supervisor.
The instance ends with its engine or its control front; without a further front it goes on.
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

from service.board import Board
from service.engine_process import EngineProcessOptions, engine_main
from service.front_ready import FrontDraining, FrontProcessOptions, FrontReady, FrontWiring
from service.options import ServeOptions
from service.process import ExitCode

log = logging.getLogger(__name__)
_STOP_MARGIN = 15.0  # s beyond the end of the drain until a front that does not end is killed
_IMMEDIATE_MARGIN = 5.0
_CHILD_EXIT_WAIT = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal was closed
_SPIN_COUNT = "3000"
_ONE_SIGNAL = 0.2  # s: what comes sooner after the first is the same one, sent to us and to our group


def _front_main(options: FrontProcessOptions, wiring: FrontWiring, supervisor: Connection) -> None:
    """Imports gRPC in the child only, and after the spawn; its own lines on stderr only if somebody asks for them."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from service.front import front_main

    front_main(options, wiring, supervisor)


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
        self._children: list[_Child] = []  # all that were started: the engine, the further fronts, the control front
        self._further: list[_Child] = []  # those that still run
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
            self._start_all()
            return self._watch(wake)
        finally:
            self._end_children()
            signal.set_wakeup_fd(-1)
            wake.close()
            wake_end.close()
            self._remove_ready_file()

    def _start_all(self) -> None:
        """The engine first, the control front last: it gets the others' process ids."""
        count = self._options.front_processes
        board = Board(count)
        to_engine = [socket.socketpair() for _ in range(count)]
        links = [socket.socketpair() for _ in range(count - 1)]
        try:
            self._engine = self._start("engine", engine_main, self._engine_options, [end for _, end in to_engine])
            engine_pid = self._engine.process.pid or 0
            for index, (_, link) in enumerate(links, start=1):
                wiring = FrontWiring(to_engine[index][0], (link,), board)
                options = FrontProcessOptions(self._options, index, engine_pid)
                self._further.append(self._start(options.name, _front_main, options, wiring))
            pids = tuple(child.process.pid or 0 for child in self._further)
            wiring = FrontWiring(to_engine[0][0], tuple(link for link, _ in links), board)
            options = FrontProcessOptions(self._options, 0, engine_pid, pids)
            self._front = self._start(options.name, _front_main, options, wiring)
        finally:  # an end of file then means that the other side is gone
            for pair in (*to_engine, *links):
                for end in pair:
                    end.close()
            board.close()

    def _start(self, name: str, target: Callable[..., None], options: object, inherited: object) -> _Child:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(options, inherited, theirs), name=f"picovllm-{name}")
        process.start()
        theirs.close()
        child = _Child(process, ours)
        self._children.append(child)
        return child

    def _watch(self, wake: socket.socket) -> ExitCode:
        """Until engine or control front has ended; the exit code follows from which and how."""
        pipes = [child.pipe for child in self._children]
        while True:
            timeout = None if self._kill_at == float("inf") else max(self._kill_at - time.monotonic(), 0.0)
            ends = [child.process.sentinel for child in (self._engine, self._front, *self._further)]
            ready = wait([wake, *ends, *pipes], timeout)
            pipes = [pipe for pipe in pipes if pipe not in ready or self._read(pipe)]
            if wake in ready:
                self._on_signals(wake, self._front)
            if self._front.process.sentinel in ready or self._engine.process.sentinel in ready:
                return self._ended(wait_for_engine=True)
            for child in [child for child in self._further if child.process.sentinel in ready]:
                self._further.remove(child)
                if not self._announced:
                    return self._ended(wait_for_engine=False)
                self._lost(child)
            if time.monotonic() >= self._kill_at:
                log.error("the control front did not end in time; killing it")
                self._front.process.kill()
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

    def _lost(self, child: _Child) -> None:
        """A further front has ended, while serving or because all do."""
        child.process.join()
        code = child.process.exitcode
        if code != ExitCode.OK:
            log.error("%s ended with code %s; the instance goes on without it", child.process.name, code)

    def _ended(self, *, wait_for_engine: bool) -> ExitCode:
        """The instance is over. The fronts notice and tell their clients: they get the time for that.

        When the control front failed, it may be because of the engine, which then tells why.
        """
        engine, front = self._engine.process, self._front.process
        front.join(_CHILD_EXIT_WAIT)
        if front.exitcode != ExitCode.OK:
            engine.join(_CHILD_EXIT_WAIT if wait_for_engine and front.exitcode == ExitCode.FAILED else 0)
        for child in self._children:
            self._drain_messages(child.pipe)
        codes = [child.process.exitcode for child in self._children]
        if ExitCode.UNUSABLE in codes:
            return ExitCode.UNUSABLE
        if front.exitcode == ExitCode.OK:
            return ExitCode.OK
        log.error("the control front ended with code %s, the engine with code %s", front.exitcode, engine.exitcode)
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
        """Fronts first; then a running engine ends by itself. One that is loading, or does not end, is killed."""
        end = time.monotonic() + _CHILD_EXIT_WAIT
        for child in reversed(self._children):
            if self._announced and child is not self._front:
                child.process.join(max(end - time.monotonic(), 0.0))
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
