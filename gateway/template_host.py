"""Chat templates that tenants uploaded, rendered in a process that can be killed.

The sandbox keeps a template from Python's internals, but not from every way to spend time and memory: no
filter of jinja2 knows a bound. A thread cannot be stopped, so such templates run elsewhere.

All tenants share the process, one rendering after the other. So that templates which take almost as long as
they may keep nobody from it, a tenant has one rendering in line at a time, and rests after one that was long.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gateway.chat_template import ChatTemplateError, Message
from gateway.template_worker import LENGTH

_TIMEOUT_S = 5.0
_REFUSE_S = 60.0
_MAX_REMEMBERED = 1000
_QUICK_S = 0.05
_REST_FACTOR, _MOST_REST_S = 3.0, 10.0
"""A rendering that is not quick costs its tenant a rest of so many times as long."""


@dataclass(slots=True)
class _Line:
    """The renderings of one tenant, which come one by one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    open_at: float = 0.0
    """When the next may begin, by time.monotonic()."""


class TemplateHost:
    """One process that renders, started with the first template, and again after it was killed."""

    def __init__(self, *, timeout_s: float = _TIMEOUT_S) -> None:
        """`timeout_s`: how long one rendering may take."""
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._refused_until: OrderedDict[str, float] = OrderedDict()
        self._lines: dict[str, _Line] = {}

    async def render(
        self,
        tenant: str,
        source: str,
        named_tokens: Mapping[str, str],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> str:
        """Returns the text of a conversation, for a request of a tenant.

        `options` are `ChatTemplate.render`'s. Raises ChatTemplateError; at once, for a minute after a
        rendering took too long.
        """
        self._check(source)
        question = {
            "source": source,
            "named_tokens": dict(named_tokens),
            "messages": list(messages),
            "options": dict(options),
        }
        try:
            data = await asyncio.to_thread(lambda: json.dumps(question).encode())
        except RecursionError:
            raise ChatTemplateError("What the chat template is to show is nested too deeply.") from None
        line = self._line_of(tenant)
        async with line.lock:
            await asyncio.sleep(line.open_at - time.monotonic())
            async with self._lock:
                self._check(source)
                answer = await self._timed(line, source, LENGTH.pack(len(data)) + data)
        if "fault" in answer:
            raise ChatTemplateError(answer["fault"])
        return answer["text"]

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            await self._kill(self._process)

    def _check(self, source: str) -> None:
        if time.monotonic() < self._refused_until.get(source, 0.0):
            raise ChatTemplateError("The adapter's chat template took too long a moment ago.")

    def _line_of(self, tenant: str) -> _Line:
        if len(self._lines) >= _MAX_REMEMBERED:
            now = time.monotonic()
            self._lines = {
                name: line for name, line in self._lines.items() if line.lock.locked() or now < line.open_at
            }
        return self._lines.setdefault(tenant, _Line())

    async def _timed(self, line: _Line, source: str, question: bytes) -> dict[str, Any]:
        """Asks, and lets the tenant pay for the time that it took; not for the start of the process."""
        begins = self._process is None or self._process.returncode is not None
        began, answer = time.monotonic(), None
        try:
            answer = await self._ask(source, question)
            return answer
        finally:
            now = time.monotonic()
            took_s = 0.0 if begins and answer is not None else now - began - _QUICK_S
            line.open_at = now + min(max(0.0, _REST_FACTOR * took_s), _MOST_REST_S)

    async def _ask(self, source: str, question: bytes) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                process.stdin.write(question)
                await process.stdin.drain()
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                data = await process.stdout.readexactly(length)
            answered = True
        except TimeoutError:
            self._refuse(source)
            raise ChatTemplateError("The adapter's chat template takes too long.") from None
        except (OSError, EOFError):
            raise ChatTemplateError("The adapter's chat template takes too much memory.") from None
        finally:
            # Also when the request is cancelled: its answer must not be taken for the next one's.
            if not answered:
                await self._kill(process)
        return json.loads(data)

    def _refuse(self, source: str) -> None:
        self._refused_until[source] = time.monotonic() + _REFUSE_S
        if len(self._refused_until) > _MAX_REMEMBERED:
            self._refused_until.popitem(last=False)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.template_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},  # none of the gateway's secrets
            )  # fmt: skip
        return self._process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self._process = None
