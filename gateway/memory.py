"""What glibc's allocator is told, so that a gateway stays small; nothing where there is another."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Has all threads allocate from one heap, before there are any: one of its own for each costs some 6 MB.

    Few of them run at once, since most of what they do holds the interpreter's lock.
    """
    _call("mallopt", _M_ARENA_MAX, 1)


def give_back() -> None:
    """Returns to the system what is free: after a large file was read, some 15 MB."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
