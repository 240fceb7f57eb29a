"""The ledger of a gateway: every request that an engine may have worked on, once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway import tasks
from gateway.accounts.entry import LedgerEntry, Settlement
from gateway.accounts.journal import Journal, adopt
from gateway.accounts.reaper import Reaper
from gateway.accounts.renew import Renewer
from gateway.accounts.settle import LedgerScript
from gateway.accounts.writer import LedgerWriter

logger = logging.getLogger(__name__)

_RENEW_S = 1.0
_ADOPT_EVERY_S = 30.0
_ADOPT_RETRY_S = 1.0


class Ledger:
    """What a request meets of it: `begin` once it is admitted, and `settle` when it has ended."""

    def __init__(self, writer: LedgerWriter, renewer: Renewer, script: LedgerScript) -> None:
        self.writer = writer
        self._renewer = renewer
        self._script = script

    def begin(self, entry: LedgerEntry, so_far: Callable[[], Settlement], *, admitted: bool) -> None:
        """Records the request from now on; `so_far` returns what it has used, whenever asked.

        One that Redis has not `admitted` is recorded at once: after a crash nothing else would know of it. So
        is one of a tenant that reapers may not know of.
        """
        self._renewer.add(entry, so_far)
        if not admitted or not self._script.lists(entry.tenant):
            self.writer.progress(entry)

    def settle(self, entry: LedgerEntry, settlement: Settlement, *, urgent: bool = False) -> None:
        """Has the request's end written. Never waits or raises; a second call for a request does nothing.

        `urgent`: it counts against a limit of concurrent requests, and the next may be there already.
        """
        try:
            if self._renewer.remove(entry):
                entry.settle(settlement)
                self.writer.end(entry, urgent=urgent)
        except Exception:
            logger.exception("request %s could not be settled", entry.id)


@asynccontextmanager
async def open_ledger(redis: Redis, *, journal: Path, lease_s: float, days: int) -> AsyncIterator[Ledger]:
    """Runs the ledger's tasks while the block does; after it, all that was recorded is in Redis or on disk.

    Args:
        journal: folder of what waits for Redis; that of gateways which are gone is taken over.
        lease_s: how long after its last word a gateway's requests are taken for lost.
        days: how long entries are kept.
    """
    every_s = min(_RENEW_S, lease_s / 4)
    script = LedgerScript(redis, lease_ms=int(lease_s * 1000))
    writer = LedgerWriter(script, journal)
    renewer = Renewer(writer, script, every_s=every_s)
    reaper = Reaper(redis, lease_s=lease_s, days=days)
    for part in (writer, renewer, reaper):
        part.start()
    adopting = tasks.start(_adopt(writer, journal), "ledger-adoption")
    try:
        yield Ledger(writer, renewer, script)
    finally:
        await tasks.cancel(adopting)
        await reaper.close()
        await renewer.close()
        await writer.close()


async def _adopt(writer: LedgerWriter, folder: Path) -> None:
    """Replays the journals of writers that are gone, now and whenever some turn up."""
    while True:
        pause_s = _ADOPT_EVERY_S
        journals: list[Journal] = []
        try:
            journals = await asyncio.to_thread(list, adopt(folder))
            for journal in journals:
                await writer.replay(journal)
                logger.info("replayed the journal of the writer %s, which is gone", journal.writer)
        except RedisError:
            pause_s = _ADOPT_RETRY_S  # the writer says that Redis is away
        except OSError as error:
            logger.warning("journals in %s cannot be read: %s", folder, error)
        finally:
            for journal in journals:
                journal.close()
        await asyncio.sleep(pause_s)
