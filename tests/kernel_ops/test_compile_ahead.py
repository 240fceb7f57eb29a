"""Kernels are compiled by other processes, for a GPU that need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, logging, sys
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from kernels.gpu import compile_ahead, norm

class Driver(compile_ahead._NoDevice):
    def get_current_stream(self, device):
        return 0

target = GPUTarget("cuda", 90, 32)
driver.set_active(Driver(target))
compile_ahead._FEW = 0
fault = sys.argv[1:] == ["fault"]

def need():
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    written = [norm.rms_norm(x, weight, 1e-5) for _ in range(2)]
    return [*written, norm.rms_norm(x, weight, 1e-5, x.clone())]

found = {"hits": []}
with compile_ahead.collecting() as jobs:
    found["zeros"] = all(bool((y == 0).all()) for y in need())
jobs = list(jobs)
found["jobs"] = len(jobs)
if fault:
    jobs.append(compile_ahead.Job("kernels.gpu.norm", "no_such_kernel", "", "{}"))
compile_ahead.compile_all(jobs, target=target)
started = []
compile_ahead._start = lambda *work: started.append(work)
try:
    compile_ahead.compile_all(jobs, target=target)
except AttributeError:  # there is no process
    pass
found["started_again"] = len(started)
knobs.compilation.listener = lambda **told: found["hits"].append(told["cache_hit"])
for job in jobs[:2]:
    norm._rms_norm.preload(job.specialization)
print(json.dumps(found))
"""


def run(cache: Path, *arguments: str) -> tuple[dict[str, object], str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_what_is_needed_is_compiled_elsewhere_once_and_found_here(tmp_path: Path) -> None:
    found, _ = run(tmp_path)
    assert found == {"zeros": True, "jobs": 2, "started_again": 0, "hits": [True, True]}


def test_a_kernel_that_cannot_be_compiled_is_told_and_holds_nobody_up(tmp_path: Path) -> None:
    found, told = run(tmp_path, "fault")
    assert found["started_again"], "as some are not there"
    assert found["hits"] == [True, True]
    assert "no_such_kernel" in told and "processes that compile kernels failed" in told
