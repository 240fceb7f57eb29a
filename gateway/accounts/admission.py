"""May this request run? One Redis script says so, for all limits of its tenant, key and adapter at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.script_batches import ScriptBatches
from gateway.accounts.entry import LedgerEntry
from gateway.accounts.headers import NO_STANDINGS, Rule, Standings, refusal
from gateway.accounts.rules import amounts_for, background_share, bound_output, output_tokens_of, rules_of
from gateway.accounts.windows import ADMIT, CONCURRENT, MONTH_TOKENS, REQUESTS, root_of
from gateway.auth import Principal
from gateway.errors import ApiError
from gateway.redis_health import RedisHealth
from gateway.resolve import ResolvedModel
from protos.engine_pb2 import Submit

logger = logging.getLogger(__name__)

_WINDOW_MS = 60_000
_HOUR_MS = 3_600_000
_MAX_SPENT = _MAX_ROOMS = 10_000


class Room:
    """How full a limit of concurrent requests was when Redis last said so."""

    __slots__ = ("is_scarce",)

    def __init__(self) -> None:
        self.is_scarce = False
        """Whether half of it was taken."""


@dataclass(slots=True)
class Admission:
    """One request that may run, and its ledger entry as far as it is known. To be settled when it ends."""

    entry: LedgerEntry
    arrived_at: float
    """`time.perf_counter()` when the request came."""
    standings: Standings = NO_STANDINGS
    admitted: bool = True
    """False: Redis was away, so nothing is held, or nobody knows whether it is."""
    rooms: Sequence[Room] = ()
    """Of the limits of concurrent requests that it counts against."""

    def headers(self) -> dict[str, str]:
        """Returns `x-ratelimit-*`, for whatever is answered."""
        return self.standings.headers()

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns them as ASGI has them."""
        return self.standings.raw_headers()

    @property
    def awaited(self) -> bool:
        """Whether another request may soon need the room that the end of this one makes."""
        return any(room.is_scarce for room in self.rooms)


@dataclass(slots=True)
class _Asked:
    """What Redis has been asked for one request."""

    entry: LedgerEntry
    caller: Principal
    rules: Sequence[Rule]
    amounts: Sequence[int]
    """What it asks of each."""
    met: Sequence[Rule]
    """The rules, or for background work less."""
    at: float
    """`time.monotonic()`."""
    reply: asyncio.Future[bytes | str] | None
    """None: it was not asked, since it is away."""


