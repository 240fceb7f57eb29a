"""When the ledger and the metrics hear of a request's end."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.accounts.admission import Admission, Room
from gateway.accounts.entry import LedgerEntry, Outcome
from gateway.engine_stream import EngineStream
from gateway.errors import unavailable
from gateway.generation import Generation
from gateway.refusals import deadline_passed
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import ModelInfo, Sampling, Submit
from tests.gateway.fake_engine import TOKENIZER_FILES


def generation(ledger: Mock, metrics: Mock, *, scarce: bool, left_s: float = 60) -> Generation:
    """A request of one prompt, which no engine has yet."""
    submits = [Submit(prompt_tokens=[1], seeds=[1], sampling=Sampling(), max_tokens=1)]
    placer, deadline = Mock(), time.monotonic() + left_s
    placer.choose.return_value = None
    made = Generation(
        EngineStream(submits, model_digest=b"", placer=placer, resume_timeout_s=1.0, deadline=deadline),
        submits,
        info=ModelInfo(),
        tokenizer=ModelTokenizer.from_files(TOKENIZER_FILES),
        stops=(),
        shown=frozenset(),
        reasoning=None,
        keep_stop=False,
        echo=None,
        metrics=metrics,
        ledger=ledger,
    )
    room = Room()
    room.is_scarce = scarce
    entry = LedgerEntry("req_1", 0, "acme", "key", "tiny", route="chat")
    made.admission = Admission(entry, time.perf_counter(), rooms=[room])
    return made


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GeneratorExit(), Outcome.DISCONNECTED),
        (RuntimeError(), Outcome.FAILED),
        (asyncio.CancelledError(), Outcome.FAILED),
        (deadline_passed(), Outcome.DEADLINE),
        (unavailable("No engine has room."), Outcome.REFUSED),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_answer_that_is_not_read_on_has_not_failed(error: BaseException, outcome: Outcome) -> None:
    ledger = Mock()
    with pytest.raises(type(error)), generation(ledger, Mock(), scarce=True):
        raise error
    settlement: Any = ledger.settle.call_args.args[1]
    assert settlement.outcome is outcome


async def test_who_leaves_after_the_deadline_has_waited_for_all_of_it() -> None:
    ledger = Mock()
    with generation(ledger, Mock(), scarce=True, left_s=0):
        pass
    settlement: Any = ledger.settle.call_args.args[1]
    assert settlement.outcome is Outcome.DEADLINE


@pytest.mark.parametrize("scarce", [False, True])
async def test_an_end_is_booked_once_what_is_answered_is_sent_or_at_once_where_others_wait(
    scarce: bool,
) -> None:
    ledger, metrics = Mock(), Mock()
    with generation(ledger, metrics, scarce=scarce):
        assert not ledger.settle.called
    assert (ledger.settle.called, metrics.end.called) == (scarce, scarce)
    await asyncio.sleep(0)
    assert ledger.settle.call_count == metrics.end.call_count == 1
    settlement: Any = ledger.settle.call_args.args[1]
    assert settlement.outcome is Outcome.DISCONNECTED
    assert ledger.settle.call_args.kwargs == {"urgent": scarce}
