"""The wire between front and engine: what is packed comes out, and the outbox merges instead of blocking."""

import pickle
import socket
import threading
import time
from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import (
    EngineLoad,
    Event,
    FinishReason,
    OutputFinished,
    RequestDone,
    Started,
    Timings,
    TokenLogprob,
    TokenOutput,
    Usage,
)
from engine.sampling_params import SamplingParams
from service import wire
from service.logprob_block import LogprobBlock
from service.outbox import Outbox

LOAD = EngineLoad(0, 0, 0, 0, 0, 10, 0.0, 0, 0.0, 0, 0, 0, 0)
LOGPROB = TokenLogprob(5, -0.5, 1, (TokenLogprob(6, None, None),))
NOTHING = TokenLogprob(9, None, None)
DONE = RequestDone("a~1", Usage(3, 0, (2, 2), 0), Timings(0.0, 1.0, 2.0, 3.0))


def block_of(*entries: TokenLogprob) -> LogprobBlock:
    block = LogprobBlock()
    for entry in entries:
        block.append(entry)
    return block


def read_frame(sock: socket.socket) -> wire.Record:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += sock.recv(size - len(data))
        return data

    rows, side = wire.frame_sizes(exactly(wire.HEADER_BYTES))
    return wire.unpack_record(exactly(rows), exactly(side))


@given(st.dictionaries(
    st.integers(1, 2**63), st.dictionaries(st.integers(0, 15), st.lists(st.integers(0, 2**32 - 1), min_size=1)),
    max_size=5,
))
def test_tokens_survive_packing(tokens: dict[int, dict[int, list[int]]]) -> None:
    updates = [wire.Update(serial, tokens=outputs) for serial, outputs in tokens.items()]
    frame = wire.pack_record(wire.Record(7, 1.5, updates))
    rows, _ = wire.frame_sizes(frame[: wire.HEADER_BYTES])
    split = wire.HEADER_BYTES + rows
    record = wire.unpack_record(frame[wire.HEADER_BYTES : split], frame[split:])
    assert (record.steps, record.step_time) == (7, 1.5)
    assert {update.serial: update.tokens for update in record.updates} == {s: t for s, t in tokens.items() if t}


def test_everything_else_survives_packing() -> None:
    update = wire.Update(
        9, Started("a~1", 1.0, 3, 0, 42, 2), block_of(NOTHING, LOGPROB), {0: [5]}, {0: block_of(LOGPROB)},
        [OutputFinished("a~1", 0, FinishReason.STOP, 1, 5, True)], DONE,
    )
    frame = wire.pack_record(wire.Record(1, 0.0, [update], LOAD, [wire.Loading("x")]))
    rows, _ = wire.frame_sizes(frame[: wire.HEADER_BYTES])
    split = wire.HEADER_BYTES + rows
    record = wire.unpack_record(frame[wire.HEADER_BYTES : split], frame[split:])
    assert record == wire.Record(1, 0.0, [update], LOAD, [wire.Loading("x")])


@given(st.lists(st.integers(1, 40), max_size=60))
def test_commands_come_out_of_any_stream_of_pieces(sizes: list[int]) -> None:
    commands: list[wire.Command] = [
        wire.Submit(1, "a", array("I", range(50)).tobytes(), SamplingParams(), 0, "", 0.0, None, None, None),
        wire.Cancel(1, "why"), wire.FinishOutput(1, 2, 3), wire.Query(4, "load"), wire.FlushCache(5),
        wire.SetLevel("", 10),
    ]
    data = b"".join(map(wire.pack_command, commands))
    reader, found = wire.FrameReader(), []
    for size in [*sizes, len(data)]:
        found += list(reader.feed(data[:size]))
        data = data[size:]
    assert found == commands


def test_the_outbox_keeps_the_order_of_each_request() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    outbox.post([(1, Started("a~1", 0.0, 3, 0, 1, 2)), (1, TokenOutput("a~1", 0, 5, LOGPROB))], 1, lambda: LOAD)
    outbox.post(
        [(2, TokenOutput("b~2", 1, 6, None)), (1, TokenOutput("a~1", 0, 7, LOGPROB)), (1, DONE)], 2, lambda: LOAD
    )
    outbox.notify(wire.Loading("later"))
    outbox.close()
    theirs.settimeout(5)
    tokens: dict[int, dict[int, list[int]]] = {}
    done = False
    while True:
        record = read_frame(theirs)
        for update in record.updates:
            assert not (done and update.serial == 1)
            done = done or update.done is not None
            for index, new in update.tokens.items():
                tokens.setdefault(update.serial, {}).setdefault(index, []).extend(new)
        if record.notices:
            break
    assert tokens == {1: {0: [5, 7]}, 2: {1: [6]}}
    assert done
    ours.close()
    theirs.close()


def test_the_outbox_never_blocks_and_merges_for_a_front_that_lags() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(ours)
    slowest = 0.0
    for step in range(20_000):
        events: list[tuple[int, Event]] = [(request, TokenOutput("a", 0, step, None)) for request in range(8)]
        begin = time.perf_counter()
        outbox.post(events, step, lambda: LOAD)
        slowest = max(slowest, time.perf_counter() - begin)
    assert slowest < 0.2
    tokens: dict[int, list[int]] = {request: [] for request in range(8)}
    frames = 0
    theirs.settimeout(5)
    while len(tokens[7]) < 20_000:
        record = read_frame(theirs)
        frames += 1
        for update in record.updates:
            tokens[update.serial] += update.tokens[0]
    assert all(found == list(range(20_000)) for found in tokens.values())
    assert frames < 5000, "many steps in one record"
    outbox.close()
    ours.close()
    theirs.close()


def test_the_outbox_ends_when_the_front_is_gone() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    theirs.close()
    outbox.post([(1, TokenOutput("1", 0, 5, None))], 1, lambda: LOAD)
    begin = time.monotonic()
    outbox.close()
    assert time.monotonic() - begin < 1
    assert not any(thread.name == "outbox" and thread.is_alive() for thread in threading.enumerate())
    ours.close()


def test_logprobs_survive_packing() -> None:
    block = block_of(NOTHING, LOGPROB)
    assert len(block) == 2
    assert list(block.entries()) == [[(9, None, None)], [(5, -0.5, 1), (6, None, None)]]
    many = block_of(*[TokenLogprob(5, -1.0, 1, (LOGPROB,) * 20)] * 1000)
    assert len(pickle.dumps(many, protocol=5)) < 1000 * 21 * 12 + 2000


def test_events_are_small_on_the_wire() -> None:
    """64 requests with one token each: 16 bytes a row and little else."""
    updates = [wire.Update(serial, tokens={0: [serial]}) for serial in range(64)]
    assert len(wire.pack_record(wire.Record(1, 0.0, updates))) < 64 * 16 + 100
    assert len(pickle.dumps(LOAD)) < 400
