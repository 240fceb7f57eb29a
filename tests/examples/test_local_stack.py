"""The stack that examples and benchmarks start touches no other one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples import local_stack
from examples.local_stack import READY_LINE, LocalStack, Ports

LORAPLEX = f"""#!{sys.executable}
import json, os, pathlib, sys
told = {{"arguments": sys.argv[1:], "variables": dict(os.environ)}}
pathlib.Path(__file__).with_name("told").write_text(json.dumps(told))
print("{READY_LINE}m", flush=True)
"""


def test_it_has_a_redis_and_an_address_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_stack, "BIN", tmp_path)
    monkeypatch.setenv("LORAPLEX_REDIS_URL", "redis://of-others/0")
    monkeypatch.setenv("LORAPLEX_HOST", "0.0.0.0")
    monkeypatch.setenv("LORAPLEX_LOG_LEVEL", "debug")
    command = tmp_path / "loraplex"
    command.write_text(LORAPLEX)
    command.chmod(0o755)
    stack = LocalStack(Path("m"), Ports(), tmp_path / "data", ["--dtype", "float32"])
    stack.wait_until_ready()
    stack.stop()
    told = json.loads((tmp_path / "told").read_text())
    assert "LORAPLEX_REDIS_URL" not in told["variables"] and "--redis-url" not in told["arguments"]
    assert told["arguments"][told["arguments"].index("--host") + 1] == "127.0.0.1"
    assert told["variables"]["LORAPLEX_OPERATOR_KEY"] == stack.operator_key
    assert told["variables"]["LORAPLEX_LOG_LEVEL"] == "debug"
