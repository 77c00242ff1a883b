"""Registry: the live requests of this front, and the bounds on those that wait in the whole instance."""

from collections.abc import Callable, Collection, Iterator

from service.board import Board, Counts
from service.errors import Reason, ServiceError
from service.instance import Instance
from service.live_request import LiveRequest


class Registry:
    """A request is in here from admission until its handler has closed it.

    One that was taken over by its own retry is still counted, but no longer found by its id. What this front has
    admitted is on the board, so that every front sees what all of them have.
    """

    def __init__(
        self, instance: Instance, board: Board, front: int, max_queued_requests: int, max_queued_tokens: int
    ) -> None:
        self._instance = instance
        self._board = board
        self._front = front
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._calls: set[LiveRequest] = set()
        self._waiting: dict[LiveRequest, int] = {}  # prompt tokens, 0 while they are not known
        self._waiting_tokens = 0
        self._by_id: dict[str, LiveRequest] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._calls))

    def find(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    @property
    def live_in_instance(self) -> int:
        """Live requests of all fronts."""
        return self._board.total().live

    def admit(self, call: LiveRequest) -> None:
        """Raises `ServiceError` when nothing is accepted, its id is alive here (unless it takes over) or too many wait.

        An id that is alive on another front is refused by the engine.
        """
        earlier = self._by_id.get(call.request_id)
        with self._board.locked():
            self._instance.refuse_unless_accepting()
            if earlier is not None and not call.takeover:
                raise ServiceError(Reason.DUPLICATE_REQUEST_ID, f"request {call.request_id} is alive")
            if self._board.total().queued_requests >= self._max_requests:
                raise ServiceError(Reason.QUEUE_FULL, f"{self._max_requests} requests wait already; try again later")
            self._calls.add(call)
            self._waiting[call] = 0
            self._publish()
        if earlier is not None:
            earlier.fail(ServiceError(Reason.CLIENT_CANCELLED, "a retry of this request took over"))
        self._by_id[call.request_id] = call
        self.on_change()

    def admit_prompt(self, call: LiveRequest, tokens: int) -> None:
        """Raises `ServiceError` when too many prompt tokens would wait."""
        with self._board.locked():
            waiting = self._board.total().queued_tokens
            if waiting + tokens > self._max_tokens:
                raise ServiceError(
                    Reason.QUEUE_FULL,
                    f"{waiting} prompt tokens wait already, {tokens} more would pass {self._max_tokens}; "
                    "try again later",
                )
            self._waiting[call] = tokens
            self._waiting_tokens += tokens
            self._publish()

    def left_queue(self, call: LiveRequest) -> None:
        """It is scheduled, or it ended before. May be called again."""
        self._waiting_tokens -= self._waiting.pop(call, 0)
        self._publish()

    def remove(self, call: LiveRequest) -> None:
        if call not in self._calls:
            return
        self._calls.remove(call)
        self.left_queue(call)
        if self._by_id.get(call.request_id) is call:
            del self._by_id[call.request_id]
        self.on_change()

    def fail_all(self, error: ServiceError) -> int:
        """Fails every live request of this front; returns how many."""
        calls = tuple(self._calls)
        for call in calls:
            call.fail(error)
        return len(calls)

    def fail(self, request_ids: Collection[str], error: ServiceError) -> list[str]:
        """Fails those that are alive on this front; returns their ids."""
        found = [(request_id, call) for request_id in request_ids if (call := self._by_id.get(request_id)) is not None]
        for _, call in found:
            call.fail(error)
        return [request_id for request_id, _ in found]

    def _publish(self) -> None:
        self._board.set_counts(self._front, Counts(len(self._calls), len(self._waiting), self._waiting_tokens))
