"""One batch, worked on by the holder of its lease: from the check of its file to its output.

Every state is in Redis before the next step begins, so a batch goes on from wherever its holder was stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from redis.exceptions import RedisError

from adapters.file_store import FileStore
from adapters.store_threads import in_store_thread
from gateway import tasks
from gateway.batches import results
from gateway.batches.batch import Batch, Status
from gateway.batches.files import Files, StoredFile
from gateway.batches.line_calls import KeyGone, LineCalls
from gateway.batches.lines import InputGone, Line, check_lines, parse_line, raw_lines
from gateway.batches.store import Batches, Lease, LeaseLost
from gateway.batches.turn import Turn

logger = logging.getLogger(__name__)

LINES_AT_ONCE = 128
"""Of one batch: enough to keep a GPU busy, and few enough to wait in an engine's queue, or to run anew."""
SPILL_LINES = 500
SPILL_BYTES = 4 * 1024 * 1024
"""Results that gather in Redis before they move to the store."""
_READ_AT_ONCE = 64
_MOST_REST_S = 1800.0
"""How long what runs may go on when a batch is to rest: most that was generated of it would be lost."""
_RETRY_S = 0.5

_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_CANCELLED = ("batch_cancelled", "This request was not executed, since the batch was cancelled.")
_BUG = ("internal_error", "The server had an error while processing this request.")
_LOST_INPUT = ("file_not_found", "The input file is gone.")
_LOST_RESULTS = ("results_lost", "Results of this batch are gone from the store.")


@dataclass(frozen=True, slots=True)
class Desk:
    """What the work on batches needs."""

    batches: Batches
    files: Files
    store: FileStore
    renew_every_s: float


