"""The board: every front sees what all wrote, one at a time decides, and nothing stays of those that die."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from service.board import Board, Counts

SPAWN = multiprocessing.get_context("spawn")


def _add(board: Board, front: int, times: int) -> None:
    """Counts up in its own cell while the sum over all fronts is below a bound."""
    for _ in range(times):
        with board.locked():
            live = board.counts(front).live
            if board.total().live < 1000:
                time.sleep(0)
                board.set_counts(front, Counts(live=live + 1))


def _hold(board: Board, pipe: Connection) -> None:
    with board.locked():
        pipe.send("held")
        time.sleep(60)


def test_counts_of_all_fronts_add_up() -> None:
    board = Board(3)
    board.set_counts(0, Counts(3, 2, 70))
    board.set_counts(2, Counts(5, 1, 4_000_000_000))
    assert board.counts(1) == Counts()
    assert board.counts(2) == Counts(5, 1, 4_000_000_000)
    assert board.total() == Counts(8, 3, 4_000_000_070)
    assert (board.state, board.ready) == (0, False)
    board.set_state(3, True)
    assert (board.state, board.ready) == (3, True)
    board.close()


def test_processes_share_it_and_a_bound_holds_over_them() -> None:
    board = Board(3)
    processes = [SPAWN.Process(target=_add, args=(board, front, 800)) for front in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert board.total().live == 1000, "2400 were wanted"
    board.close()


def test_the_lock_of_a_killed_process_is_free_and_a_stopped_one_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board(1)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_hold, args=(board, theirs))
    process.start()
    assert ours.recv() == "held"
    begin = time.monotonic()
    with board.locked():
        assert 0.05 <= time.monotonic() - begin < 1
    assert "for long" in caplog.text
    caplog.clear()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    with board.locked():
        pass
    assert not caplog.text
    board.close()


def test_it_has_no_name(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    board = Board(8)
    assert set(os.listdir("/dev/shm")) == before[0]
    board.close()
    assert len(os.listdir("/proc/self/fd")) == before[1]
