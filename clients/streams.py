"""A streamed request as a context manager: leaving it, however and whenever, ends the request on the server.

A plain ``break`` out of a gRPC iterator does not: the server would generate on for nobody.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from clients.errors import translated
from protos.picovllm.inference.v1 import inference_pb2 as pb

Event = TypeVar("Event")
_OUTSIDE = "a stream is used inside its `with` block"


class Stream(Generic[Event]):
    """Iterates over the events of one call. The call starts when the block is entered."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._call: Any = None

    def __enter__(self) -> "Stream[Event]":
        self._call = self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._call.cancel()  # no effect on a call that has ended

    def __iter__(self) -> Iterator[Event]:
        if self._call is None:
            raise RuntimeError(_OUTSIDE)
        with translated():
            yield from self._call


class AsyncStream(Generic[Event]):
    """`Stream` for asyncio."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._call: Any = None

    async def __aenter__(self) -> "AsyncStream[Event]":
        self._call = self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        if self._call is None:
            raise RuntimeError(_OUTSIDE)
        with translated():
            async for event in self._call:
                yield event


class Progress:
    """What a generation has told so far; complete once its events are exhausted."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: dict[int, pb.Finished] = {}
        self.completed: pb.Completed | None = None

    def note(self, event: pb.StreamResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started = event.started
        elif kind == "finished":
            self.finished[event.finished.output_index] = event.finished
        elif kind == "completed":
            self.completed = event.completed


class GenerationStream(Stream[pb.StreamResponse]):
    """The events of one generation. ``progress`` keeps what a caller wants to know in the end."""

    def __init__(self, start: Callable[[], Any]) -> None:
        super().__init__(start)
        self.progress = Progress()

    def __enter__(self) -> "GenerationStream":
        super().__enter__()
        return self

    def __iter__(self) -> Iterator[pb.StreamResponse]:
        for event in super().__iter__():
            self.progress.note(event)
            yield event

    def texts(self, output_index: int = 0) -> Iterator[str]:
        """The pieces of one output's text, as they come."""
        for event in self:
            if event.delta.text and event.delta.output_index == output_index:
                yield event.delta.text


class AsyncGenerationStream(AsyncStream[pb.StreamResponse]):
    """`GenerationStream` for asyncio."""

    def __init__(self, start: Callable[[], Any]) -> None:
        super().__init__(start)
        self.progress = Progress()

    async def __aenter__(self) -> "AsyncGenerationStream":
        await super().__aenter__()
        return self

    async def __aiter__(self) -> AsyncIterator[pb.StreamResponse]:
        async for event in super().__aiter__():
            self.progress.note(event)
            yield event

    async def texts(self, output_index: int = 0) -> AsyncIterator[str]:
        """The pieces of one output's text, as they come."""
        async for event in self:
            if event.delta.text and event.delta.output_index == output_index:
                yield event.delta.text
