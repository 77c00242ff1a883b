"""The engine process: loads the model, then turns commands into engine calls and steps into records.

One loop, one thread beside it per front (its outbox). The loop sleeps no longer than to the engine's nearest deadline.
"""

import gc
import logging
import select
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import DuplicateRequest, EngineError, ExceedsKVCapacity, InvalidRequest, PromptTooLong
from engine.outputs import EngineLoad, Event, RequestDone, RequestSummary, StepOutput
from engine.sampling_params import SamplingParams
from service import wire
from service.engine_fronts import FrontPort, Routes
from service.log import set_up_logging
from service.process import ExitCode, bind_life_to_parent
from service.served_model import EngineModelInfo, ServedModel

log = logging.getLogger(__name__)
IDLE_WAKE = 1.0
SWITCH_INTERVAL = 2e-4  # s; the default of 5 ms lets the writer thread stall a 1 ms step
_RECEIVE_BYTES = 1 << 20
_READ_AT_MOST = 1e-3  # s, between two steps
_COLLECT_AFTER = 50_000  # net new objects


class EngineLike(Protocol):
    """What this loop needs of `engine.engine.Engine`; tests serve a fake."""

    @property
    def num_steps(self) -> int: ...
    @property
    def info(self) -> EngineModelInfo: ...
    def add(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, *, priority: int, tenant: str,
        arrival: float | None, deadline: float | None, queue_deadline: float | None, max_duration: float | None,
        cache_salt: str, bypass_prefix_cache: bool,
    ) -> None: ...
    def cancel(self, request_id: str, message: str = "") -> bool: ...
    def finish_output(self, request_id: str, output_index: int, token_count: int) -> None: ...
    def step(self) -> StepOutput: ...
    def has_work(self) -> bool: ...
    def next_deadline(self) -> float | None: ...
    def load(self) -> EngineLoad: ...
    def flush_cache(self) -> int: ...
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


def engine_main(options: EngineProcessOptions, fronts: Sequence[socket.socket], supervisor: Connection) -> None:
    """Entry point of the process. Exit codes: 0 the control front left, 2 the model cannot be served, 1 else."""
    bind_life_to_parent()
    set_up_logging(options.log_level, "engine")
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        engine = options.factory(options.config)
        server = EngineServer(engine, fronts)
        server.warm_up()
    except EngineError as error:
        supervisor.send(str(error))
        sys.exit(ExitCode.UNUSABLE)
    _quiet_collector()
    server.serve()


