"""The C kernels of ``kernels/cpu``: compiled at first use for this very machine, kept for the next start.

They are built once for each element type, with the plain C compiler, and reached through ctypes. They run
on torch's own OpenMP runtime: the objects are linked without one, and resolve to the one torch has loaded. A
second runtime in the process would mean twice the threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-Wno-psabi"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_PROCESSOR = ("model name", "flags", "CPU implementer", "CPU part", "Features")
"""Starts of the lines of /proc/cpuinfo that say what code runs here, on x86-64 and on ARM."""
_ELEMENTS = {torch.float32: "0", torch.bfloat16: "1"}

_PAUSE_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0, section 2.5: what the program has set stays."""

_P, _L, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [_P] * 4 + [_L] * 2 + [_F, _I],
    "silu_mul": [_P] * 2 + [_L] * 2 + [_I],
    "rope_write_kv": [_P] * 6 + [_L] * 4 + [_I],
    "paged_attention": [_P] * 7 + [_L] * 7 + [_F, _I],
    "lora": [_P] * 11 + [_L] * 6 + [_I],
    "lora_vectors": [_P] * 4 + [_L] * 2 + [_I],
    "pack": [_P] * 2 + [_L] + [_P] + [_I],
    "sample": [_P] * 7 + [_L] * 2 + [_P] * 8 + [_L] + [_P] * 2 + [_L] * 2 + [_P] * 5 + [_I],
}
_RETURN_STATUS = ("paged_attention", "sample")


@functools.cache
def compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for tensors of ``dtype``; None where the torch reference must serve instead.

    The first call of a process may compile, which takes a few seconds: make it while starting. float32 and
    bfloat16 have kernels. Without a working C compiler one warning is logged.
    """
    if dtype not in _ELEMENTS:
        return None
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        _warn_once("there is no C compiler (install gcc)")
        return None
    try:
        return _open_or_build(compiler, dtype)
    except subprocess.CalledProcessError as error:
        _warn_once(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[-500:]}")
    except OSError as error:
        _warn_once(str(error))
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("CPU kernels run on the torch reference, many times slower: %s", reason)


def default_cache_folder() -> Path:
    """Where built libraries are kept: ``$XDG_CACHE_HOME/loraplex``, by default ``~/.cache/loraplex``.

    Raises:
        OSError: this user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "loraplex"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def release_threads() -> None:
    """Ends the OpenMP threads that the calling thread has gathered; it gathers new ones at need.

    For a thread that has computed and will not again. The runtime counts the threads of everybody, and once
    they outnumber the cores, those at a barrier go to sleep where they would have spun: a decode step of one
    row then took 23.4 ms in place of 15.4 (SmolLM2-135M, two cores).
    """
    pause = _pause_function()
    if pause is not None:
        pause(_PAUSE_SOFT)


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """``omp_pause_resource_all``, if the runtime has it. To find the runtime takes a millisecond."""
    return getattr(ctypes.CDLL(_openmp_runtime()), "omp_pause_resource_all", None)


def _open_or_build(compiler: str, dtype: torch.dtype) -> ctypes.CDLL:
    name = f"cpu-{str(dtype).removeprefix('torch.')}-{_fingerprint(compiler)}.so"
    try:
        cache = default_cache_folder()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trusted(cache)
        if not (cache / name).exists():
            _build(compiler, dtype, cache / name)
        return _open(cache / name)
    except OSError as error:
        # No home, a read-only or full one, a damaged library: build for this process alone.
        logger.info("CPU kernels are built anew at each start: %s", error)
    with tempfile.TemporaryDirectory(prefix="loraplex-kernels-") as folder:
        _build(compiler, dtype, Path(folder) / name)
        return _open(Path(folder) / name)  # the mapping outlives the file


def _check_trusted(folder: Path) -> None:
    """What lies in the cache is run, so nobody else may have put it there.

    Raises:
        PermissionError: others own the folder or may write to it.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}; chmod go-w it")


def _fingerprint(compiler: str) -> str:
    """Changes with whatever the machine code depends on: sources, flags, compiler and processor."""
    digest = hashlib.sha256(repr((_FLAGS, os.path.realpath(compiler), platform.machine())).encode())
    for path in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    digest.update(repr(sorted({line for line in lines if line.startswith(_PROCESSOR)})).encode())
    return digest.hexdigest()[:16]


def _build(compiler: str, dtype: torch.dtype, target: Path) -> None:
    """Compile into ``target``. It appears whole or not at all, so processes may do this at the same time."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        element = f"-DELEMENT_BFLOAT16={_ELEMENTS[dtype]}"
        sources = sorted(_SOURCES.glob("*.c"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [compiler, *_FLAGS, element, "-c", str(source), "-o", target_object]
            for source, target_object in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        # No -fopenmp here: see the module's docstring.
        built = Path(folder) / target.name
        _run([compiler, "-shared", *objects, "-lm", "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _open(path: Path) -> ctypes.CDLL:
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    kernels = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes = arguments
        function.restype = _I if name in _RETURN_STATUS else None
    return kernels


def _openmp_runtime() -> str:
    """The file of the OpenMP runtime that torch has loaded; else the system's."""
    try:
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        mapped = set()
    loaded = sorted(path for path in mapped if Path(path).name.startswith("libgomp"))
    return loaded[0] if loaded else "libgomp.so.1"
