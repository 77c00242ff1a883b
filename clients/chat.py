"""`picovllm chat`: a conversation in the terminal.

Ctrl-C cancels the answer that is being written, on the server too, and not the program.
"""

import sys

from clients.client import PicoClient
from clients.display import error_lines, timings_line, usage_line
from clients.errors import PicoError
from clients.spec import Message, SpecOptions

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C cancels an answer"


class Chat:
    """The conversation so far, and how to go on with it."""

    def __init__(
        self,
        client: PicoClient,
        options: SpecOptions,
        *,
        system: str | None = None,
        timeout: float | None = None,
        stats: bool = False,
    ) -> None:
        self._client, self._options, self._timeout, self._stats = client, options, timeout, stats
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.history = list(self._opening)

    def run(self) -> None:
        """Read and answer until the input ends or /quit."""
        info = self._client.model_info(model=self._options.get("model", ""))
        print(f"{info.model}, {info.limits.max_context_tokens} tokens of context. {HELP}")
        while (line := _read_line()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                self.history = list(self._opening)
            elif line.startswith("/"):
                print(HELP)
            elif line:
                try:
                    self.ask(line)
                except KeyboardInterrupt:  # a second one, while the first was being handled
                    print()

    def ask(self, question: str) -> None:
        """Print the answer as it comes. An answer that was cut off stays in the history as far as it came."""
        self.history.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            self._print_answer(pieces)
        except KeyboardInterrupt:
            print("\n(cancelled)")
        except PicoError as error:
            print("\n" if pieces else "", *error_lines(error), sep="\n", file=sys.stderr)
        finally:
            if pieces:
                self.history.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.history.pop()

    def _print_answer(self, pieces: list[str]) -> None:
        with self._client.stream(self.history, timeout=self._timeout, **self._options) as stream:
            for piece in stream.texts():
                pieces.append(piece)
                print(piece, end="", flush=True)
        print()
        if self._stats and (done := stream.progress.completed) is not None:
            print(f"[{usage_line(done.usage)}; {timings_line(done.usage, done.timings)}]")


def _read_line() -> str | None:
    """The next line of input, stripped; None at its end. Ctrl-C empties the line."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        return None
