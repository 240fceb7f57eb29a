"""The engine over a real link on 127.0.0.1, with the loop in its thread and a fake device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from builders import Engine, digest_of, expected_answers, expected_output, make_engine, make_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine import intake
from engine.loop import EngineLoop
from engine.server import SERVICE, CannotListen, EngineServer
from engine.service import EngineService
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

TOKENIZER = {"tokenizer.json": b"t" * ((2 << 20) + 3), "tokenizer_config.json": b"{}", "empty": b""}


@dataclass
class Serving:
    engine: Engine
    loop: EngineLoop
    server: EngineServer
    port: int
    channel: grpc.aio.Channel

    @property
    def stub(self) -> pb_grpc.EngineStub:
        return pb_grpc.EngineStub(self.channel)

    async def wait_for(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await condition():
                await asyncio.sleep(0.002)

    async def is_empty(self) -> bool:
        status = await self.server.service.status()
        return (status.running, status.waiting, status.free_blocks) == (0, 0, self.engine.pool.num_blocks)

    async def running(self) -> int:
        return (await self.server.service.status()).running


@asynccontextmanager
async def serve(*, step_s: float = 0.0, **sizes: Any) -> AsyncIterator[Serving]:
    news = threading.Event()
    engine = make_engine(wake=news.set, **{"num_blocks": 256, "max_num_seqs": 16, **sizes})
    engine.runner.step_s = step_s
    loop = EngineLoop(engine.scheduler, engine.runner, engine.gate, news)
    model = pb.ModelInfo(
        name="fake",
        digest=b"m" * 32,
        vocab_size=1000,
        max_model_len=2048,
        dtype="float32",
        num_rank_pages=4,
        max_num_seqs=sizes.get("max_num_seqs", 16),
        num_blocks=engine.pool.num_blocks,
    )
    service = EngineService(loop, model, TOKENIZER, lambda digest: digest in engine.store.adapters)
    server = EngineServer(service)
    port = await server.start("127.0.0.1:0")
    events = asyncio.get_running_loop()
    loop.start(lambda news: events.call_soon_threadsafe(service.take_news, news) and None, lambda: None)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Serving(engine, loop, server, port, channel)
    finally:
        await server.stop()
        loop.stop()
        engine.close()


@dataclass
class Client:
    """One link, and what has come by it."""

    call: Any
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    refusals: dict[int, pb.Finished] = field(default_factory=dict)
    started: dict[int, pb.Started] = field(default_factory=dict)
    searched: dict[int, list[int]] = field(default_factory=dict)
    num_messages: int = 0

    async def submit(self, request_id: int, prompt: int = 20, *, adapter: str = "", **fields: Any) -> None:
        submit = pb.Submit(
            request_id=request_id,
            prompt_tokens=make_request(prompt).prompt,
            adapter_digest=digest_of(adapter) if adapter else b"",
            **{"seeds": [0], "max_tokens": 8, "ignore_eos": True, **fields},
        )
        await self.call.write(pb.LinkRequest(submit=submit))

    async def abort(self, request_id: int, choice: int | None = None) -> None:
        await self.call.write(pb.LinkRequest(abort=pb.Abort(request_id=request_id, choice=choice)))

    async def read(self) -> None:
        async with asyncio.timeout(60):
            message = await self.call.read()
        assert isinstance(message, pb.LinkResponse), "the link has ended"
        self.num_messages += 1
        for number, choice, token in zip(message.request_ids, message.choices, message.tokens, strict=True):
            assert (number, choice) not in self.ends
            self.tokens.setdefault((number, choice), []).append(token)
        self.started |= {start.request_id: start for start in message.started}
        for searched in message.searched:
            self.searched.setdefault(searched.request_id, []).append(searched.tokens)
        for end in message.finished:
            self.ends[end.request_id, end.choice] = (pb.FinishReason.Name(end.reason)[14:], end.error)
            if end.refusal:
                self.refusals[end.request_id] = end

    async def read_until_ended(self, *keys: tuple[int, int]) -> None:
        while not self.ends.keys() >= set(keys):
            await self.read()


async def test_streams_of_many_requests_go_over_one_link() -> None:
    async with serve() as serving:
        serving.engine.store.add("a")
        client = Client(serving.stub.Link())
        for number in range(20):
            adapter = "a" if number % 2 else ""
            await client.submit(number, 10 + number, adapter=adapter, seeds=range(1 + number % 3))
        keys = [(number, choice) for number in range(20) for choice in range(1 + number % 3)]
        await client.read_until_ended(*keys)
        for number, choice in keys:
            request = make_request(10 + number, adapter="a" if number % 2 else "", n=3)
            assert client.tokens[number, choice] == expected_output(request, choice)
            assert client.ends[number, choice] == ("LENGTH", "")
        assert set(client.started) == set(range(20))
        assert all(start.queue_us > 0 for start in client.started.values())
        await serving.wait_for(serving.is_empty)
        client.call.cancel()


async def test_a_step_sends_at_most_one_message() -> None:
    async with serve(step_s=0.002) as serving:
        client = Client(serving.stub.Link())
        for number in range(10):
            await client.submit(number, max_tokens=50)
        await client.read_until_ended(*((number, 0) for number in range(10)))
        assert client.num_messages <= serving.engine.runner.num_steps + 1
        client.call.cancel()


async def test_an_abort_ends_a_choice_or_all_of_them() -> None:
    async with serve(step_s=0.002) as serving:
        client = Client(serving.stub.Link())
        await client.submit(1, max_tokens=1000, seeds=[0, 1])
        await client.read()
        await client.abort(1, choice=0)
        await client.read_until_ended((1, 0))
        assert (1, 1) not in client.ends
        await client.abort(1)
        await client.read_until_ended((1, 1))
        assert client.ends == {(1, 0): ("ABORTED", ""), (1, 1): ("ABORTED", "")}
        await client.abort(77)
        assert await serving.is_empty()
        client.call.cancel()


async def test_a_search_tells_its_costs_as_it_goes_and_its_choices_at_the_end() -> None:
    async with serve() as serving:
        client = Client(serving.stub.Link())
        await client.submit(1, 20, seeds=[0] * 3, beams=pb.Beams(length_penalty=1.0), max_tokens=9)
        keys = [(1, choice) for choice in range(3)]
        await client.read_until_ended(*keys)
        request = make_request(20, n=3, max_tokens=9, search={})
        assert [client.tokens[key] for key in keys] == expected_answers(request)
        assert client.searched[1] == [3] * 9
        assert await serving.is_empty()
        client.call.cancel()


async def test_a_link_that_ends_in_the_middle_of_a_search_frees_its_blocks_and_its_adapter() -> None:
    async with serve(step_s=0.002) as serving:
        digest = serving.engine.store.add("a")
        client = Client(serving.stub.Link())
        beams = pb.Beams(length_penalty=1.0)
        await client.submit(1, 200, adapter="a", seeds=[0] * 4, beams=beams, max_tokens=800)
        while len(client.searched.get(1, ())) < 20:
            await client.read()
        assert await serving.running() == 4
        client.call.cancel()
        await serving.wait_for(serving.is_empty)
        state = await serving.stub.ListAdapters(pb.ListAdaptersRequest(digest=digest))
        assert state.adapters[0].references == 0


@pytest.mark.parametrize("how", ["cancel", "half close", "lost connection"])
async def test_the_end_of_a_link_frees_all_that_it_held(how: str) -> None:
    async with serve(step_s=0.005, max_num_seqs=4) as serving:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}")
        client = Client(pb_grpc.EngineStub(channel).Link())
        other = Client(serving.stub.Link())
        await other.submit(1, max_tokens=100)
        for number in range(8):
            await client.submit(number, max_tokens=1000)
        await client.read()
        if how == "cancel":
            client.call.cancel()
        elif how == "half close":
            await client.call.done_writing()
        else:
            await channel.close()
        await serving.wait_for(lambda: _is(serving.running, 1))
        await other.read_until_ended((1, 0))
        assert other.tokens[1, 0] == expected_output(make_request(20, max_tokens=100))
        assert await serving.is_empty()
        other.call.cancel()
        await channel.close()


async def test_links_that_come_and_go_leave_nothing() -> None:
    async with serve(step_s=0.001) as serving:
        for _ in range(40):
            clients = [Client(serving.stub.Link()) for _ in range(3)]
            for client in clients:
                await client.submit(1, max_tokens=1000)
            await clients[0].read()
            for client in clients:
                client.call.cancel()
        await serving.wait_for(serving.is_empty)


async def _is(ask: Callable[[], Awaitable[int]], value: int) -> bool:
    return await ask() == value


async def test_a_slow_reader_gets_merged_messages_and_delays_nobody() -> None:
    """It is owed far more than the stream takes unread; the other link's stream does not notice."""
    async with serve(max_num_seqs=64, max_num_batched_tokens=4096, num_blocks=2048) as serving:
        slow = Client(serving.stub.Link())
        quick = Client(serving.stub.Link())
        for number in range(40):
            await slow.submit(number, 5, max_tokens=400)
        await quick.submit(1, 5, max_tokens=400)
        await quick.read_until_ended((1, 0))
        await serving.wait_for(serving.is_empty)
        steps = serving.engine.runner.num_steps
        await slow.read_until_ended(*((number, 0) for number in range(40)))
        assert slow.num_messages < steps
        expected = expected_output(make_request(5, max_tokens=400))
        assert all(slow.tokens[number, 0] == expected for number in range(40))
        slow.call.cancel()
        quick.call.cancel()


