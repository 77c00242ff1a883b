"""The command `picovllm`.

Exit codes: 0 done, 1 the call failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from clients import commands
from clients.display import error_lines
from clients.errors import PicoError

ADDRESS, ADMIN_ADDRESS = "127.0.0.1:50051", "127.0.0.1:50052"
MAX_SECONDS = 365 * 86_400.0
Command = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not getattr(args, "json", False):
        for name in ("token_ids", "top_logprobs"):
            if getattr(args, name, None) is not None:
                parser.error(f"--{name.replace('_', '-')} needs --json: the plain output has no place for it")
    try:
        args.run(args)
    except PicoError as error:
        print(*error_lines(error), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left; what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="picovllm", description="Talk to a picovllm server.")
    parser.add_argument("--version", action="version", version=f"picovllm {client_version()}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Command, help_text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=help_text, description=help_text, parents=parents)
        command.set_defaults(run=run)
        return command

    _add_inference_commands(add)
    _add_admin_commands(add)
    return parser


def client_version() -> str:
    """As installed; a checkout that was never installed has none."""
    try:
        return version("picovllm")
    except PackageNotFoundError:
        return "(checkout)"


def _number_in(low: int, high: int) -> Callable[[str], int]:
    """What the field on the wire can hold; what it may be is the server's to say."""

    def number(text: str) -> int:
        if not low <= (value := int(text)) <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}, got {text}")
        return value

    return number


whole, seed, priority = _number_in(0, 2**32 - 1), _number_in(0, 2**64 - 1), _number_in(-(2**31), 2**31 - 1)


def seconds(text: str) -> float:
    """A duration as the wire can hold it."""
    if not abs(value := float(text)) <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"is not a number of seconds: {text}")
    return value


def _add_inference_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    server, sampling = _inference_parent(), _sampling_parent()
    chat = add("chat", commands.chat, "Hold a conversation; Ctrl-C cancels an answer.", server, sampling)
    chat.add_argument("--system", metavar="TEXT", help="the system message")

    generate = add("generate", commands.generate, "Continue a text, or answer one message.", server, sampling)
    generate.add_argument("prompt", help="the text; - reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="send the text as a user's message")
    generate.add_argument("--n", type=whole, metavar="N", help="number of outputs")
    generate.add_argument("--echo", action="store_true", default=None, help="begin with the prompt")
    generate.add_argument("--token-ids", action="store_true", default=None, help="with --json: token ids as well")
    generate.add_argument("--top-logprobs", type=whole, metavar="N", help="with --json: log probabilities as well")
    _add_json(generate)

    tokenize = add("tokenize", commands.tokenize, "Print the token ids of a text.", server)
    tokenize.add_argument("text", help="the text; - reads it from standard input")
    tokenize.add_argument("--chat", action="store_true", help="as a user's message, with the chat template")
    _add_json(tokenize)

    _add_json(add("info", commands.info, "Describe the served model.", server))


def _add_admin_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    server = _admin_parent()
    status = add("status", commands.status, "Print what the server is doing.", server)
    status.add_argument("--watch", action="store_true", help="print every change until it stops")
    _add_json(status)
    _add_json(add("load", commands.load, "Print what is queued, running and held.", server))
    _add_json(add("requests", commands.requests, "List the live requests.", server))

    cancel = add("cancel", commands.cancel, "Cancel live requests.", server)
    target = cancel.add_mutually_exclusive_group(required=True)
    target.add_argument("ids", nargs="*", default=[], metavar="ID", help="their ids")
    target.add_argument("--all", action="store_true", help="every one")

    _add_json(add("flush", commands.flush, "Forget the prefix cache; requests are not disturbed.", server))

    drain = add("drain", commands.drain, "Take the server out of service; accepted requests finish.", server)
    drain.add_argument(
        "--lame-duck", type=seconds, metavar="S", help="still accept for S seconds (default: the server's)"
    )
    drain.add_argument(
        "--timeout", type=seconds, metavar="S", help="cut what is left after S seconds more (default: the server's)"
    )
    drain.add_argument("--reason", default="", metavar="TEXT", help="told in the status")
    drain.add_argument("--wait", action="store_true", help="return when no request is left")
    add("undrain", commands.undrain, "Put a drained server back into service.", server)

    shutdown = add("shutdown", commands.shutdown, "Drain the server, then end it.", server)
    how = shutdown.add_mutually_exclusive_group()
    how.add_argument(
        "--timeout", type=seconds, metavar="S", help="cut what is left after S seconds more (default: the server's)"
    )
    how.add_argument("--immediate", action="store_true", help="do not drain")
    shutdown.add_argument("--wait", action="store_true", help="return when it has stopped")


def _inference_parent() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    default = os.environ.get("PICOVLLM_ADDRESS", ADDRESS)
    parent.add_argument("--address", default=default, help=f"the server (default: $PICOVLLM_ADDRESS or {ADDRESS})")
    parent.add_argument("--model", metavar="NAME", help="refuse any other model")
    _add_deadline(parent)
    return parent


def _admin_parent() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--admin-address",
        default=os.environ.get("PICOVLLM_ADMIN_ADDRESS", ADMIN_ADDRESS),
        help=f"the server's admin listener (default: $PICOVLLM_ADMIN_ADDRESS or {ADMIN_ADDRESS})",
    )
    _add_deadline(parent)
    return parent


def _sampling_parent() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("request", "What is not given is the model's or the server's default.")
    for name in ("temperature", "top-p", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty"):
        group.add_argument(f"--{name}", type=float, metavar="X")
    for name, kind in (("top-k", whole), ("seed", seed), ("max-tokens", whole), ("priority", priority)):
        group.add_argument(f"--{name}", type=kind, metavar="N")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end where this appears; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end of the answer")
    group.add_argument("--stats", action="store_true", help="print token counts and timings at the end")
    return parent


def _add_deadline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deadline", type=seconds, metavar="S", help="fail after S seconds")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