class BatchWork:
    """The work on one batch. `run` it once; `stop` and `rest` end it early, for another holder to go on."""

    def __init__(self, desk: Desk, lease: Lease, calls: LineCalls) -> None:
        self.lease = lease
        self._desk = desk
        self._calls = calls
        self._turn = Turn()
        self._drained: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.began_at = time.monotonic()
        self.is_leaving = False
        """Whether it was told to stop or to rest."""
        self._fault: Exception | None = None
        self._slots = asyncio.Semaphore(LINES_AT_ONCE)
        self._spilling = asyncio.Lock()
        self._kept_lines = self._kept_bytes = 0

    @property
    def is_stuck(self) -> bool:
        """Whether no line can go on now: a limit is used up, the tenant suspended, no engine there."""
        return 0 < len(self._running) == self._turn.paused

    def stop(self) -> None:
        """Has `run` return soon, with what was finished kept."""
        self.is_leaving = True
        self._turn.stop()

    def rest(self) -> None:
        """Has `run` return when what runs has ended. Call it once."""
        self.is_leaving = True
        self._turn.rest()
        self._drained = asyncio.get_running_loop().call_later(_MOST_REST_S, self._turn.stop)

    async def run(self) -> None:
        """Works until the batch has ended. Raises LeaseLost, RedisError and OSError; then it has not."""
        renewing = asyncio.create_task(self._renew(), name="batch-lease")
        source: StoredFile | None = None
        try:
            batch = await self._desk.batches.find(self.lease.tenant, self.lease.batch_id)
            if batch is None:
                return
            source = await self._desk.files.find(batch.tenant, batch.input_file_id, even_expired=True)
            status = batch.status
            if status in (Status.VALIDATING, Status.IN_PROGRESS):
                status = await self._answer(batch, source)
            if not self.is_leaving and status in (Status.FINALIZING, Status.CANCELLING):
                await self._finish(source)
        except KeyGone as error:
            await self._fail(("invalid_api_key", str(error)), source)
        except InputGone:
            await self._fail(_LOST_INPUT, source)
        finally:
            if self._drained is not None:
                self._drained.cancel()
            await tasks.cancel(renewing)

    # ---- the states -------------------------------------------------------------------------------------

    async def _answer(self, batch: Batch, source: StoredFile | None) -> Status:
        """Takes a batch that has lines to do as far as it comes. Returns its status. Raises InputGone."""
        if source is None:
            raise InputGone
        status = await self._check(batch, source) if batch.status is Status.VALIDATING else batch.status
        if status is not Status.IN_PROGRESS:
            return status
        await self._run_lines(batch, source)
        if self.is_leaving:
            return status
        return await self._desk.batches.move(
            self.lease, Status.FINALIZING, of=(Status.IN_PROGRESS,), fields={}
        )

    async def _check(self, batch: Batch, source: StoredFile) -> Status:
        """Looks at every line before the first runs. A file with a fault in it ends the batch."""
        total, faults = await in_store_thread(
            check_lines, self._desk.store, source.name, source.bytes, batch.endpoint
        )
        if faults:
            await self._desk.batches.finish(
                self.lease, Status.FAILED, {"errors": json.dumps(faults), "total": total}, []
            )
            return Status.FAILED
        return await self._desk.batches.move(
            self.lease, Status.IN_PROGRESS, of=(Status.VALIDATING,), fields={"total": total}
        )

    async def _run_lines(self, batch: Batch, source: StoredFile) -> None:
        """Runs the lines that have no result. Returns early when the batch is cancelled, expires or rests."""
        done = await self._desk.batches.done(batch.tenant, batch.id)
        kept = await self._desk.batches.results(batch.tenant, batch.id)  # of earlier turns
        self._kept_lines, self._kept_bytes = len(kept), sum(map(len, kept.values()))
        lines = _lines_to_do(self._desk.store, source, batch.endpoint, done)
        left_s = max(0.0, batch.expires_at - time.time())
        alarm = asyncio.get_running_loop().call_later(left_s, self._turn.stop)
        running = self._running
        try:
            while not self._turn.is_resting:
                some = await in_store_thread(lambda: list(islice(lines, _READ_AT_ONCE)))
                if not some:
                    break
                for line in some:
                    await self._slots.acquire()
                    if self._turn.is_resting:
                        break
                    task = asyncio.create_task(self._run_line(batch, line), name="batch-line")
                    running.add(task)
                    task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)
        finally:
            alarm.cancel()
            self._turn.stop()
            if running:
                await asyncio.wait(running)
        if self._fault is not None:
            raise self._fault

    async def _run_line(self, batch: Batch, line: Line) -> None:
        try:
            answered = await self._answer_line(batch, line)
            if answered is not None:
                result, failed = answered
                await self._record(line.number, result, failed=failed)
        except Exception as error:
            self._fault = self._fault or error
            self._turn.stop()
        finally:
            self._slots.release()

    async def _answer_line(self, batch: Batch, line: Line) -> tuple[bytes, bool] | None:
        """A line's result, and whether it failed; None where its turn ends first. A bug that it meets is its
        own failure: tried again, it would keep the batch from ending, and others would run anew each time.
        """
        try:
            answer = await self._calls.answer(batch, line, self._turn)
            if answer is None:
                return None
            return results.result_of(
                line.custom_id, status=answer.status, request_id=answer.request_id, body=answer.body
            )
        except (LeaseLost, KeyGone, RedisError, OSError):
            raise
        except Exception:
            logger.exception("line %d of the batch %s failed", line.number, batch.id)
            return results.unanswered(line.custom_id, *_BUG), True

    async def _record(self, line: int, result: bytes, *, failed: bool) -> None:
        """Keeps a result; while Redis is away, until it is back. Has results moved when they are many."""
        while True:
            try:
                await self._desk.batches.record(self.lease, line, result, failed=failed)
                break
            except (RedisError, OSError):
                if self.is_leaving and self._turn.is_stopped:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._kept_lines += 1
        self._kept_bytes += len(result)
        if self._kept_lines >= SPILL_LINES or self._kept_bytes >= SPILL_BYTES:
            async with self._spilling:
                if self._kept_lines >= SPILL_LINES or self._kept_bytes >= SPILL_BYTES:
                    await self._spill()

    async def _spill(self) -> None:
        """Moves the results from Redis to the store."""
        self._kept_lines = self._kept_bytes = 0
        tenant, batch_id = self.lease.tenant, self.lease.batch_id
        kept = await self._desk.batches.results(tenant, batch_id)
        if not kept:  # those that were counted since then went with the last ones
            return
        name = await in_store_thread(results.write_segment, self._desk.store, tenant, batch_id, kept.values())
        await self._desk.batches.spill(self.lease, name, list(kept))

    async def _finish(self, source: StoredFile | None) -> None:
        """Makes the files of all results, and ends the batch."""
        batch = await self._desk.batches.find(self.lease.tenant, self.lease.batch_id)
        if batch is None:
            return
        if batch.status is Status.CANCELLING:
            await self._end(batch, Status.CANCELLED, _CANCELLED, source)
        elif batch.completed + batch.failed < batch.total:
            await self._end(batch, Status.EXPIRED, _EXPIRED, source)
        else:
            await self._end(batch, Status.COMPLETED, _EXPIRED, source)

    async def _fail(self, why: tuple[str, str], source: StoredFile | None) -> None:
        """Ends a batch that cannot go on."""
        batch = await self._desk.batches.find(self.lease.tenant, self.lease.batch_id)
        if batch is None:
            return
        if batch.status is Status.CANCELLING:
            await self._end(batch, Status.CANCELLED, _CANCELLED, source)
        else:
            await self._end(batch, Status.FAILED, why, source)

    async def _end(
        self, batch: Batch, status: Status, why: tuple[str, str], source: StoredFile | None
    ) -> None:
        """Ends a batch with what there is of it; `why` is said of the lines that have no answer."""
        desk, key = self._desk, (batch.tenant, batch.id)
        segments = await desk.batches.segments(*key)
        kept, done = await desk.batches.results(*key), await desk.batches.done(*key)
        counted = batch.completed + batch.failed
        total = batch.total or counted
        output, error, whole = await in_store_thread(
            lambda: results.write_files(
                desk.store,
                batch,
                segments,
                chain(
                    kept.values(),
                    results.missing(desk.store, source, batch, done, *why)
                    if source is not None and counted < total
                    else (),
                ),
            )
        )
        fields: dict[str, str | int] = {
            "output_file_id": output.id if output else "",
            "error_file_id": error.id if error else "",
            "failed": batch.failed + total - counted,
        }
        if status is Status.COMPLETED and not whole:
            status, why = Status.FAILED, _LOST_RESULTS
        if status is Status.FAILED:
            param = "input_file_id" if why is _LOST_INPUT else None
            fields["errors"] = json.dumps([{"code": why[0], "message": why[1], "param": param, "line": None}])
        await desk.batches.finish(self.lease, status, fields, [file for file in (output, error) if file])
        for name in segments:
            await in_store_thread(desk.store.delete, name)

    # ---- the lease --------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Keeps the lease, and learns that the batch was cancelled."""
        while True:
            await asyncio.sleep(self._desk.renew_every_s)
            try:
                if await self._desk.batches.renew(self.lease) is Status.CANCELLING:
                    self._turn.stop()
            except LeaseLost as error:
                self._fault = error
                self._turn.stop()
                return
            except (RedisError, OSError) as error:
                logger.debug("the lease of %s is not renewed: %s", self.lease.batch_id, error)


def _lines_to_do(store: FileStore, source: StoredFile, endpoint: str, done: bytes) -> Iterator[Line]:
    """The requests that have no result yet. Blocks; raises OSError, InputGone."""
    for number, raw in raw_lines(store, source.name, source.bytes):
        if not results.is_done(done, number):
            yield parse_line(number, raw, endpoint)
