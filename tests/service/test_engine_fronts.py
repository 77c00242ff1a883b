"""The engine process with several fronts: rows go to their owner, ids are unique, a front's end frees its own."""

import socket
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine.config import EngineConfig
from engine.outputs import FailReason
from engine.sampling_params import SamplingParams
from service import wire
from service.engine_process import EngineServer
from tests.service.fake_engine import HANG_TOKEN, FakeEngine
from tests.service.test_wire import read_frame


@dataclass
class Front:
    """A front's end of the wire, by hand."""

    index: int
    socket: socket.socket
    records: list[wire.Record] = field(default_factory=list)

    def submit(
        self, number: int, request_id: str, *, max_tokens: int = 3, takeover: bool = False, token: int | None = None
    ) -> int:
        """Its tokens are all ``token``, or 50 and the front's number."""
        serial = wire.first_serial(self.index) + number
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        prompt = array("I", [50 + self.index if token is None else token]).tobytes()
        submit = wire.Submit(serial, request_id, prompt, params, 0, "", 0.0, None, None, None, takeover)
        self.socket.sendall(wire.pack_command(submit))
        return serial

    def cancel(self, serial: int) -> None:
        self.socket.sendall(wire.pack_command(wire.Cancel(serial, "no more")))

    def wait_done(self, serial: int) -> wire.Update:
        """All that came of a request, until it ended."""
        whole = wire.Update(serial)
        while whole.done is None:
            for update in self._read().updates:
                if update.serial == serial:
                    for index, tokens in update.tokens.items():
                        whole.tokens.setdefault(index, []).extend(tokens)
                    whole.started, whole.done = update.started or whole.started, update.done
        return whole

    def wait_started(self, *serials: int) -> None:
        left = set(serials)
        while left:
            left -= {update.serial for update in self._read().updates if update.started}

    def wait_refused(self) -> wire.Refused:
        while True:
            for notice in self._read().notices:
                if isinstance(notice, wire.Refused):
                    return notice

    def requests(self) -> tuple[int, ...]:
        self.socket.sendall(wire.pack_command(wire.Query(1, "requests")))
        while True:
            for notice in self._read().notices:
                if isinstance(notice, wire.RequestList):
                    return notice.serials

    def _read(self) -> wire.Record:
        record = read_frame(self.socket)
        self.records.append(record)
        return record


@dataclass
class Stage:
    fronts: list[Front]
    engine: FakeEngine
    serve: threading.Thread

    def begin(self) -> None:
        self.serve.start()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """An engine server that is not running yet, and three fronts."""
    pairs = [socket.socketpair() for _ in range(3)]
    engine = FakeEngine(EngineConfig(model="", max_num_seqs=8))
    server = EngineServer(engine, [theirs for _, theirs in pairs])
    fronts = [Front(index, ours) for index, (ours, _) in enumerate(pairs)]
    for front in fronts:
        front.socket.settimeout(10)
    thread = threading.Thread(target=server.serve)
    yield Stage(fronts, engine, thread)
    for front in reversed(fronts):
        front.socket.close()
    thread.join(10)
    assert not thread.is_alive(), "it ends when the control front leaves"
    assert not any(thread.name == "outbox" for thread in threading.enumerate())
    for _, theirs in pairs:
        theirs.close()


def test_each_front_gets_its_own_rows_and_no_others(stage: Stage) -> None:
    stage.begin()
    serials = [front.submit(0, f"id-{front.index}", max_tokens=20) for front in stage.fronts]
    for front, serial in zip(stage.fronts, serials, strict=True):
        whole = front.wait_done(serial)
        assert whole.tokens == {0: [50 + front.index] * 20}
        assert {update.serial for record in front.records for update in record.updates} == {serial}


def test_an_id_is_unique_over_all_fronts(stage: Stage) -> None:
    first, second, third = stage.fronts
    stage.begin()
    serial = second.submit(0, "same", max_tokens=5000)
    second.wait_started(serial)
    other = third.submit(0, "same")
    refused = third.wait_refused()
    assert (refused.serial, refused.error, refused.arguments) == (other, "DuplicateRequest", ("request same is alive",))
    assert first.requests() == (serial,)
    second.cancel(serial)
    assert second.wait_done(serial).done is not None
    assert third.wait_done(third.submit(1, "same")).tokens == {0: [52] * 3}
    assert first.wait_done(first.submit(0, "same")).tokens == {0: [50] * 3}, "its end by itself frees it, too"


def test_of_two_at_once_one_runs(stage: Stage) -> None:
    _, second, third = stage.fronts
    blocker = second.submit(0, "same", max_tokens=50)
    other = third.submit(0, "same", max_tokens=50)
    stage.begin()
    assert second.wait_done(blocker).tokens == {0: [51] * 50}
    assert third.wait_refused().serial == other


@pytest.mark.parametrize("canceller", [1, 2])
def test_a_cancel_that_came_before_counts_whatever_front_is_read_first(stage: Stage, canceller: int) -> None:
    """Front A cancels, its client then sends the id to front B: both are there when the engine next looks."""
    old, new = stage.fronts[canceller], stage.fronts[3 - canceller]
    serial = old.submit(0, "same", max_tokens=5000)
    stage.begin()
    old.wait_started(serial)
    busy = stage.fronts[0].submit(0, "busy", max_tokens=1, token=HANG_TOKEN)
    stage.fronts[0].wait_started(busy)
    time.sleep(0.2)  # the engine is in a step of a second now
    old.cancel(serial)
    again = new.submit(0, "same")
    assert new.wait_done(again).tokens == {0: [50 + new.index] * 3}
    assert not any(record.notices for record in new.records)


def test_a_cancelled_duplicate_is_nobodys(stage: Stage) -> None:
    _, second, third = stage.fronts
    second.submit(0, "same", max_tokens=30)
    third.cancel(third.submit(0, "same"))
    stage.begin()
    second.wait_done(wire.first_serial(1))
    assert third.wait_done(third.submit(1, "other")).done is not None
    assert not any(record.notices for record in third.records)


def test_a_retry_takes_over_from_another_front(stage: Stage) -> None:
    _, second, third = stage.fronts
    stage.begin()
    serial = second.submit(0, "same", max_tokens=5000)
    second.wait_started(serial)
    again = third.submit(0, "same", takeover=True)
    done = second.wait_done(serial).done
    assert done is not None
    assert (done.error, done.message) == (FailReason.CANCELLED, "a retry of this request took over")
    assert third.wait_done(again).tokens == {0: [52] * 3}


def test_a_front_that_leaves_frees_its_requests_only(stage: Stage) -> None:
    first, second, third = stage.fronts
    stage.begin()
    lost = [second.submit(number, f"lost-{number}", max_tokens=8000) for number in range(3)]
    kept = third.submit(0, "kept", max_tokens=100)
    second.wait_started(*lost)
    second.socket.close()
    assert third.wait_done(kept).tokens == {0: [52] * 100}
    assert first.requests() == ()
    assert stage.engine.load().kv_blocks_used == 0
    assert first.wait_done(first.submit(0, "lost-0")).done is not None, "its ids are free"