class Admissions:
    """Admits requests, and refuses from memory while it knows that a window is used up.

    While Redis is away every request is admitted: limits are not worth a failure. For one event loop.
    """

    def __init__(
        self,
        redis: Redis,
        health: RedisHealth,
        *,
        lease_ms: int,
        on_refusal: Callable[[str, str, str], None],
        window_ms: int = _WINDOW_MS,
    ) -> None:
        """`lease_ms` is how long a request counts as running after its gateway was last heard of.
        `on_refusal` is called with the tenant, the adapter or "", and the kind of limit before each 429.
        """
        self._health = health
        self._ask = ScriptBatches(redis, redis.register_script(ADMIT))
        self._lease_ms = lease_ms
        self._on_refusal = on_refusal
        self._window_ms = window_ms
        self._spent: dict[tuple[str, str], tuple[int, float]] = {}  # (tenant, subject): its limit, till when
        self._rooms: dict[tuple[str, str], Room] = {}  # as _spent
        self._holds = True  # what it last told of

    def prepare(self) -> None:
        """Begins to connect, so that the first requests need not."""
        self._ask.prepare()

    def refuse_spent(self, caller: Principal, adapter: str = "") -> None:
        """Raises ApiError 429 where Redis has said that a window of requests is used up, until it ends.

        That is exact, since requests are never given back; a limit that has changed is asked for anew.
        """
        if not self._spent:
            return
        now = time.monotonic()
        for rule in rules_of(caller, adapter):
            if rule.kind != REQUESTS:
                continue
            most, until = self._spent.get((caller.tenant_id, rule.subject), (0, 0.0))
            if most == rule.most and now < until:
                spent = Standings([rule], [1], used=[most], reset_ms=[math.ceil((until - now) * 1000)])
                raise self._refusal(caller, adapter, spent)

    def admit(
        self,
        caller: Principal,
        model: ResolvedModel,
        submits: Sequence[Submit],
        *,
        request_id: str,
        arrived_at: float,
        route: str,
        open_ended: bool,
        background: bool = False,
    ) -> Coroutine[Any, Any, Admission]:
        """Takes what the submits may need from every limit, or nothing from any.

        Asks Redis at once, so that its caller can do other work before it awaits what this returns.
        `request_id` is the request's own, and `arrived_at` by `time.perf_counter`. `open_ended`: the client
        has not said how long the answer may be; then `bound_output` lowers `max_tokens` of the submits.
        `background`: nobody waits for it, so it meets a share of each limit only, whoever uses the others'.
        Raises ApiError: 429 with the limit that refuses, 400 when the request can never be admitted. Waits
        for Redis as long as a call may take; once that was in vain, not at all. If its caller is cancelled
        meanwhile, what may have been taken comes back when the lease ends.
        """
        rules = rules_of(caller, model.adapter_name)
        input_tokens = sum(len(submit.prompt_tokens) for submit in submits)
        if open_ended:
            bound_output(submits, rules, input_tokens)
        amounts = amounts_for(rules, input_tokens, output_tokens_of(submits))
        arrived_ms = int((time.time() - (time.perf_counter() - arrived_at)) * 1000)
        entry = LedgerEntry(
            request_id,
            arrived_ms,
            caller.tenant_id,
            caller.key_id,
            model.served_name,
            model.adapter_name,
            str(model.adapter.version) if model.adapter else "",
            model.adapter_digest.hex(),
            route,
        )
        met = list(map(background_share, rules, amounts)) if background else rules
        reply = self._ask_for(entry, met, amounts)
        asked = _Asked(entry, caller, rules, amounts, met, time.monotonic(), reply)
        return self._admission(asked, arrived_at)

    async def _admission(self, asked: _Asked, arrived_at: float) -> Admission:
        """Awaits what Redis says. Raises as `admit`."""
        entry, caller, rules, met = asked.entry, asked.caller, asked.rules, asked.met
        reply = None if asked.reply is None else await self._reply(asked.reply)
        if reply is None:
            return Admission(entry, arrived_at, admitted=False)
        admitted, now_ms, *figures = reply
        used, starts = figures[::2], figures[1::2]
        standings = Standings(met, asked.amounts, used, self._resets(met, starts, now_ms))
        rooms = [
            self._room(caller.tenant_id, rule, in_use)
            for rule, in_use in zip(rules, used, strict=True)
            if rule.kind == CONCURRENT
        ]
        if not admitted:
            if met is rules:  # else others still have what background work may not take
                self._remember(caller.tenant_id, standings, asked.at)
            raise self._refusal(caller, entry.adapter, standings)
        return Admission(entry, arrived_at, standings, rooms=rooms)

    def _ask_for(
        self, entry: LedgerEntry, rules: Sequence[Rule], amounts: Sequence[int]
    ) -> asyncio.Future[bytes | str] | None:
        """Runs the script, or returns None while Redis is away."""
        if self._health.is_away:
            return None
        asked = orjson.dumps(
            {
                "lease": self._lease_ms,
                "window": self._window_ms,
                "limits": [[*rule, amount] for rule, amount in zip(rules, amounts, strict=True)],
            }
        )
        return self._ask([root_of(entry.tenant)], [entry.id, asked, entry.to_wire()])

    async def _reply(self, coming: asyncio.Future[bytes | str]) -> list[int] | None:
        """Returns what the script says, or None when Redis is away."""
        try:
            reply = await coming
        except (RedisError, OSError, TimeoutError) as error:
            self._health.failed()
            if self._holds:
                logger.warning(
                    "limits are not held while Redis does not answer: %s: %s", type(error).__name__, error
                )
            self._holds = False
            return None
        if not self._holds:
            logger.warning("limits are held again")
            self._holds = True
        return orjson.loads(reply)

    def _room(self, tenant_id: str, rule: Rule, used: int) -> Room:
        """Returns the room of a limit, as all its running requests share it, with what is known of it now."""
        key = (tenant_id, rule.subject)
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) >= _MAX_ROOMS:
                self._rooms.clear()  # what runs keeps its own, which is only told no more
            room = self._rooms[key] = Room()
        room.is_scarce = 2 * used >= rule.most
        return room

    def _resets(self, rules: Sequence[Rule], starts: Sequence[int], now_ms: int) -> list[int]:
        """Returns in how many ms each is as if nothing were used, from when its window began, in ms."""
        passed = now_ms - self._window_ms
        resets = [start_ms - passed if start_ms else 0 for start_ms in starts]
        for at, rule in enumerate(rules):
            if rule.kind == MONTH_TOKENS:
                resets[at] = _end_of_month(now_ms // _HOUR_MS) - now_ms
        return resets

    def _remember(self, tenant_id: str, standings: Standings, asked_at: float) -> None:
        """Keeps what refuses every request until a known time, counted from before Redis was asked."""
        if len(self._spent) >= _MAX_SPENT:
            now = time.monotonic()
            self._spent = {key: value for key, value in self._spent.items() if value[1] > now}
        for at in standings.refusing():
            rule = standings.rules[at]
            if rule.kind == REQUESTS:
                spent_until = asked_at + standings.reset_ms[at] / 1000
                self._spent[tenant_id, rule.subject] = (rule.most, spent_until)

    def _refusal(self, caller: Principal, adapter: str, standings: Standings) -> ApiError:
        error = refusal(standings)
        self._on_refusal(caller.tenant_id, adapter, error.param or "")
        return error


@lru_cache(maxsize=4)
def _end_of_month(hour: int) -> int:
    """Returns when the UTC month ends that an hour is in, counted from 1970; in ms since then."""
    now = datetime.fromtimestamp(hour * _HOUR_MS // 1000, UTC)
    following = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return int(following.timestamp()) * 1000