async def test_a_bad_submit_is_answered_and_the_link_goes_on() -> None:
    async with serve() as serving:
        client = Client(serving.stub.Link())
        await client.submit(1, seeds=[0, 1], sampling=pb.Sampling(top_p=2))
        await client.submit(2, seeds=[])
        await client.submit(3)
        await client.read_until_ended((1, 0), (1, 1), (2, 0), (3, 0))
        assert client.ends[1, 0] == client.ends[1, 1] == ("ERROR", "top_p is 2.0; it must be between 0 and 1")
        assert client.ends[2, 0][0] == "ERROR" and client.ends[3, 0][0] == "LENGTH"
        await client.submit(1)
        client.ends.clear()
        await client.read_until_ended((1, 0))
        assert client.ends[1, 0][0] == "LENGTH", "the id is free again"
        client.call.cancel()


async def test_an_id_that_is_in_use_breaks_the_link() -> None:
    async with serve(step_s=0.005) as serving:
        client = Client(serving.stub.Link())
        await client.submit(7, max_tokens=1000)
        await client.read()
        await client.submit(7)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while isinstance(await client.call.read(), pb.LinkResponse):
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id 7 is in use" in (caught.value.details() or "")
        await serving.wait_for(serving.is_empty)


async def test_an_adapter_that_does_not_load_says_so() -> None:
    async with serve() as serving:
        client = Client(serving.stub.Link())
        await client.submit(1, adapter="missing")
        await client.read_until_ended((1, 0))
        assert client.ends[1, 0] == ("ERROR", "the store has no such adapter")
        client.call.cancel()


