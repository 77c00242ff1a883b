"""Registry: the live requests of this front, and the bounds on those that wait."""

from collections.abc import Callable, Iterator

from service.errors import Reason, ServiceError
from service.live_request import LiveRequest


class Registry:
    """A request is in here from admission until its handler has closed it.

    One that was taken over by its own retry is still counted, but no longer found by its id.
    """

    def __init__(self, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._calls: dict[LiveRequest, int] = {}  # prompt tokens, 0 while they are not known
        self._by_id: dict[str, LiveRequest] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._calls))

    def find(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    @property
    def queued_requests(self) -> int:
        return sum(call.started is None for call in self._calls)

    @property
    def queued_tokens(self) -> int:
        return sum(tokens for call, tokens in self._calls.items() if call.started is None)

    def admit(self, call: LiveRequest, *, takeover: bool) -> None:
        """Raises `ServiceError` when its id is alive (unless it takes over) or too many requests wait."""
        earlier = self._by_id.get(call.request_id)
        if earlier is not None and not takeover:
            raise ServiceError(Reason.DUPLICATE_REQUEST_ID, f"request {call.request_id} is alive")
        if self.queued_requests >= self._max_requests:
            raise ServiceError(Reason.QUEUE_FULL, f"{self._max_requests} requests wait already; try again later")
        if earlier is not None:
            earlier.fail(ServiceError(Reason.CLIENT_CANCELLED, "a retry of this request took over"))
        self._calls[call] = 0
        self._by_id[call.request_id] = call
        self.on_change()

    def admit_prompt(self, call: LiveRequest, tokens: int) -> None:
        """Raises `ServiceError` when too many prompt tokens would wait."""
        waiting = self.queued_tokens
        if waiting + tokens > self._max_tokens:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{waiting} prompt tokens wait already, {tokens} more would pass {self._max_tokens}; try again later",
            )
        self._calls[call] = tokens

    def remove(self, call: LiveRequest) -> None:
        if self._calls.pop(call, None) is None:
            return
        if self._by_id.get(call.request_id) is call:
            del self._by_id[call.request_id]
        self.on_change()

    def fail_all(self, error: ServiceError) -> int:
        """Fails every live request; returns how many."""
        calls = tuple(self._calls)
        for call in calls:
            call.fail(error)
        return len(calls)
