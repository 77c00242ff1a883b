"""A live request between engine and handler: whatever arrives while a message is being written is neither lost
nor overtaken by the end."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import FinishReason, OutputFinished, RequestDone, Started, Timings, TokenLogprob, Usage
from engine.sampling_params import SamplingParams
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.engine_client import EngineClient
from service.errors import Reason, ServiceError
from service.live_request import LiveRequest
from service.logprob_block import LogprobBlock
from service.output_budget import OutputBudget
from service.prepare import Prepared
from service.prompts import TokenPrompt
from service.token_bytes import TokenTable
from service.validate import Generation
from service.wire import Update
from tests.service.text_tables import split, table_of

TABLE = table_of([f"<{i}>".encode() for i in range(100)])
DONE = RequestDone("x", Usage(2, 0, (9,), 0), Timings(0.0, 0.1, 0.2, 0.3))


def live_request(table: TokenTable = TABLE, **fields: Any) -> LiveRequest:
    ours, theirs = socket.socketpair()
    theirs.close()
    ours.close()
    values: dict[str, Any] = {
        "prompt": TokenPrompt([1, 2]), "params": SamplingParams(max_tokens=9, seed=1), "stop_strings": (),
        "include_stop_in_text": False, "text": True, "token_ids": True, "skip_special_tokens": True, "echo": False,
        "priority": 0, "queue_timeout": None, "max_duration": None,
    }
    generation = Generation(**(values | fields))
    call = LiveRequest("x", time.monotonic(), EngineClient(ours), table, OutputBudget())
    call.submit(Prepared(generation, [1, 2], 9, ""), deadline=time.monotonic() + 60)
    return call


def update(*tokens: int, ends: FinishReason | None = None, count: int = 0) -> Update:
    finished = [] if ends is None else [OutputFinished("x", 0, ends, count)]
    return Update(1, None, None, {0: list(tokens)} if tokens else {}, {}, finished, DONE if ends else None)


def in_loop(scenario: Callable[[], None]) -> None:
    async def run() -> None:
        scenario()

    asyncio.run(run())


def test_tokens_that_arrive_during_a_write_come_before_the_end() -> None:
    def scenario() -> None:
        call = live_request()
        call.on_update(Update(1, Started("x", 0.1, 2, 0, 1, 9)))
        call.on_update(update(10))
        messages: list[pb.StreamResponse] = []
        first = call.take()
        messages.append(next(first))
        call.on_update(update(11, 12, ends=FinishReason.LENGTH, count=3))  # while the first is being written
        messages.extend(first)
        assert call.has_more()
        messages.extend(call.take())
        assert not call.has_more()
        deltas = [message.delta for message in messages if message.HasField("delta")]
        assert [list(delta.token_ids) for delta in deltas] == [[10], [11, 12]]
        assert [delta.token_offset for delta in deltas] == [0, 1]
        assert "".join(delta.text for delta in deltas) == "<10><11><12>"
        assert messages[-1].finished.token_count == 3
        call.close()

    in_loop(scenario)


@given(
    st.text(st.sampled_from("abé你😀 "), min_size=1, max_size=30), st.lists(st.integers(0, 200), max_size=30),
    st.lists(st.text(st.sampled_from("abé你😀 "), min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4),
)
def test_a_stream_is_the_unary_result_however_steps_and_writes_interleave(
    text: str, cuts: list[int], stops: list[str], schedule: list[int], flush_tokens: int
) -> None:
    pieces = split(text.encode(), cuts)
    table = table_of(pieces)

    def updates(call: LiveRequest) -> Iterator[None]:
        """Feeds the engine's side, as many tokens at a time as the schedule says."""
        call.on_update(Update(1, Started("x", 0.1, 2, 0, 1, 9)))
        left, sizes = list(range(len(pieces))), iter(schedule)
        while left:
            size = next(sizes, 1)
            now, left = left[:size], left[size:]
            call.on_update(update(*now, ends=None if left else FinishReason.LENGTH, count=len(pieces)))
            yield

    def scenario() -> None:
        fields: dict[str, Any] = {"stop_strings": tuple(stops), "flush_tokens": flush_tokens}
        unary = live_request(table, **fields)
        for _ in updates(unary):
            pass
        (whole,) = unary.outputs()
        streamed = live_request(table, **fields)
        feed, shown = updates(streamed), ""
        ids: list[int] = []
        next(feed)
        while streamed.done is None or streamed.has_more():
            for message in streamed.take():
                next(feed, None)  # the engine goes on while this message is being written
                assert message.HasField("delta") or not streamed.has_more()
                ids += message.delta.token_ids
                shown += message.delta.text
            next(feed, None)
        assert (shown, ids) == (whole.text, list(whole.token_ids))
        assert streamed.usage() == unary.usage()
        streamed.close()
        unary.close()

    in_loop(scenario)


