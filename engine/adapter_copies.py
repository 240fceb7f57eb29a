"""Copies of adapters to the device, on a stream of their own, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.step import StepRow


class AdapterCopies:
    """Keeps copies to rank pages and the steps that read these in order. On a CPU all is in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def copying(self, pages: Sequence[int]) -> Iterator[Callable[[], bool]]:
        """What is launched inside runs behind all steps launched so far, and beside those that follow.

        The copy's sources must be page-locked and stay as they are. The value says whether it has been made.
        """
        if self._stream is None:
            yield _at_once
            return
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield done.query
            done.record()
        self._under_way.update(dict.fromkeys(pages, done))

    def wait_for(self, rows: Sequence[StepRow]) -> None:
        """Makes what is launched from here on wait, on the device, for the copies that rows read."""
        self._under_way = {page: done for page, done in self._under_way.items() if not done.query()}
        if not self._under_way:
            return
        read = {page for row in rows if row.adapter is not None for page in row.adapter.pages}
        for page, done in self._under_way.items():
            if page in read:
                torch.cuda.current_stream().wait_event(done)


def _at_once() -> bool:
    return True
