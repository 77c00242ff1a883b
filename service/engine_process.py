"""The engine process: loads the model, then turns commands into engine calls and steps into records.

One loop, one thread beside it (the outbox). The loop sleeps no longer than to the engine's nearest deadline.
"""

import logging
import select
import socket
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import EngineError, ExceedsKVCapacity, InvalidRequest, PromptTooLong
from engine.outputs import EngineLoad, RequestDone, RequestSummary, StepOutput
from engine.sampling_params import SamplingParams
from service import wire
from service.log import set_up_logging
from service.outbox import Outbox
from service.process import ExitCode, bind_life_to_parent
from service.served_model import EngineModelInfo, ServedModel

log = logging.getLogger(__name__)
IDLE_WAKE = 1.0
SWITCH_INTERVAL = 2e-4  # s; the default of 5 ms lets the writer thread stall a 1 ms step
_RECEIVE_BYTES = 1 << 20


class EngineLike(Protocol):
    """What this loop needs of `engine.engine.Engine`; tests serve a fake."""

    @property
    def num_steps(self) -> int: ...
    @property
    def info(self) -> EngineModelInfo: ...
    def add(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, priority: int, tenant: str,
        arrival: float | None, deadline: float | None, queue_deadline: float | None, max_duration: float | None,
    ) -> None: ...
    def cancel(self, request_id: str, message: str = "") -> bool: ...
    def finish_output(self, request_id: str, output_index: int, token_count: int) -> None: ...
    def step(self) -> StepOutput: ...
    def has_work(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def load(self) -> EngineLoad: ...
    def list_requests(self) -> list[RequestSummary]: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig], EngineLike]


def real_engine(config: EngineConfig) -> EngineLike:
    """Imported here: torch must not be loaded by whoever imports this module."""
    from engine.engine import Engine

    return Engine(config)


@dataclass(frozen=True, slots=True)
class EngineProcessOptions:
    config: EngineConfig
    log_level: str
    factory: EngineFactory = real_engine


def engine_main(options: EngineProcessOptions, front: socket.socket, supervisor: Connection) -> None:
    """Entry point of the process. Exit codes: 0 the front left, 2 the model cannot be served, 1 anything else."""
    bind_life_to_parent()
    set_up_logging(options.log_level, "engine")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        engine = options.factory(options.config)
        server = EngineServer(engine, front)
        server.warm_up()
    except EngineError as error:
        supervisor.send(str(error))
        sys.exit(ExitCode.UNUSABLE)
    server.serve()


class EngineServer:
    """Serves one engine to one front."""

    def __init__(self, engine: EngineLike, front: socket.socket) -> None:
        self._engine = engine
        self._front = front
        self._frames = wire.FrameReader()
        self._serial_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._outbox = Outbox(front, self._serial_of.get)

    def warm_up(self) -> None:
        """One small request through the whole engine, before anybody is served."""
        self._outbox.notify(wire.Loading("warming up"))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self._engine.add(
            "warm-up", [0, 0, 0, 0], params, priority=0, tenant="", arrival=None, deadline=None, queue_deadline=None,
            max_duration=None,
        )
        done: RequestDone | None = None
        while self._engine.has_work():
            events = self._engine.step().events
            done = next((event for event in events if isinstance(event, RequestDone)), done)
        if done is None or done.error is not None:
            raise EngineError(f"the warm-up request failed: {done.message if done else 'it never ended'}")
        self._outbox.notify(wire.Ready(ServedModel.of(self._engine.info)))

    def serve(self) -> None:
        """Runs until the front leaves."""
        engine = self._engine
        while self._receive(self._wait_time()):
            if engine.has_work() or self._deadline_passed():
                events = engine.step().events
                self._outbox.post(events, engine.num_steps, engine.load)
                for event in events:
                    if isinstance(event, RequestDone):
                        self._forget(event.request_id)
        log.info("the front left; stopping")
        self._outbox.close()
        engine.close()

    def _wait_time(self) -> float:
        if self._engine.has_work():
            return 0.0
        deadline = self._engine.next_deadline()
        return IDLE_WAKE if deadline is None else min(max(deadline - time.monotonic(), 0.0), IDLE_WAKE)

    def _deadline_passed(self) -> bool:
        deadline = self._engine.next_deadline()
        return deadline is not None and deadline <= time.monotonic()

    def _receive(self, timeout: float) -> bool:
        """Handles every command that is here; waits at most ``timeout`` for the first. False = the front is gone."""
        while select.select([self._front], [], [], timeout)[0]:
            try:
                data = self._front.recv(_RECEIVE_BYTES)
            except ConnectionResetError:
                return False
            if not data:
                return False
            for command in self._frames.feed(data):
                self._handle(command)
            timeout = 0.0
        return True

    def _handle(self, command: wire.Command) -> None:
        match command:
            case wire.Submit():
                self._submit(command)
            case wire.Cancel(serial, message):
                if (engine_id := self._id_of.get(serial)) is not None:
                    self._engine.cancel(engine_id, message)
            case wire.FinishOutput(serial, index, count):
                if (engine_id := self._id_of.get(serial)) is not None:
                    self._engine.finish_output(engine_id, index, count)
            case wire.Query():
                self._answer(command)
            case wire.SetLevel(logger, level):
                logging.getLogger(logger).setLevel(level)

    def _submit(self, submit: wire.Submit) -> None:
        prompt = array("I")
        prompt.frombytes(submit.prompt)
        try:
            self._engine.add(
                submit.engine_id, prompt.tolist(), submit.params, priority=submit.priority, tenant=submit.tenant,
                arrival=submit.arrival, deadline=submit.deadline, queue_deadline=submit.queue_deadline,
                max_duration=submit.max_duration,
            )
        except EngineError as error:
            self._outbox.notify(wire.Refused(submit.serial, type(error).__name__, _arguments(error)))
            return
        self._serial_of[submit.engine_id] = submit.serial
        self._id_of[submit.serial] = submit.engine_id

    def _answer(self, query: wire.Query) -> None:
        if query.what == "load":
            self._outbox.notify(wire.LoadReport(query.call, self._engine.load()))
            return
        known = [r for r in self._engine.list_requests() if r.request_id in self._serial_of]
        serials = tuple(self._serial_of[request.request_id] for request in known)
        self._outbox.notify(wire.RequestList(query.call, serials, tuple(known)))

    def _forget(self, engine_id: str) -> None:
        serial = self._serial_of.pop(engine_id, None)
        if serial is not None:
            del self._id_of[serial]


def _arguments(error: EngineError) -> tuple[object, ...]:
    """What rebuilds the error on the other side."""
    match error:
        case InvalidRequest():
            return (error.violations,)
        case PromptTooLong() | ExceedsKVCapacity():
            return (error.requested, error.limit)
    return (str(error),)
