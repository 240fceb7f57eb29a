"""Compiles kernels in processes of their own, many at a time, before this one needs them.

Triton compiles a kernel when it is first launched, in half a second, and a model needs more than a hundred.
Threads would not do, since 40 % of it is Python. So the steps are gone through once with nothing launched;
processes share out what would have been compiled, and leave it in Triton's cache, where this one finds it.
All of that may fail: then kernels are compiled one by one, as ever.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, cast

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

_log = logging.getLogger(__name__)

_MOST_PROCESSES = 16
"""Each imports torch, and takes half a gigabyte meanwhile."""
_FEW = 4
"""So many kernels take this process less time than others to begin."""
_DEADLINE_S = 180.0
_STAMP = "compiled"

_UNWRITTEN: frozenset[Callable[..., Any]] = frozenset(
    (torch.empty, torch.empty_like, torch.Tensor.new_empty, torch.empty_strided)
)


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one kind of arguments.

    Attributes:
        module, name: of the function.
        source: a digest of its code and of all that it calls.
        specialization: Triton's own description, which `JITFunction.preload` takes.
    """

    module: str
    name: str
    source: str
    specialization: str


@contextmanager
def collecting() -> Iterator[dict[Job, None]]:
    """Within it kernels that this process has not compiled are noted, in their order, and not launched.

    What a kernel would have written is zeros meanwhile, and so no index points beyond anything.
    """
    jobs: dict[Job, None] = {}

    def note(*, fn: Any, compile: Any, **_: object) -> bool:
        jobs[Job(fn.module, fn.name, fn.jit_function.cache_key, compile["specialization_data"])] = None
        return True

    runtime: Any = knobs.runtime  # whose type knows no hook but None
    earlier, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        with _Zeros():
            yield jobs
    finally:
        runtime.jit_cache_hook = earlier


class _Zeros(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNWRITTEN else made


def compile_all(jobs: Sequence[Job], *, target: GPUTarget | None = None) -> None:
    """Returns when the kernels are in Triton's cache, as far as that works. Does nothing the second time.

    Args:
        target: what to compile for; None: the current device.
    """
    if len(jobs) <= _FEW:
        return
    if target is None:
        target = cast(GPUTarget, driver.active.get_current_target())
    text = json.dumps([triton.__version__, asdict(target), sorted(map(asdict, jobs), key=str)])
    kept = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
    if kept.get_file(_STAMP) is not None:
        return
    began = time.monotonic()
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), len(jobs))
    # Kernels that take alike long stand side by side, so each process gets every count-th.
    processes = [_start(jobs[first::count], target) for first in range(count)]
    try:
        failed = [code for process in processes if (code := process.wait(_DEADLINE_S))]
    except subprocess.TimeoutExpired:
        _log.warning(
            "kernels took over %d s to compile beforehand; the others follow one by one", _DEADLINE_S
        )
        return
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        _log.warning("%d of %d processes that compile kernels failed; see above", len(failed), count)
        return
    kept.put(b"", _STAMP)
    _log.info("compiled %d kernels in %.1f s, %d at a time", len(jobs), time.monotonic() - began, count)


def _start(jobs: Sequence[Job], target: GPUTarget) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "kernels.gpu.compile_ahead"], stdin=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    with process.stdin as work:
        work.write(json.dumps({"target": asdict(target), "jobs": [asdict(job) for job in jobs]}).encode())
    return process


class _NoDevice:
    """As much of a driver as compiling asks for, in a process that uses no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _compile(work: dict[str, Any]) -> None:
    driver.set_active(_NoDevice(GPUTarget(**work["target"])))  # type: ignore[arg-type]
    for job in (Job(**fields) for fields in work["jobs"]):
        getattr(import_module(job.module), job.name).preload(job.specialization)


if __name__ == "__main__":
    _compile(json.load(sys.stdin))
