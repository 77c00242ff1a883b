"""Proto messages of results: built here from the engine's events, and cut to the size limit of a stream message."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from engine.outputs import FinishReason, RequestDone, Timings
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.logprob_block import LogprobBlock
from service.token_bytes import TokenTable

MAX_STREAM_MESSAGE_BYTES = 256 * 1024
_PART_BYTES = MAX_STREAM_MESSAGE_BYTES // 3  # a message has at most two parts, text and tokens, and some framing
TOKEN_ID_BYTES = 5  # the longest varint of a uint32

FINISH_REASON = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}


def logprob_messages(block: LogprobBlock, table: TokenTable) -> Iterator[pb.TokenLogprob]:
    """One message per token, made when it is asked for."""
    bytes_of, message = table.bytes_of, pb.TokenLogprob
    for records in block.entries():
        own, *top = [
            message(token_id=token_id, logprob=logprob, rank=rank, token_bytes=bytes_of(token_id))
            for token_id, logprob, rank in records
        ]
        own.top.extend(top)
        yield own


def usage_message(done: RequestDone, completion_tokens: int) -> pb.Usage:
    """``completion_tokens``: of all outputs together, each cut at its stop string."""
    usage = done.usage
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=usage.prompt_tokens + completion_tokens,
        preemptions=usage.preemptions,
    )


def timings_message(timings: Timings, receive_time: float) -> pb.Timings:
    """``receive_time``: seconds since the epoch, of the moment that ``timings.arrival`` is on the other clock."""
    arrival, scheduled, first, end = timings.arrival, timings.first_scheduled, timings.first_token, timings.finished
    message = pb.Timings(receive_time=timestamp(receive_time), total_duration=duration(end - arrival))
    if scheduled is not None:
        message.queue_duration.CopyFrom(duration(scheduled - arrival))
        message.prefill_duration.CopyFrom(duration((end if first is None else first) - scheduled))
    if first is not None:
        message.time_to_first_token_duration.CopyFrom(duration(first - arrival))
        message.decode_duration.CopyFrom(duration(end - first))
    return message


def delta_messages(
    output_index: int, token_offset: int, token_count: int, *,
    text: str, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob],
) -> Iterator[pb.StreamResponse]:
    """One delta, or several where one would be too large. ``token_count`` tokens are new, told or not."""
    end = token_offset + token_count
    token_parts = [(token_offset + start, start, stop) for start, stop in _token_parts(token_ids, logprobs)]
    for part, piece in zip_longest(token_parts, _text_parts(text)):
        offset, start, stop = part or (end, 0, 0)
        delta = pb.Delta(
            output_index=output_index, token_offset=offset if token_parts else token_offset, text=piece or "",
            token_ids=token_ids[start:stop], logprobs=logprobs[start:stop],
        )
        yield pb.StreamResponse(delta=delta)


def prompt_messages(
    token_offset: int, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]
) -> Iterator[pb.StreamResponse]:
    """Prompt chunks from ``token_offset`` on; either list may be empty, and ``logprobs`` end before the tokens do."""
    for start, stop in _token_parts(token_ids, logprobs):
        chunk = pb.PromptChunk(
            token_offset=token_offset + start, token_ids=token_ids[start:stop], logprobs=logprobs[start:stop]
        )
        yield pb.StreamResponse(prompt_chunk=chunk)


def _token_parts(token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprob]) -> Iterator[tuple[int, int]]:
    """Index ranges over lists that run side by side, each of bounded size."""
    if not logprobs:
        step = _PART_BYTES // TOKEN_ID_BYTES
        for start in range(0, len(token_ids), step):
            yield start, min(start + step, len(token_ids))
        return
    start = size = 0
    for index, entry in enumerate(logprobs):
        more = entry.ByteSize() + TOKEN_ID_BYTES + 4
        if size and size + more > _PART_BYTES:
            yield start, index
            start, size = index, 0
        size += more
    yield start, max(len(logprobs), len(token_ids))


def _text_parts(text: str) -> Iterator[str]:
    step = _PART_BYTES // 4  # characters of four bytes at most
    for start in range(0, len(text), step):
        yield text[start : start + step]


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return message


def timestamp(seconds: float) -> Timestamp:
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
