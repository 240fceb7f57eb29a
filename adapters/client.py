"""Calls a gateway's `/v1/adapters`, as the `adapters` command does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from adapters.patient_http import PatientClient
from adapters.upload_client import LocalAdapter, UploadInterrupted, UploadRefused, upload
from adapters.url_segment import NoSegment, url_segment

_PIECE_BYTES = 1024 * 1024
_CONNECT_S = 10.0
_ANSWER_S = 600.0
"""The server reads and hashes all of an upload before it answers."""


class Exit(IntEnum):
    """Exit codes of the command, which scripts rely on."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_AUTHORISED = 4
    NOT_FOUND = 5


_EXIT_OF_STATUS = {401: Exit.NOT_AUTHORISED, 403: Exit.NOT_AUTHORISED, 404: Exit.NOT_FOUND}
_EXIT_OF_CODE = {"pull_not_allowed": Exit.REFUSED}
"""What no other key would change."""


class ClientError(Exception):
    """A call that failed: one sentence for the user, and how the command ends."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class AdaptersClient:
    """One tenant's adapters on one gateway. Every call raises `ClientError` for everything but success.

    A call that a limit refuses for now is sent again when its time has come. `on_wait` is told the server's
    reason and for how many seconds it is waited.
    """

    def __init__(
        self, url: str, api_key: str, on_wait: Callable[[str, float], None] = lambda reason, seconds: None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = PatientClient(
                on_wait,
                base_url=self._url,
                headers={"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ClientError(f"The URL or key cannot be used: {error}.", Exit.USAGE) from None

    def __enter__(self) -> AdaptersClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def upload(
        self,
        folder: Path,
        name: str,
        *,
        allow_zero: bool = False,
        promote: bool = True,
        on_sent: Callable[[int], None],
    ) -> dict[str, Any]:
        """Streams the files of an adapter; memory stays flat. What the tenant has uploaded before is not
        sent, and what broke off goes on. `on_sent` gets the bytes sent since its last call.

        Returns the new version as the server describes it.
        """
        # Learns of a bad URL or key before gigabytes are read and hashed.
        self._call("GET", "/v1/adapters")
        with self._answers():
            try:
                return upload(self._http, LocalAdapter(folder, name, allow_zero, promote), on_sent)
            except UploadRefused as refused:
                raise _refusal(refused.answer) from None
            except UploadInterrupted as interrupted:
                raise ClientError(str(interrupted), Exit.UNREACHABLE) from None
            except (json.JSONDecodeError, NoSegment):
                raise self._not_a_gateway() from None

    def pull(self, body: dict[str, Any]) -> dict[str, Any]:
        """Lets the server take an adapter from a hub. Returns the new version."""
        return self._call("POST", "/v1/adapter-pulls", json=body)

    def base(self) -> dict[str, Any]:
        """Returns the shape of the base model, which an adapter must fit."""
        return self._call("GET", "/v1/adapter-base")

    def list(self) -> dict[str, Any]:
        """The live version of each name."""
        return self._call("GET", "/v1/adapters")

    def show(self, name: str) -> dict[str, Any]:
        """One name, with its versions and where they are loaded."""
        return self._call("GET", _path_of(name))

    def delete(self, ref: str) -> dict[str, Any]:
        """Deletes a name with all its versions, or one version, as ``sql@3``."""
        return self._call("DELETE", _path_of(ref))

    def of(
        self,
        ref: str,
        method: str,
        *below: str,
        body: dict[str, Any] | None = None,
        query: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Calls what lies below one adapter: ``"promote"``, ``"history"``, ``"grants", tenant``."""
        return self._call(method, _path_of(ref, *below), json=body, params=query)

    def fetch(self, ref: str, file: str, target: Path, on_received: Callable[[int], None]) -> str:
        """Streams a file of a version to `target`; memory stays flat. Returns its SHA-256 in hex."""
        path = _path_of(ref, "files", file)
        sha = hashlib.sha256()
        with self._answers(), self._http.stream("GET", path) as answer, target.open("wb") as out:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            for piece in answer.iter_bytes(_PIECE_BYTES):
                sha.update(piece)
                out.write(piece)
                on_received(len(piece))
        return sha.hexdigest()

    def _call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        with self._answers():
            answer = self._http.request(method, path, **body)
        if not answer.is_success:
            raise _refusal(answer)
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._not_a_gateway()
        return value

    def _not_a_gateway(self) -> ClientError:
        return ClientError(f"What answers at {self._url} is not a Loraplex gateway.", Exit.UNREACHABLE)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Says in a user's words what keeps an answer from coming."""
        try:
            yield
        except httpx.UnsupportedProtocol:
            raise ClientError(f"{self._url!a} is no URL; write http://host:port.", Exit.USAGE) from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ClientError(
                f"Cannot reach the server at {self._url}: {reason}.", Exit.UNREACHABLE
            ) from None


def _path_of(*names: str) -> str:
    """The path of an adapter, or of what lies below it. Raises `ClientError` for what names nothing."""
    try:
        return "/".join(("/v1/adapters", *map(url_segment, names)))
    except NoSegment as error:
        raise ClientError(str(error), Exit.USAGE) from None


def _refusal(answer: httpx.Response) -> ClientError:
    """The server's message, or what can be said without one."""
    status = answer.status_code
    exit_code = _EXIT_OF_STATUS.get(status, Exit.REFUSED)
    try:
        error = answer.json()["error"]
        return ClientError(str(error["message"]), _EXIT_OF_CODE.get(error.get("code"), exit_code))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ClientError(
            f"The server answered {status} {answer.reason_phrase} without a reason.", exit_code
        )
