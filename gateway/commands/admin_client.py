"""What `loraplex tenants` and `loraplex keys` share: calling
a gateway's admin API, and showing what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapters.url_segment import NoSegment, url_segment
from gateway.commands.exits import CommandFailed, Exit

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 30.0
_EXIT_OF_STATUS = {401: Exit.NOT_AUTHORISED, 403: Exit.NOT_AUTHORISED, 404: Exit.NOT_FOUND}

Url = Annotated[str, typer.Option("--url", envvar="LORAPLEX_URL", help="Base URL of a gateway.")]
ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="LORAPLEX_API_KEY",
        help="The operator's key, or a tenant's with the scope admin.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
DEFAULT_URL = "http://127.0.0.1:8000"


class AdminClient:
    """Calls a gateway's admin API, or what else lies below `root`, with one key.

    Raises CommandFailed for everything but success.
    """

    def __init__(
        self, url: str, api_key: str, *, root: str = "/admin", whose_key: str = "the operator's key"
    ) -> None:
        if not api_key:
            raise CommandFailed(f"Give {whose_key} with --api-key or LORAPLEX_API_KEY.", Exit.USAGE)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._root = root
        self._headers = {"Authorization": f"Bearer {api_key}"}

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends one request below the root and returns the JSON object of the answer."""
        import httpx  # here, since every command imports this module and a gateway should start quickly

        try:
            answer = httpx.request(
                method, f"{self._url}{self._root}{path}", headers=self._headers, json=body, timeout=_TIMEOUT_S
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise CommandFailed(f"No gateway answers at {self._url}: {reason}.", Exit.UNREACHABLE) from None
        except UnicodeEncodeError:
            raise CommandFailed("The API key has characters that no key has.", Exit.USAGE) from None
        if not answer.is_success:
            raise CommandFailed(_message_of(answer), _EXIT_OF_STATUS.get(answer.status_code, Exit.REFUSED))
        try:
            return answer.json()
        except ValueError:
            message = f"What answers at {self._url} is not a Loraplex gateway."
            raise CommandFailed(message, Exit.UNREACHABLE) from None


def quoted(segment: str) -> str:
    """An id as one segment of a path. Raises CommandFailed for what would make it another path."""
    try:
        return url_segment(segment)
    except NoSegment as error:
        raise CommandFailed(str(error), Exit.USAGE) from None


def show_json(value: object) -> None:
    """Prints a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under headings; whole, also where the terminal is narrow."""
    from adapters.commands.shared import print_table  # here, for the same reason

    print_table(columns, rows)


def show_fields(fields: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Prints names and their values, a line for each value."""
    from adapters.commands.shared import printable  # here, for the same reason

    width = max(len(name) for name, _ in fields) + 2
    for name, lines in fields:
        for shown, line in zip([name, *[""] * len(lines)], lines, strict=False):
            typer.echo(printable(f"{shown:<{width}}{line}"))


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {answer.status_code} without a reason; is it a Loraplex gateway?"
