"""The gateway is small and quick: no torch, and ready in about a second of its own."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.ports import fault_of_port
from tests.ports import reserve_port

ROOT = Path(__file__).parents[2]

_REPORT = """
import resource, sys
import gateway.app
forbidden = {'torch', 'transformers', 'peft', 'triton', 'kernels', 'engine', 'numpy', 'httpx'}
heavy = sorted({name.partition('.')[0] for name in sys.modules} & forbidden)
usage = resource.getrusage(resource.RUSAGE_SELF)
memory_kib = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))
print(','.join(heavy), usage.ru_utime + usage.ru_stime, memory_kib)
"""


def test_importing_the_gateway_is_quick_and_brings_no_torch() -> None:
    for _ in range(2):  # the first run may have to compile
        output = subprocess.run(
            [sys.executable, "-c", _REPORT], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    heavy, cpu_s, memory_kib = output.rstrip("\n").split(" ")
    assert heavy == ""
    assert float(cpu_s) < 2, "processor time, so that a busy machine does not matter; about 0.7 s is normal"
    assert int(memory_kib) < 100_000, "some 85 MB is normal; a vocabulary and connections add 30"


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--port": 0, flag: taken.getsockname()[1]}
        words = [str(word) for pair in ports.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "gateway", *words],
            cwd=ROOT,
            env={
                **os.environ,
                "LORAPLEX_STORE": str(tmp_path),
                "LORAPLEX_REDIS_URL": "redis://127.0.0.1:1/0",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == f"error: Port {ports[flag]} is taken; choose another with {flag}.\n"


def test_a_host_may_be_of_either_kind_of_address() -> None:
    no_such_address = f"cannot be had on ::1: {os.strerror(errno.EADDRNOTAVAIL)}"
    assert fault_of_port("::1", port := reserve_port()) in (None, no_such_address)
    assert fault_of_port("localhost", port) is None
    assert "cannot be had on 192.0.2.1" in (fault_of_port("192.0.2.1", port) or "")
    assert "cannot be had on no.such.host.invalid" in (fault_of_port("no.such.host.invalid", port) or "")
