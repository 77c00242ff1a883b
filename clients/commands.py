"""What each command of the command line does, given its parsed arguments."""

import argparse
import sys
from collections.abc import Iterable, Iterator

import grpc
from google.protobuf.message import Message

from clients import display
from clients.chat import Chat
from clients.client import AdminClient, PicoClient
from clients.errors import PicoError
from clients.spec import Prompt, SpecOptions
from protos.picovllm.admin.v1 import admin_pb2 as admin

# Arguments that are options of a request under the same name.
REQUEST_OPTIONS = (
    "model", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "seed", "max_tokens", "stop", "ignore_eos", "n", "echo", "token_ids", "top_logprobs", "priority",
)  # fmt: skip


def request_options(args: argparse.Namespace) -> SpecOptions:
    """The options that were given; the others are left to the server."""
    given = {name: getattr(args, name, None) for name in REQUEST_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}  # type: ignore[return-value]


def chat(args: argparse.Namespace) -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())
    with PicoClient(args.address) as client:
        Chat(client, request_options(args), system=args.system, timeout=args.deadline, stats=args.stats).run()


def generate(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
    options = request_options(args)
    with PicoClient(args.address) as client:
        if args.json or (args.n or 1) > 1:
            _print_whole(client, prompt, options, args)
        else:
            _print_stream(client, prompt, options, args)


def _print_whole(client: PicoClient, prompt: Prompt, options: SpecOptions, args: argparse.Namespace) -> None:
    reply = client.generate(prompt, timeout=args.deadline, **options)
    if args.json:
        print(display.as_json(reply))
        return
    for output in reply.outputs:
        print(f"--- {output.index}\n{output.text}")
    if args.stats:
        _print_stats(display.usage_line(reply.usage), display.timings_line(reply.usage, reply.timings))


def _print_stream(client: PicoClient, prompt: Prompt, options: SpecOptions, args: argparse.Namespace) -> None:
    with client.stream(prompt, timeout=args.deadline, **options) as stream:
        for piece in stream.texts():
            print(piece, end="", flush=True)
    print()
    if args.stats and (done := stream.progress.completed) is not None:
        _print_stats(display.usage_line(done.usage), display.timings_line(done.usage, done.timings))


def _print_stats(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr)


def tokenize(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.text == "-" else args.text
    with PicoClient(args.address) as client:
        source = [{"role": "user", "content": text}] if args.chat else text
        ids = client.tokenize(source, model=args.model or "", timeout=args.deadline)
    print(ids if args.json else f"{' '.join(map(str, ids))}\n{len(ids)} tokens")


def info(args: argparse.Namespace) -> None:
    with PicoClient(args.address) as client:
        found = client.model_info(model=args.model or "", timeout=args.deadline)
    _show(args, found, display.info_lines(found))


def status(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        if not args.watch:
            found = client.status(timeout=args.deadline)
            _show(args, found, display.status_lines(found))
            return
        with client.watch(timeout=args.deadline) as events:
            for event in events:
                _show(args, event.status, [display.status_line(event.status)])


def load(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        found = client.load(timeout=args.deadline)
    _show(args, found, display.load_lines(found))


def requests(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        found = client.list_requests(timeout=args.deadline)
    if args.json:
        print(display.as_json(admin.ListRequestsResponse(requests=found)))
    else:
        print(*map(display.request_line, found), f"{len(found)} live requests", sep="\n")


def cancel(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        found = client.cancel_requests(None if args.all else args.ids, timeout=args.deadline)
    print(f"{len(found.cancelled_ids)} cancelled")
    if found.unknown_ids:
        print(f"not alive: {', '.join(found.unknown_ids)}")


def flush(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        found = client.flush_cache(timeout=args.deadline)
    _show(args, found, [f"{found.kv_blocks_freed} KV blocks freed, {found.kv_blocks_held} held by live requests"])


def drain(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client, client.watch(timeout=args.deadline) as events:
        watching = iter(events)
        next(watching)  # the watch has begun: no change can be missed
        begun = client.drain(
            lame_duck=args.lame_duck, drain_timeout=args.timeout, reason=args.reason, timeout=args.deadline
        )
        print(line := display.status_line(begun), flush=True)
        if args.wait:
            for event in watching:
                if line != (line := display.status_line(event.status)):
                    print(line, flush=True)
                if is_drained(event.status):
                    return


def undrain(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client:
        print(display.status_line(client.undrain(timeout=args.deadline)))


def shutdown(args: argparse.Namespace) -> None:
    with AdminClient(args.admin_address) as client, client.watch(timeout=args.deadline) as events:
        watching = iter(events)
        next(watching)
        begun = client.shutdown(drain_timeout=args.timeout, immediate=args.immediate, timeout=args.deadline)
        print(line := display.status_line(begun), flush=True)
        if args.wait:
            _print_until_gone(watching, line)


def _print_until_gone(watching: Iterator[admin.WatchStatusResponse], line: str) -> None:
    """Every change after ``line``."""
    try:
        for event in watching:
            if line != (line := display.status_line(event.status)):
                print(line, flush=True)
    except PicoError as error:
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            raise
        print("gone")  # it exited before the last message of the watch was read


def is_drained(status: admin.Status) -> bool:
    """Whether new requests are refused and no accepted one is left."""
    return status.state == admin.INSTANCE_STATE_DRAINING and status.drain.requests_left == 0


def _show(args: argparse.Namespace, message: Message, lines: Iterable[str]) -> None:
    if args.json:
        print(display.as_json(message), flush=True)
    else:
        print(*lines, sep="\n", flush=True)
