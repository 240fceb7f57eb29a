"""Threads for calls that wait for a store, apart from those that everything else is handed to.

A store that does not answer holds each call for as long as its own timeouts allow. Among the event loop's few
default threads, where prompts are tokenised, a handful of such calls would hold up whoever needs no store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

NUM_STORE_THREADS = 64
"""They wait, and hardly compute. Calls beyond wait for one of them, which only calls to the store do."""

_threads = ThreadPoolExecutor(NUM_STORE_THREADS, thread_name_prefix="store")

P = ParamSpec("P")
T = TypeVar("T")


async def in_store_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what a call to a store, or to what lies on its disk, returns; it may block. Raises what that
    raises. One that has begun goes on when its caller is cancelled.
    """
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(call, *args, **kwargs))
