"""One line of a batch as a call of its route, tried until it is answered for good."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import count

import orjson
from redis.exceptions import RedisError

from gateway.auth import Authenticator, Principal
from gateway.batches.batch import Batch
from gateway.batches.lines import Line
from gateway.batches.turn import Turn
from gateway.deadlines import MAX_TIMEOUT_S
from gateway.errors import ApiError
from gateway.inner_calls import InnerAnswer, InnerCall, InnerCalls
from gateway.origin import Origin

BATCH = Origin("batch", is_background=True)
_TRY_AGAIN = frozenset({429, 503, 504})
"""A limit, no engine, or no turn for as long as one call may wait; what ends a batch's time ends the line."""
_MOST_PAUSE_S = 30.0
_SUSPENDED_S = 5.0


class KeyGone(Exception):
    """The API key that made the batch is taken no more."""


class LineCalls:
    """Runs lines with the rights and limits of the key that made their batch, as they are then."""

    def __init__(self, calls: InnerCalls, authenticator: Authenticator) -> None:
        self._calls = calls
        self._authenticator = authenticator

    async def answer(self, batch: Batch, line: Line, turn: Turn) -> InnerAnswer | None:
        """Returns what a line was answered, however often it had to be tried; None where its turn ends first.

        What may be answered otherwise later, a limit that is used up or an engine that is away, is tried
        again. Raises KeyGone.
        """
        body = orjson.dumps(line.body)
        for tried in count():
            if turn.is_resting:
                break
            caller = await self._caller(batch)
            if caller is None:
                await turn.pause(_SUSPENDED_S)
                continue
            left_s = batch.expires_at - time.time()
            call = self._calls.prepare(
                batch.endpoint,
                body,
                caller=caller,
                origin=BATCH,
                timeout_s=min(max(left_s, 1.0), MAX_TIMEOUT_S),
            )
            answer = await _answer_until(call, turn)
            if answer is None:
                return None
            if answer.status not in _TRY_AGAIN:
                return answer
            await turn.pause(_pause_s(answer, tried))
        return None

    async def _caller(self, batch: Batch) -> Principal | None:
        """Whose batch it is; None where that cannot be said now, or the tenant is suspended for a while."""
        try:
            return await self._authenticator.principal_of(batch.key)
        except ApiError as error:
            if error.status == 401:
                message = "The API key that made this batch was revoked or has expired."
                raise KeyGone(message) from None
            return None
        except (RedisError, OSError):
            return None


async def _answer_until(call: InnerCall, turn: Turn) -> InnerAnswer | None:
    """The call's answer; None if the turn is stopped before it is there."""
    answering = asyncio.ensure_future(call.answer())
    stopping = asyncio.ensure_future(turn.stopped())
    try:
        await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return None
    finally:
        stopping.cancel()
        call.close()
        await asyncio.wait([answering])


def _pause_s(answer: InnerAnswer, tried: int) -> float:
    """When to try again: as asked for, and later the more often it was in vain. Spread a little, so that
    lines do not come all at once.
    """
    asked = float(answer.headers.get("retry-after", "1"))
    return min(max(asked, 0.5 * 2 ** min(tried, 10)), _MOST_PAUSE_S) * random.uniform(1.0, 1.25)
