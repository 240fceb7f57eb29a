"""Answers that are complete before they begin, sent in one piece."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import count_response, id_headers

EXTENSION = "loraplex.whole_answers"
"""The extension of a scope whose `send` is a SendWhole, where the server is ours."""

SendWhole = Callable[[Scope, bytes, bytes], bool]
"""Sends the answer, of status 200, to the request of a scope: its headers as lines, and its body. Returns
False, and sends nothing, where there is more to it: ASGI's messages can do all."""


class WholeAnswer(Response):
    """A Response of status 200 with a body that is there.

    Asks the connection to send it. By ASGI's messages, it would go through what checks, joins and counts
    pieces, and each of some fifteen headers through two regular expressions.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        extension = scope.get("extensions", {}).get(EXTENSION)
        if extension is not None and self.status_code == 200:
            headers = self.raw_headers + id_headers(scope)
            lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            if extension["send"](scope, lines, self.body):
                count_response(scope, 200)
                return
        await super().__call__(scope, receive, send)
