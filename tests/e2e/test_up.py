"""`loraplex up` with the real model: it mends itself, and leaves nothing however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from examples.local_stack import BIN, LocalStack, Ports
from examples.smollm2 import gguf_file
from tests.e2e.processes import BASE, EXACT, PIRATE, START_S, wait_until
from tests.ports import is_free, reserve_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENGINE_ARGS = (*EXACT, "--max-model-len", "1024", "--num-gpu-blocks-override", "128")
QUESTION = "What is the capital of Germany?"


class Up:
    """A `loraplex up`, its temporary files in a folder of their own."""

    def __init__(self, folder: Path, ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ports = ports
        self.data_dir = folder / "var"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        self.stack = LocalStack(gguf_file(), ports, self.data_dir, ENGINE_ARGS)

    def processes(self) -> dict[str, int]:
        """The ids of all processes of this stack, by what they run."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if any(f" {port} " in command or f":{port} " in command for port in vars(self.ports).values()):
                name = next(
                    (name for name in (" up ", "-m engine", "-m gateway") if name in command), "valkey"
                )
                found[name.removeprefix("-m ").strip()] = int(path.parent.name)
        return found

    def assert_left_nothing(self) -> None:
        assert self.processes() == {}
        assert all(is_free(port) for port in vars(self.ports).values())
        assert [*self.temporary.iterdir(), *(self.data_dir / "store" / "staging").iterdir()] == []


@contextmanager
def up(folder: Path, ports: Ports) -> Iterator[Up]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        running = Up(folder, ports, monkeypatch)
        try:
            running.stack.wait_until_ready()
            yield running
        finally:
            running.stack.stop()
            for left in running.processes().values():  # only if the test has failed
                os.kill(left, signal.SIGKILL)


def ask(stack: LocalStack, key: str, model: str) -> str:
    client = OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=0, timeout=START_S)
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16
    )
    return answer.choices[0].message.content or ""


def say_in_vain(arguments: list[str]) -> str:
    """Runs a `loraplex up` that must refuse to start, and returns what it says."""
    command = [str(BIN / "loraplex"), "up", "--model", str(gguf_file()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_mends_itself_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    ports = Ports(*reserve_ports(3))
    with up(tmp_path, ports) as running:
        stack = running.stack
        key = stack.create_tenant("acme")
        stack.command("adapters", "upload", str(PIRATE), "--name", "pirate", key=key)
        answer = ask(stack, key, "pirate")
        assert answer != ask(stack, key, BASE)

        for name in ("valkey", "engine", "gateway"):
            killed = running.processes()[name]
            os.kill(killed, signal.SIGKILL)
            wait_until(
                lambda: sum(line.startswith(f"{name} is ready on") for line in stack.lines) == 2,  # noqa: B023
                f"the {name} is ready again",
                START_S,
            )
            assert running.processes()[name] != killed
            said = [line for line in stack.lines if line.startswith(f"{name} was killed by SIGKILL")]
            assert said == [f"{name} was killed by SIGKILL; starting it again in 0.5 s"]
            wait_until(lambda: httpx.get(f"{stack.url}/ready").status_code == 200, "the gateway is ready")
            assert ask(stack, key, "pirate") == answer

        taken = say_in_vain(
            [
                *("--port", str(ports.gateway), "--engine-port", str(ports.engine)),
                *("--redis-port", str(ports.redis), "--data-dir", str(tmp_path / "other")),
            ]
        )
        for process, port, flag in (
            ("the gateway", ports.gateway, "--port"),
            ("the engine", ports.engine, "--engine-port"),
            ("Valkey", ports.redis, "--redis-port"),
        ):
            assert f"Port {port} for {process} is taken; choose another with {flag}." in taken
        other = Ports(*reserve_ports(3))
        assert "Another stack runs on the folder" in say_in_vain(
            [
                *("--port", str(other.gateway), "--engine-port", str(other.engine)),
                *("--redis-port", str(other.redis), "--data-dir", str(running.data_dir)),
            ]
        )

        assert set(running.processes()) == {"up", "valkey", "engine", "gateway"}
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(timeout=30) == 0
        assert stack.lines[-1] == "stopped"
        assert not [line for line in stack.lines if "Traceback" in line]
        running.assert_left_nothing()


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        starting = Up(tmp_path, Ports(*reserve_ports(3)), monkeypatch)
    process = starting.stack.process
    wait_until(lambda: "engine" in starting.processes(), "the engine has been launched", START_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0
    starting.stack.stop()
    assert list(starting.stack.lines)[-2:] == ["stopping; Ctrl-C again ends it at once", "stopped"]
    assert starting.processes() == {}


def test_killed_it_leaves_no_child_and_starts_again_where_it_was(tmp_path: Path) -> None:
    ports = Ports(*reserve_ports(3))
    with up(tmp_path, ports) as running:
        key = running.stack.create_tenant("acme")
        running.stack.command("adapters", "upload", str(PIRATE), "--name", "pirate", key=key)
        answer = ask(running.stack, key, "pirate")
        assert set(running.processes()) == {"up", "valkey", "engine", "gateway"}
        running.stack.process.kill()
        running.stack.process.wait()
        wait_until(lambda: not running.processes(), "no child is left")
        running.assert_left_nothing()
    with up(tmp_path, ports) as again:
        assert ask(again.stack, key, "pirate") == answer
