"""`loraplex up` as a user types it: what it starts, and what it refuses before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway import probes, stack
from gateway.cli import app
from gateway.commands.exits import CommandFailed, Exit
from gateway.commands.up import _OWN_FLAGS
from gateway.stack import StackPlan, plan_children
from tests.ports import reserve_port, reserve_ports

VARIABLES = (
    "LORAPLEX_ENGINE_MODEL",
    "LORAPLEX_HOST",
    "LORAPLEX_PORT",
    "LORAPLEX_ENGINE_PORT",
    "LORAPLEX_REDIS_URL",
)


class Up:
    """Runs the command as far as the start of the processes, and keeps the plan of those."""

    def __init__(self, folder: Path) -> None:
        self.plans: list[StackPlan] = []
        gateway, engine, redis = map(str, reserve_ports(3))
        self.ports = {"--port": gateway, "--engine-port": engine, "--redis-port": redis}
        self.data_dir = folder / "data"

    async def run_stack(self, plan: StackPlan, report: stack.Report) -> None:
        plan_children(plan)
        self.plans.append(plan)

    def __call__(self, *arguments: str, **given: str) -> Result:
        """`given`: options in place of those with which it starts."""
        options = {"--data-dir": str(self.data_dir), **self.ports}
        options |= {f"--{name.replace('_', '-')}": value for name, value in given.items()}
        words = [word for option in options.items() for word in option]
        return CliRunner().invoke(app, ["up", *words, *arguments])

    def refusal(self, *arguments: str, **given: str) -> tuple[str, Exit]:
        """What a start is refused with."""
        failure = self(*arguments, model="m", **given).exception
        assert isinstance(failure, CommandFailed), failure
        assert self.plans == []
        return str(failure), failure.exit_code


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    up = Up(tmp_path)
    monkeypatch.setattr(stack, "run_stack", up.run_stack)
    return up


def test_it_takes_the_environment_as_gateway_and_engine_do(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = reserve_ports(3)
    monkeypatch.setenv("LORAPLEX_ENGINE_MODEL", "org/model")
    monkeypatch.setenv("LORAPLEX_HOST", "0.0.0.0")
    monkeypatch.setenv("LORAPLEX_PORT", str(ports[0]))
    monkeypatch.setenv("LORAPLEX_ENGINE_PORT", str(ports[1]))
    monkeypatch.setenv("LORAPLEX_REDIS_URL", "redis://elsewhere/0")
    up.ports = {}
    assert up().exit_code == 0
    [plan] = up.plans
    assert (plan.model, plan.host, plan.redis_url) == ("org/model", "0.0.0.0", "redis://elsewhere/0")
    assert (plan.port, plan.engine_port) == (ports[0], ports[1])
    assert up(model="m", host="127.0.0.1", port=str(ports[2])).exit_code == 0
    assert (up.plans[1].model, up.plans[1].host, up.plans[1].port) == ("m", "127.0.0.1", ports[2])


def test_an_empty_variable_is_none(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    assert up(model="m").exit_code == 0
    assert (up.plans[0].host, up.plans[0].redis_url) == ("127.0.0.1", None)
    assert up().exit_code == Exit.USAGE


@pytest.mark.parametrize("flag", ["port", "engine_port", "redis_port"])
@pytest.mark.parametrize("port", ["0", "-1", "65536", "80000"])
def test_a_port_that_cannot_be_asked_is_refused(up: Up, flag: str, port: str) -> None:
    result = up(model="m", **{flag: port})
    assert result.exit_code == Exit.USAGE and f"--{flag.replace('_', '-')}" in result.stderr
    assert up.plans == []


def test_two_equal_ports_are_refused(up: Up) -> None:
    port = str(reserve_port())
    said, code = up.refusal(port=port, engine_port=port)
    assert (code, said) == (
        Exit.REFUSED,
        f"Port {port} is meant for the gateway and for the engine; choose another with --engine-port.",
    )
    said, _ = up.refusal(engine_port=port, redis_port=port)
    assert said.endswith("for the engine and for Valkey; choose another with --redis-port.")
    assert up(model="m", port=port, redis_port=port, redis_url="redis://elsewhere/0").exit_code == 0


@pytest.mark.parametrize("flag", _OWN_FLAGS)
def test_an_engine_flag_that_would_undo_ours_is_refused(up: Up, flag: str) -> None:
    for arguments in ((flag, "x"), (f"{flag}=x",), ("--dtype", "float32", flag, "x")):
        said, code = up.refusal("--", *arguments)
        assert code == Exit.USAGE and said.startswith(f"The engine's {flag} is set by `loraplex up`: ")
    assert not up.data_dir.exists()


def test_every_flag_that_the_engine_has_from_here_is_refused_of_others(up: Up) -> None:
    assert up("--", "--dtype", "float32", model="m").exit_code == 0
    [[_], [engine, _]] = plan_children(up.plans[0])
    assert {word for word in engine.argv if word.startswith("--")} == {*_OWN_FLAGS, "--dtype"}


def test_a_folder_that_cannot_be_used_is_named(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, reason in ((file, "it is a file"), (file / "data", "Not a directory")):
        said, code = up.refusal(data_dir=str(folder))
        assert said == f"The folder '{folder}' cannot be used ({reason}). Choose another with --data-dir."
        assert code == Exit.REFUSED
    up.data_dir.mkdir()
    (up.data_dir / "valkey").touch()
    said, code = up.refusal()
    assert code == Exit.REFUSED and said.startswith(f"The folder '{up.data_dir / 'valkey'}' cannot be made (")


@pytest.mark.parametrize("host", ["", "..", "a" * 70, "[::1]", "no such host"])
def test_what_is_no_address_is_refused(up: Up, host: str) -> None:
    said, code = up.refusal(host=host)
    assert code == Exit.REFUSED and f"cannot be had on {host}: " in said


async def test_an_ipv6_address_is_asked_and_shown_in_brackets(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    try:
        server = await asyncio.start_server(answer, "::1", 0)
    except OSError as error:
        pytest.skip(f"there is no IPv6 here: {error}")
    async with server:
        port = server.sockets[0].getsockname()[1]
        plan = StackPlan("m", "::1", port, 1, 2, "redis://elsewhere/0", tmp_path)
        [[_, gateway]] = plan_children(plan)
        assert gateway.where == f"[::1]:{port}" and await gateway.healthy()


async def test_a_url_that_is_none_has_no_gateway() -> None:
    for url in ("http://::1:8000", "http://x:port", "x"):
        assert not await probes.gateway_ready(url)