async def test_model_and_tokenizer() -> None:
    async with serve() as serving:
        model = await serving.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.name, model.vocab_size) == ("fake", 1000)
        files: dict[str, bytes] = {}
        async for chunk in serving.stub.GetTokenizer(pb.GetTokenizerRequest()):
            files[chunk.name] = files.get(chunk.name, b"") + chunk.data
        assert files == TOKENIZER


async def test_adapters_are_loaded_listed_and_unloaded() -> None:
    async with serve() as serving:
        stub = serving.stub
        digest = serving.engine.store.add("a", rank=20)
        serving.engine.store.add("huge", rank=100)
        state = await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest))
        assert (state.residency, state.rank, state.pages) == (pb.RESIDENCY_DEVICE, 20, 2)
        listed = await stub.ListAdapters(pb.ListAdaptersRequest())
        assert [adapter.digest for adapter in listed.adapters] == [digest]
        state = await stub.UnloadAdapter(pb.UnloadAdapterRequest(digest=digest))

        async def is_gone() -> bool:
            return not (await stub.ListAdapters(pb.ListAdaptersRequest())).adapters

        await serving.wait_for(is_gone)
        for name, code, words in (
            ("missing", grpc.StatusCode.NOT_FOUND, "no adapter"),
            ("huge", grpc.StatusCode.FAILED_PRECONDITION, "rank 100"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest_of(name)))
            assert caught.value.code() == code and words in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.UnloadAdapter(pb.UnloadAdapterRequest(digest=b"short"))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_one_adapter_is_shown_with_what_it_has_been_through() -> None:
    async with serve() as serving:
        digest = serving.engine.store.add("a", rank=20)
        client = Client(serving.stub.Link())
        for number in (1, 2):
            await client.submit(number, adapter="a")
            await client.read_until_ended((number, 0))
        (state,) = (await serving.stub.ListAdapters(pb.ListAdaptersRequest(digest=digest))).adapters
        assert (state.residency, state.loads) == (pb.RESIDENCY_DEVICE, 1)
        # Its load begins when the request is submitted, and may have ended when the loop takes that in.
        assert state.hits in (1, 2)
        assert (state.hits + state.misses, state.hits_device) == (2, 1)
        assert state.load_seconds > 0 and not state.pinned
        missing = pb.ListAdaptersRequest(digest=digest_of("missing"))
        (state,) = (await serving.stub.ListAdapters(missing)).adapters
        assert state.residency == pb.RESIDENCY_NONE and state.loads == 0
        client.call.cancel()


