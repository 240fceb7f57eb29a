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
from gateway import tasks
from gateway.batches import results
from gateway.batches.batch import Batch, Status
from gateway.batches.files import Files, StoredFile
from gateway.batches.line_calls import KeyGone, LineCalls
from gateway.batches.lines import Line, check_lines, parse_line, raw_lines
from gateway.batches.store import Batches, Lease, LeaseLost

logger = logging.getLogger(__name__)

LINES_AT_ONCE = 128
"""Of one batch: enough to keep a GPU busy, and few enough to wait in an engine's queue, or to run anew."""
SPILL_LINES = 500
SPILL_BYTES = 4 * 1024 * 1024
"""Results that gather in Redis before they move to the store."""
_READ_AT_ONCE = 64
_RETRY_S = 0.5

_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_CANCELLED = ("batch_cancelled", "This request was not executed, since the batch was cancelled.")
_LOST_INPUT = json.dumps(
    [{"code": "file_not_found", "message": "The input file is gone.", "param": "input_file_id", "line": None}]
)


@dataclass(frozen=True, slots=True)
class Desk:
    """What the work on batches needs."""

    batches: Batches
    files: Files
    store: FileStore
    renew_every_s: float


class BatchWork:
    """The work on one batch. `run` it once; `stop` ends it early, for another holder to go on."""

    def __init__(self, desk: Desk, lease: Lease, calls: LineCalls) -> None:
        self.lease = lease
        self._desk = desk
        self._calls = calls
        self._stop = asyncio.Event()
        self._stopping = False
        self._fault: Exception | None = None
        self._slots = asyncio.Semaphore(LINES_AT_ONCE)
        self._spilling = asyncio.Lock()
        self._kept_lines = self._kept_bytes = 0

    def stop(self) -> None:
        """Has `run` return soon, with what was finished kept."""
        self._stopping = True
        self._end_lines()

    async def run(self) -> None:
        """Works until the batch has ended. Raises LeaseLost, RedisError and OSError; then it has not."""
        renewing = asyncio.create_task(self._renew(), name="batch-lease")
        source: StoredFile | None = None
        try:
            batch = await self._desk.batches.find(self.lease.tenant, self.lease.batch_id)
            if batch is None:
                return
            source = await self._desk.files.find(batch.tenant, batch.input_file_id, even_expired=True)
            if source is None:
                await self._desk.batches.finish(self.lease, Status.FAILED, {"errors": _LOST_INPUT}, [])
                return
            status = await self._check(batch, source) if batch.status is Status.VALIDATING else batch.status
            if status is Status.IN_PROGRESS:
                await self._run_lines(batch, source)
                if not self._stopping:
                    states = (Status.IN_PROGRESS,)
                    status = await self._desk.batches.move(
                        self.lease, Status.FINALIZING, of=states, fields={}
                    )
            if not self._stopping and status in (Status.FINALIZING, Status.CANCELLING):
                await self._finish(source)
        except KeyGone as error:
            await self._fail(str(error), source)
        finally:
            await tasks.cancel(renewing)

    # ---- the states -------------------------------------------------------------------------------------

    async def _check(self, batch: Batch, source: StoredFile) -> Status:
        """Looks at every line before the first runs. A file with a fault in it ends the batch."""
        total, faults = await asyncio.to_thread(
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
        """Runs the lines that have no result. Returns early when the batch is cancelled or expires."""
        done = await self._desk.batches.done(batch.tenant, batch.id)
        lines = _lines_to_do(self._desk.store, source, batch.endpoint, done)
        left_s = max(0.0, batch.expires_at - time.time())
        alarm = asyncio.get_running_loop().call_later(left_s, self._end_lines)
        running: set[asyncio.Task[None]] = set()
        try:
            while not self._stop.is_set():
                some = await asyncio.to_thread(lambda: list(islice(lines, _READ_AT_ONCE)))
                if not some:
                    break
                for line in some:
                    await self._slots.acquire()
                    if self._stop.is_set():
                        break
                    task = asyncio.create_task(self._run_line(batch, line), name="batch-line")
                    running.add(task)
                    task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)
        finally:
            alarm.cancel()
            self._end_lines()
            if running:
                await asyncio.wait(running)
        if self._fault is not None:
            raise self._fault

    async def _run_line(self, batch: Batch, line: Line) -> None:
        try:
            answer = await self._calls.answer(batch, line, self._stop)
            if answer is not None:
                result, failed = results.result_of(
                    line.custom_id, status=answer.status, request_id=answer.request_id, body=answer.body
                )
                await self._record(line.number, result, failed=failed)
        except Exception as error:
            self._fault = self._fault or error
            self._end_lines()
        finally:
            self._slots.release()

    async def _record(self, line: int, result: bytes, *, failed: bool) -> None:
        """Keeps a result; while Redis is away, until it is back. Has results moved when they are many."""
        while True:
            try:
                await self._desk.batches.record(self.lease, line, result, failed=failed)
                break
            except (RedisError, OSError):
                if self._stopping:
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
        name = await asyncio.to_thread(
            results.write_segment, self._desk.store, tenant, batch_id, kept.values()
        )
        await self._desk.batches.spill(self.lease, name, list(kept))

    async def _finish(self, source: StoredFile) -> None:
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

    async def _fail(self, message: str, source: StoredFile | None) -> None:
        """Ends a batch whose key is taken no more."""
        batch = await self._desk.batches.find(self.lease.tenant, self.lease.batch_id)
        if batch is not None and source is not None:
            await self._end(batch, Status.FAILED, ("invalid_api_key", message), source)

    async def _end(self, batch: Batch, status: Status, why: tuple[str, str], source: StoredFile) -> None:
        """Ends a batch; `why` is said of the lines that have no answer."""
        desk, key = self._desk, (batch.tenant, batch.id)
        segments = await desk.batches.segments(*key)
        kept, done = await desk.batches.results(*key), await desk.batches.done(*key)
        counted = batch.completed + batch.failed
        total = batch.total or counted
        output, error = await asyncio.to_thread(
            lambda: results.write_files(
                desk.store,
                batch,
                segments,
                chain(
                    kept.values(),
                    results.missing(desk.store, source, batch, done, *why) if counted < total else (),
                ),
            )
        )
        fields: dict[str, str | int] = {
            "output_file_id": output.id if output else "",
            "error_file_id": error.id if error else "",
            "failed": batch.failed + total - counted,
        }
        if status is Status.FAILED:
            fields["errors"] = json.dumps([{"code": why[0], "message": why[1], "param": None, "line": None}])
        await desk.batches.finish(self.lease, status, fields, [file for file in (output, error) if file])
        for name in segments:
            await asyncio.to_thread(desk.store.delete, name)

    # ---- the lease --------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Keeps the lease, and learns that the batch was cancelled."""
        while True:
            await asyncio.sleep(self._desk.renew_every_s)
            try:
                if await self._desk.batches.renew(self.lease) is Status.CANCELLING:
                    self._end_lines()
            except LeaseLost as error:
                self._fault = error
                self._end_lines()
                return
            except (RedisError, OSError) as error:
                logger.debug("the lease of %s is not renewed: %s", self.lease.batch_id, error)

    def _end_lines(self) -> None:
        self._stop.set()


def _lines_to_do(store: FileStore, source: StoredFile, endpoint: str, done: bytes) -> Iterator[Line]:
    """The requests that have no result yet. Blocks; raises OSError."""
    for number, raw in raw_lines(store, source.name, source.bytes):
        if not results.is_done(done, number):
            yield parse_line(number, raw, endpoint)
