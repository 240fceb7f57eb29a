"""A whole stack for as long as a program needs it: what `loraplex up` starts, on a temporary folder."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway import guarded

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120.0
READY_LINE = "Loraplex serves "


class StackFailed(Exception):
    """The stack, or a command sent to it, failed; the message holds what it said."""


@dataclass(frozen=True)
class Ports:
    """Where the three processes listen on 127.0.0.1."""

    gateway: int = 8000
    engine: int = 50051
    redis: int = 6380


def free_ports() -> Ports:
    """Three ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    gateway, engine, redis = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return Ports(gateway, engine, redis)


class LocalStack:
    """`loraplex up` as a child process. Its last lines of output are kept, to be shown if it fails."""

    def __init__(self, model: Path, ports: Ports, data_dir: Path, engine_args: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{ports.gateway}"
        self.operator_key = f"operator-{secrets.token_urlsafe(24)}"
        self.lines: deque[str] = deque(maxlen=60)
        command = [str(BIN / "loraplex"), "up", "--model", str(model), "--data-dir", str(data_dir)]
        command += ["--host", "127.0.0.1", "--port", str(ports.gateway), "--engine-port", str(ports.engine)]
        command += ["--redis-port", str(ports.redis), "--", *engine_args]
        # In a session of its own, so that Ctrl-C reaches this process alone, which then stops the stack in
        # order; guarded, so that the stack also ends when this process is killed.
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guarded.__file__, str(os.getpid()), *command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._serves = False
        self._settled = threading.Event()
        self._reader = threading.Thread(target=self._keep_output, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait until the stack says that it serves. Raises StackFailed if it ends or takes too long."""
        # Its own word counts: at these ports another stack may answer.
        settled = self._settled.wait(START_TIMEOUT_S)
        if not self._serves:
            reason = "did not start" if settled else f"was not ready after {START_TIMEOUT_S:.0f} s"
            raise StackFailed("\n".join([*self.lines, f"The stack {reason}."]))

    def stop(self) -> None:
        """Stop everything and wait until it has stopped."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self._reader.join(timeout=5)

    def command(self, name: str, *arguments: str, key: str) -> str:
        """Run `loraplex` or `adapters` against this stack and return what it prints.

        Raises:
            StackFailed: the command failed; holds its error message.
        """
        done = subprocess.run(
            [str(BIN / name), *arguments],
            env={**os.environ, "LORAPLEX_URL": self.url, "LORAPLEX_API_KEY": key},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StackFailed(f"`{shlex.join([name, *arguments])}` failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def create_tenant(self, tenant: str) -> str:
        """Make a tenant and return a key of it."""
        self.command("loraplex", "tenants", "create", tenant.title(), "--id", tenant, key=self.operator_key)
        return self.command("loraplex", "keys", "create", tenant, key=self.operator_key)

    def _environment(self) -> dict[str, str]:
        """Ours, but for a Redis that other stacks may live on: this one has its own."""
        kept = {name: value for name, value in os.environ.items() if name != "LORAPLEX_REDIS_URL"}
        return {**kept, "LORAPLEX_OPERATOR_KEY": self.operator_key}

    def _keep_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if line.startswith(READY_LINE):
                    self._serves = True
                    self._settled.set()
        self._settled.set()


@contextmanager
def local_stack(model: Path, ports: Ports, engine_args: Sequence[str] = ()) -> Iterator[LocalStack]:
    """A stack that is ready, on a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="loraplex-", ignore_cleanup_errors=True) as folder:
        stack = LocalStack(model, ports, Path(folder), engine_args)
        try:
            stack.wait_until_ready()
            yield stack
        finally:
            # Another Ctrl-C, or kill, must not cut this short and leave processes behind.
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
            stack.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
