"""`picovllm chat` in a pseudo terminal, as a person uses it."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.clients.fake_server import WORDS, FakeServer

ANSWER = "".join(WORDS)


class Terminal:
    """A child process on a pseudo terminal."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        # A session leader that opens a terminal owns it: Ctrl-C typed there is a SIGINT here.
        shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave)]
        self.process = subprocess.Popen([*shell, *command], start_new_session=True)
        self._slave = slave
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, timeout: float = 20) -> None:
        """Read until ``text`` has appeared after what was expected before."""
        deadline = time.monotonic() + timeout
        os.set_blocking(self._master, False)
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.seen!r}"
            try:
                self.seen += os.read(self._master, 4096).decode()
            except BlockingIOError:
                time.sleep(0.01)
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(server: FakeServer) -> Iterator[Terminal]:
    chat = Terminal(sys.executable, "-m", "clients", "chat", "--address", server.address, "--system", "Be brief.")
    yield chat
    chat.close()


def test_ctrl_c_cancels_the_answer_and_not_the_program(server: FakeServer, terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.send("forever\n")
    terminal.expect(" and and")
    terminal.send("\x03")
    terminal.expect("(cancelled)")
    assert server.inference.cancelled.wait(5)
    terminal.expect("> ")
    terminal.send("hi\n")
    terminal.expect(ANSWER)
    terminal.expect("> ")
    terminal.send("\x03")  # nothing to cancel: a new line
    terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.process.wait(10) == 0


def test_the_history_is_sent_and_can_be_reset(server: FakeServer, terminal: Terminal) -> None:
    for line in ("one", "two", "/reset", "three"):
        terminal.expect("> ")
        terminal.send(line + "\n")
        if not line.startswith("/"):
            terminal.expect(ANSWER)
    terminal.expect("> ")
    terminal.send("/quit\n")
    assert terminal.process.wait(10) == 0
    chats = [r.spec.chat.messages for r in server.inference.requests if hasattr(r, "spec")]
    assert [[turn.content for turn in turns] for turns in chats] == [
        ["Be brief.", "one"],
        ["Be brief.", "one", ANSWER, "two"],
        ["Be brief.", "three"],
    ]


def test_a_failed_answer_leaves_the_conversation_as_it_was(server: FakeServer) -> None:
    lines = "one\n" + "x" * 20 + "\n"
    server.inference.fail_next = True
    done = subprocess.run(
        [sys.executable, "-m", "clients", "chat", "--address", server.address],
        input=lines, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "error: RESOURCE_EXHAUSTED/QUEUE_FULL" in done.stderr
    assert ANSWER in done.stdout
    last = server.inference.requests[-1].spec.chat.messages
    assert [turn.content for turn in last] == ["x" * 20]
