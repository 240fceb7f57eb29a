"""Brings what happens to requests into the ledger, behind the backs of their clients."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from redis.exceptions import RedisError

from gateway import tasks
from gateway.accounts.entry import LedgerEntry
from gateway.accounts.journal import Journal
from gateway.accounts.settle import Kind, LedgerScript, Record

logger = logging.getLogger(__name__)

_MAX_BATCH = 256
_GATHER_S = 0.025
_RETRY_S = 0.5
_MAX_HELD = 100_000
_CLOSE_S = 5.0


class LedgerWriter:
    """Takes records at once, numbers them, and has one task send them, in order.

    A round trip costs far more than a record in it, so the task sends what came while the last one ran, and
    waits some ms for more before it begins another. What Redis does not take, it appends to a journal, so
    that a crash loses none of it; from then on all records go there, until the journal has been replayed.
    Memory holds records only while the disk takes none either, and then a bounded number of them.
    """

    def __init__(self, script: LedgerScript, folder: Path) -> None:
        """The journal lies in `folder`, which is made when it is needed."""
        self.name = secrets.token_hex(8)
        self.dropped = 0
        """Records of which neither Redis nor the disk knows, and for which memory had no more room."""
        self._script = script
        self._folder = folder
        self._last = self._taken = 0  # numbers of the last record, and of the last one that Redis has
        self._records: deque[Record] = deque()
        self._journal: Journal | None = None
        self._disk_fails = False
        self._retry_at: float | None = None  # time.monotonic(); None while Redis takes all
        self._news, self._urgent = asyncio.Event(), asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    # ---- what others call ---------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many records wait for Redis, in memory and on the disk."""
        return self._last - self._taken

    def progress(self, entry: LedgerEntry) -> None:
        """Records what a running request has used so far. Returns at once."""
        if len(self._records) < _MAX_HELD:
            self._add(Kind.PROGRESS, entry)

    def end(self, entry: LedgerEntry, *, urgent: bool = False) -> None:
        """Records how a request ended, after which nothing of it may be recorded. Returns at once.

        `urgent`: others wait for what it holds, so it is sent without waiting for company.
        """
        if len(self._records) >= _MAX_HELD:
            self._records.popleft()
            self.dropped += 1
        self._add(Kind.END, entry)
        if urgent:
            self._urgent.set()

    def start(self) -> None:
        """Starts the task. Waits for nothing."""
        self._task = tasks.start(self._run(), "ledger-writer")

    async def close(self) -> None:
        """Ends the task once Redis or the disk has all records; waits some seconds at most."""
        self._closing = True
        self._news.set()
        self._urgent.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_S)
            await tasks.cancel(self._task)
        await self._store()
        if self._records:
            logger.error(
                "%d records of the ledger are lost: neither Redis nor the disk takes them", self.waiting
            )
        if self._journal is not None:
            await asyncio.to_thread(self._journal.close)

    async def replay(self, journal: Journal) -> None:
        """Sends all that a journal holds, under its writer's name. Raises RedisError and OSError."""
        while not journal.empty:
            chunk = await asyncio.to_thread(journal.read)
            for at in range(0, len(chunk.records), _MAX_BATCH):
                await self._send(journal.writer, chunk.records[at : at + _MAX_BATCH])
            await asyncio.to_thread(journal.forget, chunk)

    # ---- the task -----------------------------------------------------------------------------------

    def _add(self, kind: Kind, entry: LedgerEntry) -> None:
        self._last += 1
        self._records.append(Record(self._last, entry.tenant, kind, entry.to_wire()))
        self._idle.clear()
        self._news.set()

    async def _run(self) -> None:
        while not (self._closing and (self._idle.is_set() or self._retry_at is not None)):
            await self._wait()
            await self._step()

    async def _wait(self) -> None:
        """Returns when there are new records, some of them if they may wait, or when a retry is due."""
        if self._retry_at is not None:
            await _set(self._news, self._retry_at - time.monotonic())
        else:
            await self._news.wait()
            if not self._closing:
                await _set(self._urgent, _GATHER_S)
        self._news.clear()
        self._urgent.clear()

    async def _step(self) -> None:
        """Brings all there is to Redis; while that is away, to the disk."""
        if self._retry_at is not None:
            due = time.monotonic() >= self._retry_at
            if due or not self._disk_fails:
                await self._store()
            if not due:
                return
        try:
            await self._catch_up()
        except (RedisError, OSError) as error:
            self._went_away(error)
        else:
            self._returned()

    async def _catch_up(self) -> None:
        """Sends all there is, what waits on the disk first. Raises RedisError and OSError."""
        if self._journal is not None:
            await self.replay(self._journal)
        while self._records:
            batch = list(islice(self._records, _MAX_BATCH))
            await self._send(self.name, batch)
            self._taken = batch[-1].number
            self._forget(batch)
        self._taken = self._last
        self._idle.set()

    def _forget(self, batch: Sequence[Record]) -> None:
        """Removes what has been sent or stored; the oldest may have been dropped meanwhile."""
        last = batch[-1].number
        while self._records and self._records[0].number <= last:
            self._records.popleft()

    async def _send(self, writer: str, records: Sequence[Record]) -> None:
        for fault in await self._script.apply(writer, records):
            logger.error("the ledger cannot take a record: %s", fault)

    def _went_away(self, error: Exception) -> None:
        if self._retry_at is None:
            logger.warning("the ledger waits on the disk while Redis does not take it: %s", error)
        self._retry_at = time.monotonic() + _RETRY_S
        self._news.set()  # to the disk with what is left, now

    def _returned(self) -> None:
        if self._retry_at is not None:
            logger.info("the ledger is in Redis again")
            self._retry_at = None
            self._script.list_again()

    async def _store(self) -> None:
        """Moves all records from memory to the disk, or keeps them when it takes none."""
        batch = list(self._records)
        if not batch:
            return
        try:
            await asyncio.to_thread(self._append, batch)
        except OSError as error:
            if not self._disk_fails:
                logger.error("the ledger's journal in %s cannot be written: %s", self._folder, error)
            self._disk_fails = True
            return
        self._disk_fails = False
        self._forget(batch)

    def _append(self, batch: Sequence[Record]) -> None:
        if self._journal is None:
            self._journal = Journal.create(self._folder, self.name)
        self._journal.append(batch)


async def _set(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits until an event is set, or for this long. Returns whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
