"""Becomes another program that ends when its parent does, however the parent ends.

    python guarded.py PARENT_PID PROGRAM [ARGUMENT ...]

The kernel sends SIGTERM to this process when its parent dies (PR_SET_PDEATHSIG),
and that stays so over exec. A program of its own, rather than code between fork
and exec, since the latter may run no Python safely beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Asks for the signal and replaces this process with `argv`. Exits when the parent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
