"""What the command line prints: messages as JSON, and as lines for people."""

import json
from collections.abc import Iterator

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from clients.errors import PicoError
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.inference.v1 import inference_pb2 as pb


def as_json(message: Message) -> str:
    """All fields, under their proto names; 64-bit integers are strings, as protobuf's JSON has them."""
    content = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(content, indent=2, ensure_ascii=False)


def seconds(duration: Duration) -> float:
    return float(duration.ToTimedelta().total_seconds())


def usage_line(usage: pb.Usage) -> str:
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    return f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated"


def timings_line(usage: pb.Usage, timings: pb.Timings) -> str:
    """The phases that were reached."""
    phases = [
        f"{name} {seconds(getattr(timings, f'{field}_duration')):.3f} s"
        for name, field in (
            ("queue", "queue"),
            ("prefill", "prefill"),
            ("KV transfer", "kv_transfer"),
            ("first token after", "time_to_first_token"),
            ("decode", "decode"),
            ("total", "total"),
        )
        if timings.HasField(f"{field}_duration")
    ]
    decode = seconds(timings.decode_duration)
    if decode > 0 and usage.completion_tokens > 1:
        phases.append(f"{(usage.completion_tokens - 1) / decode:.1f} tokens/s")
    return ", ".join(phases)


# What to do about a failure for which the server gave no reason.
_ADVICE = {
    grpc.StatusCode.UNAVAILABLE: "no server is ready there; start one, or name its address (see --help)",
    grpc.StatusCode.UNIMPLEMENTED: "not at this address; inference and administration have one each (see --help)",
}


def error_lines(error: PicoError) -> Iterator[str]:
    # The message of a request with bad fields repeats them; one line each is easier to read.
    cause = f"{error.code.name}{'/' + error.reason if error.reason else ''}"
    yield f"error: {cause}" if error.violations else f"error: {error}"
    yield from (f"  {violation.field}: {violation.description}" for violation in error.violations)
    if not error.reason and error.code in _ADVICE:
        yield f"  {_ADVICE[error.code]}"
    if error.retry_after is not None:
        yield f"  try again in {error.retry_after:g} s"
    if error.request_id:
        yield f"  request {error.request_id}"


def info_lines(info: pb.GetModelInfoResponse) -> Iterator[str]:
    limits, sampling = info.limits, info.default_sampling
    features = [field.name for field, on in info.features.ListFields() if on]
    yield f"model          {info.model} ({info.architecture}, {info.dtype} on {info.device})"
    yield f"fingerprint    {info.model_fingerprint}"
    yield f"context        {limits.max_context_tokens} tokens"
    yield f"KV pool        {limits.kv_capacity_tokens} tokens in blocks of {limits.kv_block_tokens}"
    yield f"runs at once   {limits.max_running_outputs} outputs, {limits.max_queued_requests} requests queued"
    yield f"features       {', '.join(features) or 'none beyond generation'}"
    yield f"EOS tokens     {', '.join(map(str, info.eos_token_ids))}"
    defaults = (f"{field.name} {value:g}" for field, value in sampling.ListFields() if isinstance(value, int | float))
    yield f"sampling       {', '.join(defaults)}"
    yield f"server         {info.server_version}"


def state_name(status: admin.Status) -> str:
    return admin.InstanceState.Name(status.state).removeprefix("INSTANCE_STATE_")


def status_line(status: admin.Status) -> str:
    line = state_name(status)
    if status.reason:
        line += f" ({status.reason})"
    if status.HasField("drain"):
        line += f", {status.drain.requests_left} of {status.drain.requests_at_start} requests left"
    return line


def status_lines(status: admin.Status) -> Iterator[str]:
    yield f"state          {status_line(status)}"
    yield f"model          {status.model}"
    yield f"started        {_whole_seconds(status.start_time)}"
    if status.HasField("last_step_time"):
        yield f"last step      {_whole_seconds(status.last_step_time)}"
    for worker in status.workers:
        yield f"worker         {worker.name}, pid {worker.pid}, {'alive' if worker.alive else 'dead'}"
    yield f"server         {status.server_version}"


def load_lines(load: admin.GetLoadResponse) -> Iterator[str]:
    yield f"queued         {load.queued_requests} requests, {load.queued_prompt_tokens} prompt tokens"
    if load.HasField("oldest_queued_duration"):
        yield f"oldest         {seconds(load.oldest_queued_duration):.1f} s in the queue"
    yield f"prefilling     {load.prefilling_requests}"
    yield f"decoding       {load.decoding_requests}"
    blocks = f"{load.kv_blocks_used} used, {load.kv_blocks_reusable} reusable, {load.kv_blocks_total} in all"
    yield f"KV blocks      {blocks}"
    yield f"prompt tokens  {load.prompt_tokens_per_second:.1f}/s"
    yield f"generated      {load.generated_tokens_per_second:.1f}/s"


def request_line(info: admin.RequestInfo) -> str:
    state = admin.RequestState.Name(info.state).removeprefix("REQUEST_STATE_").lower()
    return (
        f"{info.request_id}  {state}, {info.prompt_tokens} prompt tokens, "
        f"{info.completion_tokens} generated, priority {info.priority}"
    )


def _whole_seconds(time: Timestamp) -> str:
    return Timestamp(seconds=time.seconds).ToJsonString()
