"""Virtual token counters: who is served next, so that no tenant's flood delays another.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each tenant has a counter of
the service it got, weighted: a token of input costs 1, one of output 2, both divided by the tenant's
weight. The tenant with the least is served first. A tenant that comes back is lifted to the least of those
who wait, so that it cannot save up service while idle. Two tenants that both wait all along differ in
service by at most ``2 * max(w_in * L_in, w_out * M)``: ``L_in`` the longest input, ``M`` the tokens that
the KV pool holds.

Input is charged as it is computed, chunk by chunk. What the prefix cache served is free, and so is what is
computed again after a preemption, which was not the tenant's doing. What it takes to bring an adapter is
charged as so many tokens of input (`engine.scheduler.load_bills`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.scheduler.background import is_background

INPUT_COST = 1.0
OUTPUT_COST = 2.0


Rank = tuple[bool, float, int]


class Account:
    """One tenant's counter, and how many of its sequences wait and run; kept by `VirtualTokenCounters`."""

    __slots__ = ("is_background", "num_running", "num_waiting", "served", "tenant", "weight")

    def __init__(self, tenant: str, served: float) -> None:
        self.tenant = tenant
        self.is_background = is_background(tenant)
        self.weight = 1.0
        self.served = served
        self.num_waiting = 0
        self.num_running = 0

    @property
    def rank(self) -> Rank:
        """Who is next: the tenant that was served least, and of equals, the one of which less runs; all
        background work comes last.
        """
        return self.is_background, self.served, self.num_running

    def yields_to(self, other: Account) -> bool:
        """Whether it gives whatever it has to another that lacks it."""
        return self.is_background and not other.is_background

    def owes(self, other: Account) -> bool:
        """Whether it lets another have a turn: it was served no less. Background work is owed nothing."""
        return self.is_background >= other.is_background and self.served >= other.served


class VirtualTokenCounters:
    """The counters of all tenants that have, or had, something here."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._last_departed = {False: 0.0, True: 0.0}  # by whether it was background work
        self._sweep_at = 1024

    def account(self, tenant: str) -> Account:
        """The tenant's account; a new one starts at the floor."""
        account = self._accounts.get(tenant)
        if account is None:
            floor = self._floor(is_background(tenant))
            account = self._accounts[tenant] = Account(tenant, floor)
        return account

    def waiting(self) -> list[Account]:
        """Accounts with something waiting, in no particular order."""
        return [account for account in self._accounts.values() if account.num_waiting]

    def arrive(self, tenant: str, weight: float) -> None:
        """One more sequence of the tenant waits; the latest weight counts."""
        self._sweep()
        account = self.account(tenant)
        account.weight = weight
        if account.num_waiting == 0:
            account.served = max(account.served, self._floor(account.is_background))
        account.num_waiting += 1

    def depart(self, tenant: str) -> None:
        """One sequence of the tenant waits no more."""
        account = self._accounts[tenant]
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._last_departed[account.is_background] = account.served

    def start(self, tenant: str) -> None:
        """One more sequence of the tenant runs."""
        self.account(tenant).num_running += 1

    def stop(self, tenant: str) -> None:
        """One sequence of the tenant runs no more."""
        self._accounts[tenant].num_running -= 1

    def gap(self) -> float:
        """The largest difference of weighted service between tenants that wait; 0 with fewer than two."""
        served = [account.served for account in self.waiting() if not account.is_background]
        return max(served) - min(served) if served else 0.0

    def check(self, running: Iterable[str]) -> None:
        """Asserts that the counts are right. ``running``: the tenant of each sequence that runs."""
        counted = {tenant: account.num_running for tenant, account in self._accounts.items()}
        assert {tenant: count for tenant, count in counted.items() if count} == Counter(running)

    def num_running(self, tenant: str) -> int:
        """How many sequences of the tenant run."""
        account = self._accounts.get(tenant)
        return account.num_running if account else 0

    def charge_input(self, tenant: str, tokens: float) -> None:
        account = self.account(tenant)
        account.served += INPUT_COST * tokens / account.weight

    def charge_output(self, tenant: str, tokens: int = 1) -> None:
        account = self.account(tenant)
        account.served += OUTPUT_COST * tokens / account.weight

    def charge_load(self, tenant: str, tokens: float) -> None:
        """Bringing an adapter has cost as much as so many tokens of input."""
        self.charge_input(tenant, tokens)

    def _floor(self, background: bool) -> float:
        served = [account.served for account in self.waiting() if account.is_background is background]
        return min(served, default=self._last_departed[background])

    def _sweep(self) -> None:
        """Forgets tenants with nothing here whom the floor would lift anyway. Amortised over arrivals."""
        if len(self._accounts) < self._sweep_at:
            return
        floors = {background: self._floor(background) for background in (False, True)}
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_waiting or account.num_running or account.served > floors[account.is_background]
        }
        self._sweep_at = max(1024, 2 * len(self._accounts))
