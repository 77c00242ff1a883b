"""OutputBudget: how much output may wait for slow readers, per request and in the whole front."""

from typing import Protocol

from service.errors import Reason, ServiceError

MAX_REQUEST_BYTES = 16 << 20
MAX_FRONT_BYTES = 1 << 30


class Holder(Protocol):
    @property
    def buffered_bytes(self) -> int: ...
    def fail(self, error: ServiceError) -> None: ...


class OutputBudget:
    """Counts buffered bytes; the request whose growth passes a bound is failed with SLOW_CONSUMER."""

    def __init__(self, request_bytes: int = MAX_REQUEST_BYTES, front_bytes: int = MAX_FRONT_BYTES) -> None:
        self._request_bytes = request_bytes
        self._front_bytes = front_bytes
        self.used_bytes = 0

    def change(self, holder: Holder, amount: int) -> None:
        """``holder`` now holds ``amount`` bytes more, its ``buffered_bytes`` already told."""
        self.used_bytes += amount
        if amount <= 0:
            return
        if holder.buffered_bytes > self._request_bytes:
            holder.fail(_slow(f"more than {self._request_bytes} bytes of output wait for the client"))
        elif self.used_bytes > self._front_bytes:
            holder.fail(_slow(f"more than {self._front_bytes} bytes of output wait for clients of this server"))


def _slow(message: str) -> ServiceError:
    return ServiceError(Reason.SLOW_CONSUMER, f"{message}; read faster or ask for less")
