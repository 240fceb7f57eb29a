"""Which limits a caller's request meets, and how much it asks of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gateway.accounts.headers import Rule, never_fits
from gateway.accounts.windows import (
    CONCURRENT,
    INPUT_TOKENS,
    MONTH_TOKENS,
    OUTPUT_TOKENS,
    REQUESTS,
    TENANT,
)
from gateway.auth import Principal
from gateway.limits import NO_RATES, RateLimits, TenantLimits
from protos.engine_pb2 import Submit

OPEN_ENDED_SHARE = 1 / 4
"""Of a limit on tokens: what an answer may have whose length the client has not said."""
BACKGROUND_SHARE = 1 / 2
"""Of a limit: what may be used of it when background work is admitted."""


def rules_of(caller: Principal, adapter: str) -> Sequence[Rule]:
    """Returns all limits that a request meets: its tenant's, its key's, and its adapter's if it has any."""
    return _rules(
        caller.limits, caller.key_id, caller.key_limits, adapter, caller.adapter_limits.get(adapter, NO_RATES)
    )


@lru_cache(maxsize=4096)
def _rules(
    tenant: TenantLimits, key_id: str, key: RateLimits, adapter: str, of_adapter: RateLimits
) -> Sequence[Rule]:
    rules: list[Rule] = []
    _add(rules, TENANT, tenant.rates)
    if tenant.tokens_per_month is not None:
        rules.append(Rule(TENANT, MONTH_TOKENS, tenant.tokens_per_month))
    _add(rules, f"key:{key_id}", key)
    _add(rules, f"adapter:{adapter}", of_adapter)
    return tuple(rules)


def _add(rules: list[Rule], subject: str, rates: RateLimits) -> None:
    if rates is NO_RATES:
        return
    for kind, most in (
        (REQUESTS, rates.requests_per_minute),
        (INPUT_TOKENS, rates.input_tokens_per_minute),
        (OUTPUT_TOKENS, rates.output_tokens_per_minute),
        (CONCURRENT, rates.concurrent_requests),
    ):
        if most is not None:
            rules.append(Rule(subject, kind, most))


def amounts_for(rules: Sequence[Rule], input_tokens: int, output_tokens: int) -> list[int]:
    """Returns what a request of so many tokens asks of each rule.
    Raises ApiError 400 when one could not even be met with nothing used.
    """
    of_kind = {
        INPUT_TOKENS: input_tokens,
        OUTPUT_TOKENS: output_tokens,
        MONTH_TOKENS: input_tokens + output_tokens,
    }
    amounts = [of_kind.get(rule.kind, 1) for rule in rules]
    for rule, amount in zip(rules, amounts, strict=True):
        if amount > rule.most:
            raise never_fits(rule, amount)
    return amounts


def background_share(rule: Rule, amount: int) -> Rule:
    """Returns what background work meets in place of a rule, so that the rest is for what is waited for.

    What needs more than that share is admitted while nothing of the limit is used. A month's tokens are all
    for whoever comes first: they are a budget, and nobody waits until they are free again.
    """
    if rule.kind == MONTH_TOKENS:
        return rule
    return rule._replace(most=max(int(rule.most * BACKGROUND_SHARE), amount))


def output_tokens_of(submits: Sequence[Submit]) -> int:
    """Returns how many tokens the submits generate at most, over all choices."""
    return sum(submit.max_tokens * len(submit.seeds) for submit in submits)


def bound_output(submits: Sequence[Submit], rules: Sequence[Rule], input_tokens: int) -> None:
    """Lowers `max_tokens` of the submits so that all choices together take `OPEN_ENDED_SHARE` of a rule.

    Answers are reserved for in full, and an answer of no stated length would take all there is: then the
    next request would be refused, though most answers end far sooner. Leaves what cannot be lowered so far:
    at least one token, and `min_tokens`, per choice.
    """
    most = {OUTPUT_TOKENS: 0, MONTH_TOKENS: input_tokens}
    rooms = [rule.most - most[rule.kind] for rule in rules if rule.kind in most]
    if not rooms:
        return
    share = int(min(rooms) * OPEN_ENDED_SHARE) // sum(len(submit.seeds) for submit in submits)
    for submit in submits:
        submit.max_tokens = min(submit.max_tokens, max(share, submit.min_tokens, 1))
