"""From the messages of a link to requests of the engine's loop."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from engine.constraints import Grammar, Grammars, InvalidGrammar
from engine.link import Link
from engine.loop import EngineLoop
from engine.outputs import Finished, LinkOutput
from engine.sequence import FinishReason
from engine.submission import InvalidSubmit, parse_submit
from protos import engine_pb2 as pb

logger = logging.getLogger(__name__)

NUM_GRAMMAR_THREADS = 4
"""So many grammars are read at once, in threads that nothing else waits for."""

_NO_GRAMMARS = (
    "this engine cannot hold answers to a grammar: its model has no tokenizer, or llguidance is absent"
)


class Intake:
    """Starts and aborts requests. One with a grammar starts when that is understood, in a thread, and ends at
    its deadline if it has not been by then.

    Belongs to the server's event loop.

    Args:
        model: what submissions are checked against.
        grammars: None where the engine cannot hold answers to a grammar.
    """

    def __init__(self, loop: EngineLoop, model: pb.ModelInfo, grammars: Grammars | None) -> None:
        self._loop = loop
        self._model = model
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._delayed: dict[tuple[Link, int], asyncio.Task[None]] = {}

    def submit(self, link: Link, message: pb.Submit) -> str | None:
        """Starts a request. Returns what is wrong with the link itself, if it reuses an id."""
        if not link.open(message.request_id, max(1, len(message.seeds))):
            return f"request_id {message.request_id} is in use on this link"
        arrival = time.monotonic()
        if not message.grammar:
            self._start(link, message, arrival)
        elif self._grammars is None:
            _end(link, message, FinishReason.ERROR, _NO_GRAMMARS)
        else:
            self._delay(link, message, arrival, self._grammars)
        return None

    def abort(self, link: Link, message: pb.Abort) -> None:
        """Ends a request, or one choice of it; unknown ones are ignored."""
        choice = message.choice if message.HasField("choice") else None
        delayed = self._delayed.get((link, message.request_id))
        if delayed is None:
            self._loop.abort(link, message.request_id, choice)
        else:
            delayed.add_done_callback(lambda _: self._loop.abort(link, message.request_id, choice))

    def close(self, link: Link) -> None:
        """Ends all requests of a link that is no more."""
        for (owner, _), task in list(self._delayed.items()):
            if owner is link:
                task.cancel()
        self._loop.close_link(link)

    def _delay(self, link: Link, message: pb.Submit, arrival: float, grammars: Grammars) -> None:
        async def start() -> None:
            events = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(message.deadline_ms / 1000 or None):
                    grammar = await events.run_in_executor(
                        self._threads, grammars.understand, message.grammar
                    )
            except TimeoutError:
                _end(link, message, FinishReason.DEADLINE, "")
            except InvalidGrammar as error:
                _end(link, message, FinishReason.ERROR, f"the grammar cannot be used: {error}")
            except Exception:  # else nobody would hear of it until its deadline
                logger.exception("the grammar of request %d could not be read", message.request_id)
                _end(link, message, FinishReason.ERROR, "the engine could not read the request's grammar")
            else:
                self._start(link, message, arrival, grammar)

        key = (link, message.request_id)
        task = self._delayed[key] = asyncio.create_task(start(), name="grammar")
        task.add_done_callback(lambda _: self._delayed.pop(key))

    def _start(self, link: Link, message: pb.Submit, arrival: float, grammar: Grammar | None = None) -> None:
        try:
            self._loop.submit(parse_submit(message, link, self._model, grammar, arrival))
        except InvalidSubmit as error:
            _end(link, message, FinishReason.ERROR, str(error))
        except Exception:  # it would end the link, with all that runs there, and come again with the next
            logger.exception("request %d could not be read", message.request_id)
            _end(link, message, FinishReason.ERROR, "the engine could not read this request")


def _end(link: Link, message: pb.Submit, reason: FinishReason, why: str) -> None:
    """Ends a request that the loop never saw."""
    news = LinkOutput()
    news.finished += [
        Finished(message.request_id, choice, reason, why) for choice in range(max(1, len(message.seeds)))
    ]
    link.put(news)
