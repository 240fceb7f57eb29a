"""Programmatic dependent launch, for every kernel of this folder.

A decode step is several hundred short kernels in one stream. On Hopper a kernel may start while the one
before it drains: it loads what no kernel of the step writes (weights, rank pages, the plan), then waits.

Two rules hold in each kernel here. Nothing that an earlier kernel of the step wrote is touched before
``wait_for_inputs``. And every program waits, also one that has nothing to do: otherwise this kernel could end
before the one ahead of it, and whatever comes next would take that one for finished.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CARVEOUT, _MOST_SHARED = 9, 100
"""CUDA's attribute of a kernel: how much of a processor's memory it prefers as shared memory, in percent."""


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` for what the host launches: untyped, since launch options are no parameters of it."""
    return triton.jit(function, **options)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _prefer_shared_memory(
    module: object, function: Any, name: str, metadata_group: dict[str, str], hash: str
) -> None:
    """Has a kernel that is loaded prefer all the shared memory that there is.

    Triton does so with kernels of more than 48 KiB alone. Kernels of two preferences run one after another: a
    processor must be empty before it is divided anew.
    """
    error = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _MOST_SHARED)
    assert error == 0, f"{name}: CUDA error {error}"


knobs.runtime.kernel_load_end_hook.add(_prefer_shared_memory)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def list_block(n: int) -> int:
    """The block for a list of ``n``, at least: of few sizes, since each is compiled by itself."""
    return 32 if n <= 32 else max(256, power_of_2(n))


@cache
def _dependent_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def dependent_launch(x: torch.Tensor) -> bool:
    """Whether kernels on the device of ``x`` are launched dependently (and must be told so by ``PDL``)."""
    return x.is_cuda and _dependent_launch(x.device.index)


def num_processors(x: torch.Tensor) -> int:
    """Multiprocessors of the device of ``x``; a small number under the interpreter, to exercise loops."""
    return _processors(x.device.index) if x.is_cuda else 2


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Returns once every kernel before this one has finished and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Lets the next kernel's programs take the processors that this one leaves free."""
    if PDL:
        gdc_launch_dependents()
