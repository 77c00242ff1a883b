"""InferenceService: the handlers. Each is short: admit, wait, send; everything else is in LiveRequest."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from protos.picovllm.inference.v1 import inference_pb2 as pb
from protos.picovllm.inference.v1 import inference_pb2_grpc
from service.calls import REQUEST_ID_KEY, answer, deadline_of, is_retry
from service.errors import Reason, ServiceError
from service.live_request import LiveRequest
from service.messages import timings_message
from service.model_info import model_info_message
from service.prepare import prepare, tokenize
from service.runtime import Runtime
from service.served_model import ServedModel
from service.validate import (
    Generation,
    check_detokenize,
    check_generate,
    check_model,
    check_stream,
    check_tokenize,
    refuse_unknown_fields,
    valid_request_id,
)

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext
Check = Callable[[ServedModel, str], Generation]
T = TypeVar("T")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        def check(model: ServedModel, name: str) -> Generation:
            return check_generate(request, model, name)

        async def body(call: LiveRequest) -> pb.GenerateResponse:
            while call.done is None:
                await call.changed()
            response = await self._runtime.in_thread(self._response, call, request.spec.output.echo)
            await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            return response

        return await self._live(request.spec, context, "Generate", check, body)

    async def Stream(self, request: pb.StreamRequest, context: Context) -> None:
        """A coroutine that writes, not a generator: a cancel then is a CancelledError wherever it lands."""

        def check(model: ServedModel, name: str) -> Generation:
            return check_stream(request, model, name)

        async def body(call: LiveRequest) -> None:
            await self._send(call, context)

        await self._live(request.spec, context, "Stream", check, body)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        runtime, name = self._runtime, self._runtime.options.served_model_name

        def work() -> pb.TokenizeResponse:
            ids = tokenize(lambda: check_tokenize(request, name), runtime.tokenizer)
            return pb.TokenizeResponse(model=name, token_ids=ids)

        return await answer(context, "Tokenize", runtime.metrics, lambda: runtime.in_thread(work))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        runtime, name = self._runtime, self._runtime.options.served_model_name

        def work() -> pb.DetokenizeResponse:
            ids, skip = check_detokenize(request, runtime.model, name)
            return pb.DetokenizeResponse(model=name, text=runtime.tokenizer.decode(ids, skip_special_tokens=skip))

        return await answer(context, "Detokenize", runtime.metrics, lambda: runtime.in_thread(work))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        async def body() -> pb.GetModelInfoResponse:
            refuse_unknown_fields(request)
            check_model(request.model, self._runtime.options.served_model_name)
            return model_info_message(self._runtime.model, self._runtime.tokenizer, self._runtime.options)

        return await answer(context, "GetModelInfo", self._runtime.metrics, body)

    async def _live(
        self, spec: pb.GenerationSpec, context: Context, method: str, check: Check,
        body: Callable[[LiveRequest], Awaitable[T]],
    ) -> T:
        """The whole life of a request around ``body``, which answers it."""
        arrival = time.monotonic()
        request_id = spec.request_id if valid_request_id(spec.request_id) else uuid.uuid4().hex

        async def life() -> T:
            call = self._runtime.new_request(request_id, arrival, takeover=is_retry(context))
            self._runtime.registry.admit(call)
            deadline = deadline_of(context, arrival)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._start(call, check, deadline)
                    result = await body(call)
                self._finished(call)
                return result
            except TimeoutError:
                raise call.deadline_error() from None
            finally:  # frees the engine's part before the client is told anything
                call.close()
                self._runtime.registry.remove(call)

        return await answer(context, method, self._runtime.metrics, life, request_id)

    async def _send(self, call: LiveRequest, context: Context) -> None:
        """Everything a stream consists of."""
        while call.started is None:
            await call.changed()
        await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
        await self._write(call, context, self._started(call))
        while True:
            for message in call.take():
                await self._write(call, context, message)
            if call.done is not None and not call.has_more():
                break
            await call.changed(until=call.flush_time)
        completed = pb.Completed(usage=call.usage(), timings=timings_message(call.done.timings, call.receive_time))
        await self._write(call, context, pb.StreamResponse(completed=completed))

    async def _start(self, call: LiveRequest, check: Check, deadline: float) -> None:
        """Checks and tokenises off the loop, then submits."""
        runtime = self._runtime
        model, name = runtime.model, runtime.options.served_model_name
        prepared = await runtime.in_thread(prepare, lambda: check(model, name), runtime.tokenizer, model)
        call.check()
        runtime.registry.admit_prompt(call, len(prepared.prompt))
        call.submit(prepared, deadline)

    async def _write(self, call: LiveRequest, context: Context, message: pb.StreamResponse) -> None:
        """One message; a reader that takes none of it for too long ends the request."""
        call.check()
        try:
            async with asyncio.timeout(self._runtime.options.slow_consumer_timeout) as scope:
                call.write_scope(scope)
                await context.write(message)
        except TimeoutError:
            call.check()
            seconds = self._runtime.options.slow_consumer_timeout
            raise ServiceError(Reason.SLOW_CONSUMER, f"the client read nothing for {seconds:g} s") from None
        finally:
            call.write_scope(None)

    def _started(self, call: LiveRequest) -> pb.StreamResponse:
        event = call.started
        assert event is not None
        return pb.StreamResponse(
            started=pb.Started(
                request_id=call.request_id,
                model=self._runtime.options.served_model_name,
                prompt_tokens=event.prompt_tokens,
                cached_prompt_tokens=event.cached_prompt_tokens,
                seed=event.seed,
                max_tokens=event.max_tokens,
            )
        )

    def _response(self, call: LiveRequest, echo: bool) -> pb.GenerateResponse:
        """In a thread. Logprobs are added one by one: all in one call would keep the interpreter lock too long."""
        assert call.done is not None
        response = pb.GenerateResponse(
            request_id=call.request_id,
            model=self._runtime.options.served_model_name,
            outputs=call.outputs(),
            prompt_token_ids=call.prompt if echo else [],
            seed=call.started.seed if call.started else 0,
            usage=call.usage(),
            timings=timings_message(call.done.timings, call.receive_time),
        )
        response.prompt_logprobs.extend(call.prompt_logprobs())
        return response

    def _finished(self, call: LiveRequest) -> None:
        """A request that ended well: one line and the metrics."""
        if call.done is None:
            return
        usage, timings = call.usage(), call.done.timings
        arrival, scheduled, first = timings.arrival, timings.first_scheduled, timings.first_token
        total = time.monotonic() - arrival
        self._runtime.metrics.request_finished(
            usage.prompt_tokens,
            usage.completion_tokens,
            None if scheduled is None else scheduled - arrival,
            None if first is None else first - arrival,
            total,
        )
        log.info(
            "request %s: %d prompt and %d generated tokens in %.3f s",
            call.request_id, usage.prompt_tokens, usage.completion_tokens, total,
        )
