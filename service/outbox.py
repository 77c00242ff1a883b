"""Outbox: the engine loop drops what a step said to one front here; a thread sends it, merged per request.

`post` never blocks on the socket. While the front does not read, records merge: what is kept is bounded by the
tokens of its live requests, since it cannot submit new ones either.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable

from engine.outputs import EngineLoad, Event, OutputFinished, PromptLogprobs, RequestDone, Started, TokenOutput
from service.logprob_block import LogprobBlock
from service.wire import Notice, Record, Update, pack_record

log = logging.getLogger(__name__)
REPORT_INTERVAL = 1.0


class Outbox:
    """One writer thread for one socket.

    The thread ends when the peer is gone or after `close`, which first sends what is left.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._changed = threading.Condition()
        self._updates: dict[int, Update] = {}
        self._notices: list[Notice] = []
        self._load: EngineLoad | None = None
        self._steps, self._step_time = 0, 0.0
        self._report_due = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def post(self, events: Iterable[tuple[int, Event]], steps: int, read_load: Callable[[], EngineLoad]) -> None:
        """The events of one step, each with the serial of its request.

        Also reports the load about once a second, so that a step without events is seen.
        """
        now = time.monotonic()
        load = read_load() if now >= self._report_due else None
        with self._changed:
            for serial, event in events:
                self._merge(serial, event)
            self._steps, self._step_time = steps, now
            if load is not None:
                self._load, self._report_due = load, now + REPORT_INTERVAL
            if self._updates or load is not None:
                self._changed.notify()

    def notify(self, notice: Notice) -> None:
        """A message of its own, after everything posted before."""
        with self._changed:
            self._notices.append(notice)
            self._changed.notify()

    def close(self, timeout: float = 1.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _merge(self, serial: int, event: Event) -> None:
        update = self._updates.get(serial)
        if update is None:
            update = self._updates[serial] = Update(serial)
        match event:
            case TokenOutput(output_index=index):
                update.tokens.setdefault(index, []).append(event.token_id)
                if event.logprob is not None:
                    if (block := update.logprobs.get(index)) is None:
                        block = update.logprobs[index] = LogprobBlock()
                    block.append(event.logprob)
            case Started():
                update.started = event
            case PromptLogprobs():
                update.prompt_logprobs = update.prompt_logprobs or LogprobBlock()
                for entry in event.entries:
                    update.prompt_logprobs.append(entry)
            case OutputFinished():
                update.finished.append(event)
            case RequestDone():
                update.done = event

    def _write(self) -> None:
        try:
            while (record := self._next_record()) is not None:
                self._socket.sendall(pack_record(record))
        except OSError as error:
            log.info("the front is gone: %s", error)

    def _next_record(self) -> Record | None:
        with self._changed:
            while not (self._updates or self._notices or self._load or self._closing):
                self._changed.wait()
            if not (self._updates or self._notices or self._load):
                return None
            record = Record(self._steps, self._step_time, list(self._updates.values()), self._load, self._notices)
            self._updates, self._notices, self._load = {}, [], None
            return record