def _quiet_collector() -> None:
    """What was loaded is never garbage, and steps make thousands of short-lived objects but no cycles.

    With the default threshold a collection passes in every step of a large batch: 55 us at 256 rows.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


class EngineServer:
    """Serves one engine to the fronts of an instance. The first socket is the control front's: without it, the end."""

    def __init__(self, engine: EngineLike, fronts: Sequence[socket.socket]) -> None:
        self._engine = engine
        self._fronts = [FrontPort(index, sock) for index, sock in enumerate(fronts)]
        self._control = self._fronts[0]
        self._routes = Routes()
        self._undecided: list[tuple[FrontPort, wire.Submit]] = []  # their ids are held by others

    def warm_up(self) -> None:
        """One small request through the whole engine, before anybody is served. The prefix cache sees nothing of it."""
        self._notify_all(wire.Loading("warming up"))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self._engine.add(
            "warm-up", [0, 0, 0, 0], params, priority=0, tenant="", arrival=None, deadline=None, queue_deadline=None,
            max_duration=None, cache_salt="", bypass_prefix_cache=True,
        )
        done: RequestDone | None = None
        while self._engine.has_work():
            events = self._engine.step().events
            done = next((event for event in events if isinstance(event, RequestDone)), done)
        if done is None or done.error is not None:
            raise EngineError(f"the warm-up request failed: {done.message if done else 'it never ended'}")
        self._notify_all(wire.Ready(ServedModel.of(self._engine.info)))

    def serve(self) -> None:
        """Runs until the control front leaves."""
        engine = self._engine
        while self._receive(self._wait_time()):
            if engine.has_work() or self._deadline_passed():
                self._post(engine.step().events)
        log.info("the control front left; stopping")
        for front in self._fronts:
            front.outbox.close()
        engine.close()

    def _post(self, events: Sequence[Event]) -> None:
        """To each front what its requests did. Requests of fronts that are gone have no route any more."""
        of_front: dict[int, list[tuple[int, Event]]] = {front.index: [] for front in self._fronts}
        for event in events:
            if (route := self._routes.of_engine_id(event.request_id)) is not None:
                of_front[route.front.index].append((route.serial, event))
                if isinstance(event, RequestDone):
                    self._routes.remove(event.request_id)
        for front in self._fronts:
            front.outbox.post(of_front[front.index], self._engine.num_steps, self._engine.load)

    def _notify_all(self, notice: wire.Notice) -> None:
        for front in self._fronts:
            front.outbox.notify(notice)

    def _wait_time(self) -> float:
        if self._engine.has_work():
            return 0.0
        deadline = self._engine.next_deadline()
        return IDLE_WAKE if deadline is None else min(max(deadline - time.monotonic(), 0.0), IDLE_WAKE)

    def _deadline_passed(self) -> bool:
        deadline = self._engine.next_deadline()
        return deadline is not None and deadline <= time.monotonic()

    def _receive(self, timeout: float) -> bool:
        """Handles every command that is here; waits at most ``timeout`` for the first. False = the end.

        Fronts that never pause do not keep the engine from its steps: the rest is read after the next one.
        """
        read_until: float | None = None
        while readable := select.select([front.socket for front in self._fronts], [], [], timeout)[0]:
            for front in [front for front in self._fronts if front.socket in readable]:
                if not self._read(front):
                    if front is self._control:
                        return False
                    self._lose(front)
            timeout, now = 0.0, time.monotonic()
            read_until = read_until or now + _READ_AT_MOST
            if now > read_until:
                return True
        self._refuse_duplicates()
        return True

    def _read(self, front: FrontPort) -> bool:
        """Some commands of a front; False when it is gone."""
        try:
            data = front.socket.recv(_RECEIVE_BYTES)
        except ConnectionResetError:
            return False
        for command in front.frames.feed(data):
            self._handle(front, command)
        return bool(data)

    def _lose(self, front: FrontPort) -> None:
        """A front is gone: nobody waits for its requests any more."""
        lost = self._routes.of_front(front)
        self._undecided = [(owner, submit) for owner, submit in self._undecided if owner is not front]
        self._fronts.remove(front)
        for route in lost:
            self._routes.remove(route.engine_id)
            self._engine.cancel(route.engine_id, "the front process ended")
        front.abandon()
        log.log(logging.WARNING if lost else logging.INFO, "front-%d left; %d requests freed", front.index, len(lost))

    def _handle(self, front: FrontPort, command: wire.Command) -> None:
        match command:
            case wire.Submit():
                self._submit(front, command)
            case wire.Cancel(serial, message):
                self._cancel(serial, message)
            case wire.FinishOutput(serial, index, count):
                if (route := self._routes.of_serial(serial)) is not None:
                    self._engine.finish_output(route.engine_id, index, count)
            case wire.Query():
                self._answer(front, command)
            case wire.FlushCache(call):
                freed = self._engine.flush_cache()
                held = self._engine.load().kv_blocks_used
                log.info("prefix cache flushed: %d KV blocks freed, %d held by live requests", freed, held)
                front.outbox.notify(wire.CacheFlushed(call, freed, held))
            case wire.SetLevel(logger, level):
                logging.getLogger(logger).setLevel(level)

    def _submit(self, front: FrontPort, submit: wire.Submit) -> None:
        """A duplicate is refused only when all is read: the cancel of the other may be on its way from its front."""
        holder = self._routes.holder(submit.request_id)
        if holder is not None and not submit.takeover:
            self._undecided.append((front, submit))
        elif self._add(front, submit) and holder is not None:
            self._engine.cancel(holder.engine_id, "a retry of this request took over")

    def _add(self, front: FrontPort, submit: wire.Submit) -> bool:
        """Whether the engine took it; the front is told when not."""
        prompt = array("I")
        prompt.frombytes(submit.prompt)
        try:
            self._engine.add(
                submit.engine_id, prompt.tolist(), submit.params, priority=submit.priority, tenant=submit.tenant,
                arrival=submit.arrival, deadline=submit.deadline, queue_deadline=submit.queue_deadline,
                max_duration=submit.max_duration, cache_salt=submit.cache_salt,
                bypass_prefix_cache=submit.bypass_prefix_cache,
            )
        except EngineError as error:
            front.outbox.notify(wire.Refused(submit.serial, type(error).__name__, _arguments(error)))
            return False
        self._routes.add(front, submit)
        return True

    def _cancel(self, serial: int, message: str) -> None:
        self._undecided = [(front, submit) for front, submit in self._undecided if submit.serial != serial]
        if (route := self._routes.of_serial(serial)) is not None:
            self._routes.free_id(route)
            self._engine.cancel(route.engine_id, message)

    def _refuse_duplicates(self) -> None:
        undecided, self._undecided = self._undecided, []
        for front, submit in undecided:
            if self._routes.holder(submit.request_id) is None:
                self._add(front, submit)
                continue
            error = DuplicateRequest(f"request {submit.request_id} is alive")
            front.outbox.notify(wire.Refused(submit.serial, type(error).__name__, _arguments(error)))

    def _answer(self, front: FrontPort, query: wire.Query) -> None:
        if query.what == "load":
            front.outbox.notify(wire.LoadReport(query.call, self._engine.load()))
            return
        routes = [(self._routes.of_engine_id(request.request_id), request) for request in self._engine.list_requests()]
        known = [(route.serial, request) for route, request in routes if route is not None]
        serials, requests = tuple(serial for serial, _ in known), tuple(request for _, request in known)
        front.outbox.notify(wire.RequestList(query.call, serials, requests))


def _arguments(error: EngineError) -> tuple[object, ...]:
    """What rebuilds the error on the other side."""
    match error:
        case InvalidRequest():
            return (error.violations,)
        case PromptTooLong() | ExceedsKVCapacity():
            return (error.requested, error.limit)
    return (str(error),)
