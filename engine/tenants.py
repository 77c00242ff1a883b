"""What each tenant has used: the measure of fairness between them. Pure Python."""

OUTPUT_TOKEN_WEIGHT = 4


class TenantAccount:
    """One tenant's virtual counter: prompt tokens computed plus 4 x tokens generated."""

    __slots__ = ("counter", "live_requests")

    def __init__(self, counter: int = 0) -> None:
        self.counter = counter
        self.live_requests = 0


class TenantCounters:
    """Accounts by tenant. The tenant with the lowest counter goes first.

    A tenant that comes back from idleness is lifted to the lowest counter of the active ones, so that idleness earns
    no credit (Sheng et al. 2023, arXiv 2401.00588).
    """

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._active: dict[str, TenantAccount] = {}

    def enter(self, tenant: str) -> TenantAccount:
        """A request of ``tenant`` is now live; what it uses is charged to the account."""
        account = self._active.get(tenant)
        if account is None:
            floor = min((other.counter for other in self._active.values()), default=0)
            account = self._active[tenant] = self._accounts.setdefault(tenant, TenantAccount())
            account.counter = max(account.counter, floor)
        account.live_requests += 1
        return account

    def leave(self, tenant: str) -> None:
        """A request of ``tenant`` has ended. The accounts of idle tenants are dropped once nobody is active."""
        account = self._active[tenant]
        account.live_requests -= 1
        if account.live_requests == 0:
            del self._active[tenant]
        if not self._active:
            self._accounts.clear()
