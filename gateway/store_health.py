"""Whether the store answers: known before somebody needs it, and to the operator."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from adapters.blob_store import BlobStore, StoreRefused
from gateway import tasks

logger = logging.getLogger(__name__)

_EVERY_S = 15.0
_EVERY_S_WHILE_AWAY = 3.0
_ANSWER_S = 10.0
_RECORD = "store"
_AWAY = "the store does not answer as it should; the log says how"


class StoreHealth:
    """Reads a small record of the store now and then. For one event loop; `close` ends what `start` began."""

    def __init__(self, store: BlobStore) -> None:
        self.fault: str | None = None
        """What is wrong with it, for anybody's eyes; None where nothing is known to be."""
        self._store = store
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Asks from now on. Returns at once."""
        self._task = tasks.start(self._run(), "probe of the store")

    async def close(self) -> None:
        """Asks no more."""
        if self._task is not None:
            await tasks.cancel(self._task)

    async def _run(self) -> None:
        while True:
            answer = self._ask()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self._note(await asyncio.shield(answer))
            except TimeoutError:
                self._note(TimeoutError(f"no answer came within {_ANSWER_S:g} seconds"))
                self._note(await answer)  # one thread waits, however long that takes
            await asyncio.sleep(_EVERY_S if self.fault is None else _EVERY_S_WHILE_AWAY)

    def _ask(self) -> asyncio.Future[OSError | None]:
        """What reading the record will end in. In a thread that nobody waits for when the gateway stops."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[OSError | None] = loop.create_future()

        def tell(fault: OSError | None) -> None:
            if not answer.done():
                answer.set_result(fault)

        def ask() -> None:
            fault: OSError | None = None
            try:
                self._store.read_record(_RECORD)
            except OSError as error:
                fault = error
            except ValueError:  # damaged, so it has been read
                pass
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, fault)

        threading.Thread(target=ask, name="store-probe", daemon=True).start()
        return answer

    def _note(self, fault: OSError | None) -> None:
        """Tells the log of what is new."""
        was, self.fault = self.fault, fault and _shown(fault)
        if fault is not None and was != self.fault:
            logger.warning("the store is away: %s", fault)
        elif fault is None and was is not None:
            logger.info("the store answers again")


def _shown(fault: OSError) -> str:
    """A fault without addresses and paths."""
    return str(fault) if isinstance(fault, StoreRefused) else _AWAY
