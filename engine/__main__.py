"""``python -m engine``: loads a model, serves it, announces it, and ends as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

SWITCH_INTERVAL_S = 0.0001
"""How long another thread may keep the interpreter from the engine's loop, which asks for it some forty times
a step (Python's default: 5 ms)."""
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Page-locks host memory by several threads: 4 GiB in 0.8 s instead of 2.8."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

logger = logging.getLogger("engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs an engine until it is told to stop. Returns the exit status: 0 after a signal, else 1.

    Threads may still run then, and may never end: see `end_process`. The imports are in here so that the time
    to ready includes them, and ``--help`` does without torch.
    """
    started = time.monotonic()
    from engine.settings import parse_args

    settings = parse_args(argv)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    prepare_process()

    from engine.assembly import assemble
    from engine.memory import NotEnoughMemory
    from engine.model.errors import ModelNotAvailable
    from engine.process import serve
    from engine.server import CannotListen

    # Until the server takes signals, SIGTERM is as Ctrl-C, so that half-built kernels are cleared away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = asyncio.Runner()  # never closed, which would wait for threads: a look-up of a host may hang
    try:
        return runner.run(serve(assemble(settings), settings, started=started))
    except (ModelNotAvailable, NotEnoughMemory, CannotListen, OSError, ValueError) as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 0
    except Exception:  # else Python would tell of it, and then wait for the threads
        logger.exception("the engine has failed")
        return 1


def prepare_process() -> None:
    """Sets what is one for the process. To be called before torch first uses a GPU."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):  # else the operator knows better
        os.environ[_ALLOCATOR_VARIABLES[0]] = PINNING


def end_process(status: int) -> NoReturn:
    """Ends the process when all is told, whatever its threads do.

    Python would wait for those of every pool, and a read that hangs has one for as long as it hangs.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    end_process(main())
