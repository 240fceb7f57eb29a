"""`make demo` as a newcomer runs it, on free ports: once, and until Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.ports import is_free, reserve_ports

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150.0

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LIMIT_S)]


class Demo:
    """One run of the demo, its output in a file, its temporary files in a folder of their own."""

    def __init__(self, folder: Path, ports: list[int], *, once: bool) -> None:
        self.ports = ports
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.output = folder / "output"
        flags = zip(("--port", "--engine-port", "--redis-port"), map(str, ports), strict=True)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "examples/demo.py", *(part for flag in flags for part in flag)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "ONCE": "1" if once else "",
                    "TMPDIR": str(self.temporary),
                    "COLUMNS": "120",
                    "OMP_NUM_THREADS": "2",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is ignored by whatever a shell runs in the background, and so by its children.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while words not in self.text:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def assert_left_nothing(self) -> None:
        assert all(is_free(port) for port in self.ports)
        assert not list(self.temporary.glob("loraplex-*"))
        marks = [str(self.temporary), *(f":{port}" for port in self.ports)]
        assert not [line for line in command_lines() if any(mark in line for mark in marks)]


def command_lines() -> list[str]:
    """The command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has just ended
            continue
    return lines


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Demo]:
    """A demo that has shown its answers and keeps serving."""
    demo = Demo(tmp_path / "serving", reserve_ports(3), once=False)
    try:
        demo.wait_for("serving until Ctrl-C")
        yield demo
    finally:
        demo.process.send_signal(signal.SIGINT)
        demo.process.wait(timeout=60)


def test_once_answers_and_leaves_nothing(tmp_path: Path) -> None:
    demo = Demo(tmp_path, reserve_ports(3), once=True)
    assert demo.process.wait(timeout=LIMIT_S) == 0, demo.text
    for words in ("acme", "globex", '{"answer": "Berlin"}', "arr", "TTFT", "tokens/s", "model_not_found"):
        assert words in demo.text
    demo.assert_left_nothing()


def test_serves_until_ctrl_c_and_a_second_one_names_the_port(serving: Demo, tmp_path: Path) -> None:
    curl = re.search(r"^curl .*$", serving.text, re.MULTILINE)
    assert curl is not None
    done = subprocess.run(shlex.split(curl[0]), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]

    second = Demo(tmp_path / "second", serving.ports, once=True)
    assert second.process.wait(timeout=60) == 1
    assert f"Port {serving.ports[0]} " in second.text
    assert "Traceback" not in second.text
    assert not list(second.temporary.iterdir())
    assert serving.process.poll() is None

    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(timeout=60) == 0, serving.text
    assert "Traceback" not in serving.text
    serving.assert_left_nothing()
