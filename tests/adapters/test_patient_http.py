"""Calls that come too fast, against a real HTTP server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.responses import Response

from adapters.client import AdaptersClient, ClientError
from adapters.patient_http import MOST_WAIT_S
from tests.adapters.fake_gateway import KEY, FakeGateway, refusal, serve
from tests.adapters.files import write_adapter


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serve(FakeGateway()) as served:
        yield served


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited each time, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def too_fast(retry_after: str | None, code: str = "rate_limit_exceeded") -> Response:
    answer = refusal(429, "So many calls a minute.", code=code)
    if retry_after is not None:
        answer.headers["Retry-After"] = retry_after
    return answer


def test_waits_as_long_as_it_is_told_and_says_so(gateway: FakeGateway, slept: list[float]) -> None:
    gateway.refusals = [too_fast("3"), too_fast("0.5", "too_many_uploads")]
    told: list[tuple[str, float]] = []
    with AdaptersClient(gateway.url, KEY, lambda *said: told.append(said)) as client:
        assert client.list() == {"object": "list", "data": []}
    assert slept == [3, 0.5]
    assert told == [("So many calls a minute.", 3), ("So many calls a minute.", 0.5)]


def test_an_upload_gets_through_whichever_of_its_calls_is_refused(
    gateway: FakeGateway, tmp_path: Path, slept: list[float]
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    with AdaptersClient(gateway.url, KEY) as client:
        client.upload(folder, "sql", on_sent=lambda count: None)
        calls = len(gateway.requests)
        assert calls == 5  # the key, the beginning, two files, the end
        for call in range(calls):
            gateway.files.clear()
            gateway.refusals = [None] * call + [too_fast("2")]
            client.upload(folder, "sql", on_sent=lambda count: None)
            assert gateway.files == {file.name: file.read_bytes() for file in folder.iterdir()}
            assert gateway.refusals == [] and slept
            slept.clear()


@pytest.mark.parametrize(
    "answer",
    [
        too_fast(None),
        too_fast("soon"),
        too_fast("1", "too_many_failed_authentications"),
        too_fast(str(MOST_WAIT_S + 1)),
    ],
    ids=["no time", "no number", "a wrong key", "too long"],
)
def test_what_waiting_does_not_cure_is_told_at_once(
    gateway: FakeGateway, slept: list[float], answer: Response
) -> None:
    gateway.refusals = [answer]
    with AdaptersClient(gateway.url, KEY) as client, pytest.raises(ClientError, match="So many calls"):
        client.list()
    assert slept == []


def test_the_waits_for_one_call_are_bounded_together(gateway: FakeGateway, slept: list[float]) -> None:
    gateway.refusals = [too_fast("50") for _ in range(9)]
    with AdaptersClient(gateway.url, KEY) as client, pytest.raises(ClientError, match="So many calls"):
        client.list()
    assert slept == [50, 50]
