"""``python -m engine`` as a process: ready, serving, announced, drained, and its exit status."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from redis import Redis

from engine import assembly
from engine import process as process_module
from engine.__main__ import main
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model's folder."""
    spec = importlib.util.spec_from_file_location("model_zoo", ROOT / "tests" / "model_zoo.py")
    assert spec is not None and spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    zoo.save_tiny_model(folder)
    return folder


class Process:
    """A running engine, its log so far, and where it serves."""

    def __init__(self, arguments: list[str]) -> None:
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "engine", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stream:
            for line in stream:
                self.lines.append(line)
                if "engine ready on" in line:
                    self._ready.set()
        self._ready.set()

    def wait_until_ready(self) -> str:
        """Returns ``host:port``."""
        assert self._ready.wait(120)
        match = re.search(r"engine ready on (\S+) after [\d.]+ s: (.*)", "".join(self.lines))
        assert match, "".join(self.lines)
        assert "tiny in float32" in match[2] and "rank pages" in match[2]
        return match[1]

    def wait(self) -> int:
        status = self.popen.wait(120)
        self._reader.join()
        return status


@contextmanager
def engine(model: Path, tmp_path: Path, *arguments: str) -> Iterator[Process]:
    process = Process(
        ["--model", str(model), "--port", "0", "--store", str(tmp_path / "store"), "--dtype", "float32",
         "--kv-cache-memory-bytes", "8MiB", "--lora-memory-bytes", "8MiB", *arguments]
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.wait()


def submit(max_tokens: int, **more: Any) -> pb.LinkRequest:
    return pb.LinkRequest(
        submit=pb.Submit(
            request_id=1, prompt_tokens=[5, 6, 7], seeds=[0], max_tokens=max_tokens, ignore_eos=True, **more
        )
    )


def test_an_engine_serves_is_announced_drains_and_ends(model: Path, tmp_path: Path, valkey_url: str) -> None:
    with engine(model, tmp_path, "--redis-url", valkey_url) as process:
        address = process.wait_until_ready()
        with grpc.insecure_channel(address) as channel, Redis.from_url(valkey_url) as redis:
            stub = pb_grpc.EngineStub(channel)
            info = stub.GetModelInfo(pb.GetModelInfoRequest())
            assert info.architecture and info.vocab_size == 320 and len(info.digest) == 32
            requests = iter([submit(200)])
            hold = threading.Event()

            def messages() -> Iterator[pb.LinkRequest]:
                yield from requests
                hold.wait(120)

            answers = stub.Link(messages())
            tokens = list(next(answers).tokens)
            deadline = time.monotonic() + 60
            while not any("lease:engine-" in str(key) for key in redis.scan_iter("loraplex:*")):
                assert time.monotonic() < deadline, "a lease is there"
                time.sleep(0.02)
            process.popen.send_signal(signal.SIGTERM)
            reason = 0
            for answer in answers:
                tokens += answer.tokens
                reason = max([reason, *(end.reason for end in answer.finished)])
                if reason:
                    break
            assert (len(tokens), reason) == (200, pb.FINISH_REASON_LENGTH), "what runs is finished first"
            hold.set()
            assert process.wait() == 0
            assert not any("lease" in str(key) for key in redis.scan_iter()), "the lease is withdrawn"
        assert not any("Traceback" in line for line in process.lines), "".join(process.lines)


def test_ctrl_c_does_not_wait_for_requests_and_a_taken_port_is_said(model: Path, tmp_path: Path) -> None:
    with engine(model, tmp_path) as process:
        address = process.wait_until_ready()
        port = address.rpartition(":")[2]
        with engine(model, tmp_path, "--port", port) as second:
            assert second.wait() == 1
            assert f"cannot listen on 127.0.0.1:{port}" in second.lines[-1]
        with grpc.insecure_channel(address) as channel:
            hold = threading.Event()

            def messages() -> Iterator[pb.LinkRequest]:
                yield submit(400)
                hold.wait(120)

            next(pb_grpc.EngineStub(channel).Link(messages()))
            process.popen.send_signal(signal.SIGINT)
            assert process.wait() == 0
            hold.set()
        assert not any("Traceback" in line for line in process.lines), "".join(process.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_read_that_hangs_keeps_no_process(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    digest = b"\xab" * 32
    folder = tmp_path / "store" / "sha256" / "ab" / digest.hex()
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "adapter_model.safetensors"
    os.mkfifo(weights)
    with engine(model, tmp_path, "--drain-seconds", "1") as process:
        address = process.wait_until_ready()
        with grpc.insecure_channel(address) as channel:
            hold = threading.Event()

            def messages() -> Iterator[pb.LinkRequest]:
                yield submit(5, adapter_digest=digest)
                hold.wait(120)

            answers = pb_grpc.EngineStub(channel).Link(messages())
            writer = _open_when_read(weights)
            try:
                process.popen.send_signal(number)
                assert process.wait() == 0
            finally:
                hold.set()
                answers.cancel()
                os.close(writer)
    assert any("told to stop" in line for line in process.lines) == (number == signal.SIGTERM)
    assert any("the link from" in line for line in process.lines), "the log is whole"
    assert not any("Traceback" in line for line in process.lines), "".join(process.lines)


def _open_when_read(fifo: Path) -> int:
    """The end to write to, once somebody reads; who does then waits for what is written."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno == errno.ENXIO and time.monotonic() < deadline, "nobody reads it"
            time.sleep(0.02)


async def test_no_renewal_of_the_lease_keeps_an_engine_that_is_to_end_at_once() -> None:
    class Endless:
        """A server that drains, or a registration that renews, for ever."""

        def __init__(self) -> None:
            self.begun, self.ended = asyncio.Event(), asyncio.Event()

        async def drain(self, timeout_s: float = 0) -> None:
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()

        renew = drain

    server, registration, end = Endless(), Endless(), process_module._End()
    end.gently()
    draining = asyncio.create_task(process_module._drain(server, registration, 1.0, end))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await server.begun.wait()
        await registration.begun.wait()
        end.with_failure()
        await draining
        await server.ended.wait()
        await registration.ended.wait()


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with engine(tmp_path / "nowhere", tmp_path) as process:
        assert process.wait() == 1
        assert len(process.lines) == 1 and "nowhere" in process.lines[0] and "ERROR" in process.lines[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kv-cache-memory-bytes", "200TiB"], "lower --kv-cache-memory-bytes"),
        (["--store", "/proc/store"], "/proc/store"),
        (["--device", "cuda"], "--device cuda"),
        (["--redis-url", "redis://here:port/"], "--redis-url: Port"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(
    model: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with engine(model, tmp_path, *arguments) as process:
        assert process.wait() == 1
    assert named in process.lines[-1] and "ERROR" in process.lines[-1]
    assert not any("Traceback" in line for line in process.lines), "".join(process.lines)


@pytest.fixture
def undone() -> Iterator[None]:
    """Takes back what `main` sets for the process."""
    before, interval = signal.getsignal(signal.SIGTERM), sys.getswitchinterval()
    yield
    signal.signal(signal.SIGTERM, before)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("undone")
def test_a_signal_while_the_model_loads_ends_the_process_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = False

    def load(settings: object) -> None:
        nonlocal cleaned
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned = True

    monkeypatch.setattr(assembly, "assemble", load)
    assert main(["--model", "any"]) == 0 and cleaned


@pytest.mark.usefixtures("undone")
def test_a_look_up_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    released, ended = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def look_up() -> None:
        released.wait(30)
        ended.set()

    async def serve(*args: object, **more: object) -> int:
        loops.append(asyncio.get_running_loop())
        loops[0].run_in_executor(None, look_up)
        return 0

    monkeypatch.setattr(assembly, "assemble", lambda settings: None)
    monkeypatch.setattr(process_module, "serve", serve)
    try:
        assert main(["--model", "any"]) == 0
        assert not ended.is_set()
    finally:
        released.set()
        ended.wait()
        loops[0].close()
        asyncio.set_event_loop(None)


@pytest.mark.usefixtures("undone")
def test_what_nobody_expected_is_logged_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "assemble", lambda settings: {}["model"])
    assert main(["--model", "any"]) == 1
    assert "the engine has failed" in caplog.text and "KeyError: 'model'" in caplog.text
