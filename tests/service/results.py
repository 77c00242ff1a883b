"""Stream = unary: a stream's events put together again, and both ways compared."""

from typing import Any

from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.rpc import generate, stream


def assemble(events: list[pb.StreamResponse]) -> pb.GenerateResponse:
    """The unary response that a stream amounts to. Asserts the order of events and the offsets."""
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "completed"
    assert kinds.count("started") == kinds.count("completed") == 1
    last_prompt = max((i for i, kind in enumerate(kinds) if kind == "prompt_chunk"), default=0)
    assert "delta" not in kinds[:last_prompt]
    result = pb.GenerateResponse(request_id=events[0].started.request_id, model=events[0].started.model)
    outputs: dict[int, pb.Output] = {}
    offsets: dict[int, int] = {}
    for event in events:
        if event.HasField("prompt_chunk"):
            chunk = event.prompt_chunk
            assert chunk.token_offset == max(len(result.prompt_token_ids), len(result.prompt_logprobs))
            result.prompt_token_ids.extend(chunk.token_ids)
            result.prompt_logprobs.extend(chunk.logprobs)
        elif event.HasField("delta"):
            delta = event.delta
            output = outputs.setdefault(delta.output_index, pb.Output(index=delta.output_index))
            assert output.finish_reason == 0, "no delta follows finished"
            assert delta.token_offset >= offsets.get(delta.output_index, 0)
            offsets[delta.output_index] = delta.token_offset
            if output.token_ids:
                assert delta.token_offset == len(output.token_ids)
            output.text += delta.text
            output.token_ids.extend(delta.token_ids)
            output.logprobs.extend(delta.logprobs)
        elif event.HasField("finished"):
            end = event.finished
            output = outputs.setdefault(end.output_index, pb.Output(index=end.output_index))
            output.finish_reason, output.visible_token_count = end.finish_reason, end.visible_token_count
            if end.HasField("stop_match"):
                output.stop_match.CopyFrom(end.stop_match)
    result.outputs.extend(outputs[index] for index in sorted(outputs))
    result.seed = events[0].started.seed
    result.usage.CopyFrom(events[-1].completed.usage)
    return result


def both(stub: Any, request: pb.GenerationSpec) -> pb.GenerateResponse:
    """The unary result, after asserting that the stream comes to the same.

    Both compute the whole prompt: what is cached changes the shapes and with them the rounding.
    """
    request = pb.GenerationSpec.FromString(request.SerializeToString())
    request.cache.bypass_prefix_cache = True
    unary = generate(stub, request)
    streamed = assemble(list(stream(stub, request)))
    result = pb.GenerateResponse()
    result.CopyFrom(unary)
    for response in (unary, streamed):
        response.ClearField("timings")
        response.ClearField("request_id")
        if not request.sampling.HasField("seed"):
            response.ClearField("seed")
    assert streamed == unary
    return result
