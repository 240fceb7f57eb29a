"""Chat templates that tenants uploaded, rendered in a process that can be killed.

The sandbox keeps a template from Python's internals, but not from every way to spend time and memory: no
filter of jinja2 knows a bound. A thread cannot be stopped, so such templates run elsewhere.
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
from typing import Any

from gateway.chat_template import ChatTemplateError, Message
from gateway.template_worker import LENGTH

_TIMEOUT_S = 5.0
_REFUSE_S = 60.0
_MAX_REMEMBERED = 1000


class TemplateHost:
    """One process that renders, started with the first template, and again after it was killed."""

    def __init__(self, *, timeout_s: float = _TIMEOUT_S) -> None:
        """`timeout_s`: how long one rendering may take."""
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._refused_until: OrderedDict[str, float] = OrderedDict()

    async def render(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> str:
        """Returns the text of a conversation; `options` are `ChatTemplate.render`'s.

        Raises ChatTemplateError; at once, for a minute after a rendering took too long, so that a template
        cannot keep all others waiting.
        """
        if time.monotonic() < self._refused_until.get(source, 0.0):
            raise ChatTemplateError("The adapter's chat template took too long a moment ago.")
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
        async with self._lock:
            answer = await self._ask(source, LENGTH.pack(len(data)) + data)
        if "fault" in answer:
            raise ChatTemplateError(answer["fault"])
        return answer["text"]

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            await self._kill(self._process)

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
