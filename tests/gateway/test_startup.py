"""The gateway is small and quick: no torch, and ready in about a second of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
