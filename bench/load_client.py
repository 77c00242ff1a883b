"""One client process of `bench.serve`: sends its share of the requests, and says what it saw.

Reads a line of JSON (what to do), prints `ready` once it is connected, reads a second line (when to start, on the
monotonic clock, which all processes of a machine share), and prints a line of JSON with every request's messages.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc

from bench.workload import token_ids
from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1.inference_pb2_grpc import InferenceServiceStub

# A connection of its own for every channel: gRPC would share one among those of a process.
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
CONNECT_SECONDS = 30.0


def request_message(planned: dict[str, Any], seed: str, vocab_size: int) -> pb.StreamRequest:
    return pb.StreamRequest(
        spec=pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=token_ids(planned, seed, vocab_size)),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=planned["output_tokens"], ignore_eos=True),
        )
    )


async def send(stub: Any, planned: dict[str, Any], message: pb.StreamRequest, start: float) -> dict[str, Any]:
    """One request from its sending to its end; times in seconds after ``start``."""
    offsets: list[int] = []
    times: list[float] = []
    seen = {"number": planned["number"], "at": planned["at"], "sent": time.monotonic() - start}
    try:
        total = 0
        async for event in stub.Stream(message, timeout=600):
            if event.HasField("delta"):
                times.append(time.monotonic() - start)
                offsets.append(event.delta.token_offset)
            elif event.HasField("completed"):
                total = event.completed.usage.completion_tokens
    except grpc.aio.AioRpcError as error:
        return seen | {"error": f"{error.code().name}: {error.details()}"}
    return seen | {"times": times, "tokens": tokens_of_messages(offsets, total)}


def tokens_of_messages(offsets: list[int], total: int) -> list[int]:
    """How many tokens each message told of: up to where the next one begins."""
    return [end - begin for begin, end in zip(offsets, [*offsets[1:], total], strict=True)]


async def run(task: dict[str, Any]) -> dict[str, Any]:
    planned = task["requests"]
    messages = [request_message(request, task["seed"], task["vocab_size"]) for request in planned]
    channels = [grpc.aio.insecure_channel(task["address"], options=CHANNEL_OPTIONS) for _ in range(task["connections"])]
    await asyncio.gather(*(asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS) for channel in channels))
    stubs = [InferenceServiceStub(channel) for channel in channels]
    print("ready", flush=True)
    start = float(await asyncio.to_thread(sys.stdin.readline))
    cpu = time.process_time()
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    work = iter(enumerate(zip(planned, messages, strict=True)))
    if task["workers"]:
        results = await asyncio.gather(*(worker(stubs, work, start) for _ in range(task["workers"])))
        found = [result for some in results for result in some]
    else:
        found = await asyncio.gather(*(timed(stubs[i % len(stubs)], p, m, start) for i, (p, m) in work))
    used = time.process_time() - cpu
    for channel in channels:
        await channel.close()
    return {"cpu_seconds": used, "results": found}


async def worker(stubs: list[Any], work: Iterator[Any], start: float) -> list[dict[str, Any]]:
    """Sends one request after the other."""
    return [await send(stubs[i % len(stubs)], planned, message, start) for i, (planned, message) in work]


async def timed(stub: Any, planned: dict[str, Any], message: pb.StreamRequest, start: float) -> dict[str, Any]:
    """Sends a request when it is due."""
    await asyncio.sleep(max(0.0, start + planned["at"] - time.monotonic()))
    return await send(stub, planned, message, start)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))), flush=True)