def test_an_output_left_unfinished_by_the_engine_is_a_bug() -> None:
    def scenario() -> None:
        call = live_request()
        call.on_update(Update(1, Started("x", 0.1, 2, 0, 1, 9), None, {0: [10]}, {}, [], DONE))
        with pytest.raises(ServiceError) as caught:
            call.check()
        assert caught.value.reason is Reason.BUG
        call.close()

    in_loop(scenario)


def test_a_time_limit_in_the_queue_is_an_empty_result() -> None:
    def scenario() -> None:
        call = live_request()
        call.on_update(update(ends=FinishReason.TIME_LIMIT))
        assert call.started is not None
        assert (call.started.seed, call.started.max_tokens, call.started.prompt_tokens) == (1, 9, 2)
        assert call.usage().completion_tokens == 0
        assert [message.WhichOneof("event") for message in call.take()] == ["finished"]
        call.close()

    in_loop(scenario)


@pytest.mark.parametrize(("echo", "scored"), [(False, 0), (True, 0), (False, 1), (True, 1)])
def test_a_time_limit_before_all_of_the_prompt_is_scored_ends_a_stream(echo: bool, scored: int) -> None:
    def scenario() -> None:
        params = SamplingParams(max_tokens=9, seed=1, prompt_logprobs=0)
        streamed, unary = live_request(params=params, echo=echo), live_request(params=params, echo=echo)
        for call in (streamed, unary):
            if scored:
                block = LogprobBlock()
                block.append(TokenLogprob(1, None, None, ()))
                call.on_update(Update(1, Started("x", 0.1, 2, 0, 1, 9), block))
            call.on_update(update(ends=FinishReason.TIME_LIMIT))
        messages = list(streamed.take())
        assert not streamed.has_more()
        assert messages[-1].WhichOneof("event") == "finished"
        chunks = [message.prompt_chunk for message in messages if message.HasField("prompt_chunk")]
        assert [token for chunk in chunks for token in chunk.token_ids] == ([1, 2] if echo else [])
        told = [entry for chunk in chunks for entry in chunk.logprobs]
        assert len(told) == scored
        assert told == list(unary.prompt_logprobs())
        streamed.close()
        unary.close()

    in_loop(scenario)


def test_the_first_failure_stays() -> None:
    def scenario() -> None:
        call = live_request()
        call.fail(ServiceError(Reason.ADMIN_CANCELLED, "first"))
        call.fail(ServiceError(Reason.WORKER_LOST, "second"))
        with pytest.raises(ServiceError, match="first"):
            call.check()
        call.close()
        call.close()

    in_loop(scenario)


def test_a_stop_string_cuts_what_the_engine_made_beyond_it() -> None:
    def scenario() -> None:
        call = live_request(stop_strings=("><1",))
        call.on_update(Update(1, Started("x", 0.1, 2, 0, 1, 9)))
        call.on_update(update(*range(8, 17), ends=FinishReason.LENGTH, count=9))
        (output,) = call.outputs()
        assert output.text == "<8><9"
        assert list(output.token_ids) == [8, 9, 10]
        assert output.stop_match.stop_text == "><1"
        assert call.usage().completion_tokens == 3
        call.close()

    in_loop(scenario)