async def test_a_request_that_breaks_its_reader_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = intake.parse_submit

    def fragile(message: pb.Submit, *args: Any) -> Any:
        if message.request_id == 2:
            raise ZeroDivisionError
        return parse(message, *args)

    monkeypatch.setattr(intake, "parse_submit", fragile)
    async with serve() as serving:
        client = Client(serving.stub.Link())
        for number in (1, 2, 3):
            await client.submit(number)
        await client.read_until_ended((1, 0), (2, 0), (3, 0))
        assert client.ends[2, 0] == ("ERROR", "the engine could not read this request")
        assert client.ends[1, 0] == client.ends[3, 0] == ("LENGTH", "")
        client.call.cancel()


async def test_a_grammar_that_breaks_its_reader_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile:
        def understand(self, text: str) -> None:
            raise ZeroDivisionError

    async with serve() as serving:
        monkeypatch.setattr(serving.server.service._intake, "_grammars", Fragile())
        client = Client(serving.stub.Link())
        await client.submit(1, grammar="x")
        await client.read_until_ended((1, 0))
        assert client.ends[1, 0] == ("ERROR", "the engine could not read the request's grammar")
        client.call.cancel()


async def test_a_store_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(digest: bytes) -> bool:
        raise OSError("Is its volume mounted?")

    async with serve() as serving:
        monkeypatch.setattr(serving.server.service, "_on_disk", fail)
        digest = digest_of("a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await serving.stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the store cannot be read: Is its volume mounted?"
        (state,) = (await serving.stub.ListAdapters(pb.ListAdaptersRequest(digest=digest))).adapters
        assert state.residency == pb.RESIDENCY_NONE


async def test_an_announced_adapter_is_read_before_its_request_comes() -> None:
    async with serve() as serving:
        digest = serving.engine.store.add("a")
        client = Client(serving.stub.Link())
        await client.call.write(pb.LinkRequest(announce=pb.Announce(adapter_digest=digest)))

        async def is_in_host_memory() -> bool:
            (state,) = (await serving.stub.ListAdapters(pb.ListAdaptersRequest(digest=digest))).adapters
            return state.residency == pb.RESIDENCY_HOST

        await serving.wait_for(is_in_host_memory)
        await client.submit(1, adapter="a")
        await client.read_until_ended((1, 0))
        assert serving.engine.store.reads == [digest]
        client.call.cancel()


async def test_a_load_that_its_caller_gave_up_is_forgotten() -> None:
    async with serve(step_s=0.005) as serving:
        stub, store = serving.stub, serving.engine.store
        client = Client(stub.Link())
        store.add("large", rank=64)
        await client.submit(1, adapter="large", max_tokens=2000)
        await client.read()
        digest = store.add("a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.LoadAdapter(pb.LoadAdapterRequest(digest=digest), timeout=0.3)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        async def is_forgotten() -> bool:
            return not serving.engine.gate._ahead.wants(digest)

        await serving.wait_for(is_forgotten)
        client.call.cancel()


async def test_drain_refuses_waits_and_reports_what_is_left() -> None:
    async with serve(step_s=0.1) as serving:
        client = Client(serving.stub.Link())
        await client.submit(1, max_tokens=40)
        await client.submit(2, max_tokens=1000)
        await client.read()
        begin = time.monotonic()
        answer = await serving.stub.Drain(pb.DrainRequest(timeout_ms=100))
        assert answer.remaining == 2 and time.monotonic() - begin >= 0.1
        serving.engine.runner.step_s = 0.001
        await client.submit(3)
        await client.read_until_ended((3, 0), (1, 0))
        assert client.ends[3, 0][0] == "REFUSED"
        assert client.refusals[3].refusal == pb.REFUSAL_DRAINING
        assert client.ends[1, 0][0] == "LENGTH"
        await client.abort(2)
        answer = await serving.stub.Drain(pb.DrainRequest(timeout_ms=5000))
        assert answer.remaining == 0
        client.call.cancel()


async def test_two_gateways_share_one_queue_and_are_told_why_it_is_full() -> None:
    async with serve(step_s=0.01, max_num_seqs=1, max_num_waiting=6) as serving:
        one, two = Client(serving.stub.Link()), Client(serving.stub.Link())
        for number in (1, 2):
            await one.submit(number, tenant="flood", max_tokens=30)
        await one.read()
        for number in (3, 4, 5):
            await two.submit(number, tenant="flood", max_tokens=30)
        await two.read_until_ended((5, 0))
        assert two.refusals[5].refusal == pb.REFUSAL_TENANT_QUEUE_FULL
        assert two.refusals[5].retry_after_ms > 0
        await two.submit(6, tenant="other", max_tokens=2)
        await two.read_until_ended((6, 0))
        assert two.ends[6, 0] == ("LENGTH", "") and 4 not in two.started, "it did not wait for all of them"
        await one.read_until_ended((2, 0))
        await two.read_until_ended((4, 0))
        one.call.cancel()
        two.call.cancel()


async def test_health_and_reflection() -> None:
    async with serve() as serving:
        health: Any = health_pb2_grpc.HealthStub(serving.channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await serving.server.drain(1)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        call = stub(serving.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        assert SERVICE in [service.name for service in listed.list_services_response.service]
        call.cancel()


async def test_a_taken_port_is_said() -> None:
    async with serve() as serving:
        second = EngineServer(serving.server.service)
        with pytest.raises(CannotListen, match=f"127.0.0.1:{serving.port}: the port is taken"):
            await second.start(f"127.0.0.1:{serving.port}")
        await second.stop()
