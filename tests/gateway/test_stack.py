"""The supervisor behind `loraplex up`, with small programs in place of the real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import stack
from gateway.stack import ChildSpec, StackError, StackPlan, check_ports, plan_children, run_stack
from tests.ports import reserve_port

# Writes its pid into a file, says so, and waits; ends with 0 at SIGTERM.
SLEEPER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
print("up", flush=True)
while True:
    time.sleep(60)
"""


def spec(name: str, folder: Path, program: str = SLEEPER) -> ChildSpec:
    """A process that is healthy once it has written its pid into `folder`/`name`."""

    async def healthy() -> bool:
        return pid_of(name, folder) is not None

    return ChildSpec(name, [sys.executable, "-c", program, str(folder / name)], "nowhere", healthy)


def pid_of(name: str, folder: Path) -> int | None:
    """The pid that the process wrote, if it lives."""
    try:
        pid = int((folder / name).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if _alive(pid) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def a_plan(folder: Path, *, port: int | None = None, redis_port: int | None = None) -> StackPlan:
    return StackPlan(
        model="m",
        host="127.0.0.1",
        port=port or reserve_port(),
        engine_port=reserve_port(),
        redis_port=redis_port or reserve_port(),
        redis_url=None,
        data_dir=folder,
    )


@asynccontextmanager
async def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *specs: ChildSpec
) -> AsyncIterator[tuple[list[str], asyncio.Task[None]]]:
    """The supervisor over these processes, with what it reported; stopped by SIGTERM to this process."""
    monkeypatch.setattr(stack, "plan_children", lambda plan: [[child] for child in specs])
    lines: list[str] = []
    task = asyncio.create_task(run_stack(a_plan(folder), lines.append))
    try:
        yield lines, task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([task], timeout=60)
        assert task.done()


async def test_children_start_in_order_and_stop_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec("first", tmp_path), spec("second", tmp_path)]
    async with running(tmp_path, monkeypatch, *specs) as (lines, task):
        await until(lambda: any("serves m" in line for line in lines))
        pids = [pid_of("first", tmp_path), pid_of("second", tmp_path)]
    task.result()
    ready = [line.split(" is ready")[0] for line in lines if "is ready" in line]
    assert ready == ["first", "second"]
    assert "[first] up" in lines and "[second] up" in lines
    assert lines[-2:] == ["stopping; Ctrl-C again ends it at once", "stopped"]
    assert not any(pid and _alive(pid) for pid in pids)


async def test_a_killed_child_is_started_again_with_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, monkeypatch, spec("worker", tmp_path)) as (lines, _):
        await until(lambda: any("serves m" in line for line in lines))
        first = pid_of("worker", tmp_path)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of("worker", tmp_path) not in (None, first))
        await until(lambda: sum("worker is ready" in line for line in lines) == 2)
        assert [line for line in lines if "SIGKILL" in line] == [
            "worker was killed by SIGKILL; starting it again in 0.5 s"
        ]


async def test_a_child_for_which_the_system_has_no_room_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_FIRST_PAUSE_S", 0.05)
    begin, faults = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no more processes")] * 2

    async def sometimes(*args: Any, **more: Any) -> asyncio.subprocess.Process:
        if faults:
            raise faults.pop()
        return await begin(*args, **more)

    async with running(tmp_path, monkeypatch, spec("child", tmp_path)) as (lines, _):
        await until(lambda: any("serves m" in line for line in lines))
        monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
        pid = pid_of("child", tmp_path)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: sum("child is ready" in line for line in lines) == 2)
    assert lines.count("The child cannot be started: no more processes.") == 2


async def test_a_child_that_dies_while_it_starts_ends_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = spec("broken", tmp_path, "import sys; print('no such model', flush=True); sys.exit(3)")
    async with running(tmp_path, monkeypatch, spec("first", tmp_path), broken) as (lines, task):
        await until(task.done)
        with pytest.raises(StackError, match="The broken ended with exit code 3 while it started"):
            task.result()
        assert "[broken] no such model" in lines
        assert pid_of("first", tmp_path) is None


async def test_a_child_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_STOP_S", 0.3)
    stubborn = spec("stubborn", tmp_path, SLEEPER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    async with running(tmp_path, monkeypatch, stubborn) as (lines, _):
        await until(lambda: any("serves m" in line for line in lines))
        pid = pid_of("stubborn", tmp_path)
    assert pid is not None and not _alive(pid)
    assert any("did not stop" in line for line in lines)


async def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from gateway import stack
from tests.gateway.test_stack import a_plan, spec
folder = pathlib.Path({str(tmp_path)!r})
stack.plan_children = lambda plan: [[spec("orphan", folder)]]
asyncio.run(stack.run_stack(a_plan(folder), lambda line: None))
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    try:
        await until(lambda: pid_of("orphan", tmp_path) is not None)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: pid_of("orphan", tmp_path) is None)


def test_every_port_that_is_taken_is_named_with_its_flag(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        taken = one.getsockname()[1], two.getsockname()[1]
        with pytest.raises(StackError) as error:
            check_ports(a_plan(tmp_path, port=taken[0], redis_port=taken[1]))
    assert f"Port {taken[0]} for the gateway is taken; choose another with --port." in str(error.value)
    assert f"Port {taken[1]} for Valkey is taken; choose another with --redis-port." in str(error.value)
    assert "engine" not in str(error.value)
    check_ports(a_plan(tmp_path))


async def test_the_embedded_valkey_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    from redis.asyncio import Redis

    plan = a_plan(tmp_path)
    [[valkey], _] = plan_children(plan)
    for attempt in range(2):
        process = await asyncio.create_subprocess_exec(*valkey.argv, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(60):
                while not await valkey.healthy():
                    await asyncio.sleep(0.02)
            async with Redis(host="127.0.0.1", port=plan.redis_port) as redis:
                assert await redis.get("adapter") == (b"kept" if attempt else None)
                await redis.set("adapter", "kept")
                assert (await redis.config_get("bind"))["bind"] == "127.0.0.1"
        finally:
            process.kill()
            await process.wait()


def test_a_redis_of_ones_own_takes_the_place_of_the_embedded_one(tmp_path: Path) -> None:
    plan = StackPlan("m", "127.0.0.1", 1, 2, 3, "redis://elsewhere/0", tmp_path, ["--dtype", "float32"])
    [[engine, gateway]] = plan_children(plan)
    for child in (engine, gateway):
        assert "redis://elsewhere/0" in child.argv
        assert str(tmp_path / "store") in child.argv
    assert list(engine.argv[-2:]) == ["--dtype", "float32"]
