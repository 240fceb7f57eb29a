"""Sends an adapter's files to a gateway so that what breaks off goes on, and what is known is not sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from adapters.adapter_files import is_adapter_file
from adapters.blob_store import sha256_of
from adapters.url_segment import url_segment

_ROUTE = "/v1/adapter-uploads"
_OFFSET_HEADER = "Upload-Offset"
_PIECE_BYTES = 1024 * 1024
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between tries that bring nothing forward; after the last, the upload is given up."""
_STARTS = 3
"""How often an upload is begun anew, when the server has lost it or the files have changed meanwhile."""


class UploadRefused(Exception):
    """The server's answer was no."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"status {answer.status_code}")
        self.answer = answer


class UploadInterrupted(Exception):
    """The connection is lost, and did not come back; the same upload goes on from there. One sentence."""


class _StartAnew(UploadRefused):
    """The server knows no such upload, or has found that a file is not what was announced."""


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """A folder to upload, and how."""

    folder: Path
    name: str
    allow_zero: bool = False
    promote: bool = True

    @property
    def files(self) -> list[Path]:
        """What of the folder is part of the adapter."""
        return sorted(file for file in self.folder.iterdir() if is_adapter_file(file.name) and file.is_file())

    @property
    def nbytes(self) -> int:
        """Of all its files."""
        return sum(file.stat().st_size for file in self.files)

    def announcement(self) -> dict[str, Any]:
        """What the server is told first; reads and hashes the files."""
        files = [
            {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in self.files
        ]
        options = {"allow_zero": self.allow_zero, "promote": self.promote}
        return {"name": self.name, "files": files, **options}


def upload(http: httpx.Client, adapter: LocalAdapter, on_sent: Callable[[int], None]) -> dict[str, Any]:
    """Uploads an adapter, and returns the new version as the server describes it. Memory stays flat.

    `on_sent` gets how many bytes more the server has than at its last call, fewer if it has lost some.
    Raises `UploadRefused`; httpx.TransportError when the server cannot be reached, `UploadInterrupted` when
    that is so in the middle.
    """
    for start in range(_STARTS):
        begun = _json(http.post(_ROUTE, json=adapter.announcement()))
        progress = _Progress(on_sent, adapter.nbytes)
        if begun["status"] == "complete":
            progress.all_is_there()
            return begun["adapter"]
        try:
            # Only the adapter's own: a server that is not what it seems could name any file of this machine.
            offsets = {file["name"]: file["offset"] for file in begun["files"]}
            for path in adapter.files:
                _send_file(http, begun["id"], path, offsets.get(path.name, 0), progress)
            return _json(http.post(f"{_ROUTE}/{begun['id']}/complete"))
        except _StartAnew:
            progress.nothing_is_there()
            if start == _STARTS - 1:
                raise
        except httpx.TransportError as error:
            raise UploadInterrupted(_lost(error)) from None
    raise AssertionError("the last start has returned or raised")


class _Progress:
    def __init__(self, on_sent: Callable[[int], None], total: int) -> None:
        self._on_sent = on_sent
        self._total = total
        self._offsets: dict[str, int] = {}

    def at(self, file: str, offset: int) -> None:
        """Notes how much of a file the server has been sent."""
        self._on_sent(offset - self._offsets.get(file, 0))
        self._offsets[file] = offset

    def all_is_there(self) -> None:
        self._on_sent(self._total - sum(self._offsets.values()))

    def nothing_is_there(self) -> None:
        self._on_sent(-sum(self._offsets.values()))


def _send_file(http: httpx.Client, upload_id: str, path: Path, offset: int, progress: _Progress) -> None:
    """Sends a file from `offset` on, and again from wherever the connection was lost."""
    size, fruitless = path.stat().st_size, 0
    progress.at(path.name, offset)
    while offset < size:
        fault: httpx.TransportError | None = None
        before = offset
        try:
            answer = _send_from(http, upload_id, path, offset, size, progress)
            if answer.is_success:
                return
            if answer.status_code not in (408, 409, 429, 503):
                _refused(answer)
        except httpx.TransportError as error:
            fault = error
        offset = _offset_of(http, upload_id, path.name, before)
        progress.at(path.name, offset)
        fruitless = 0 if offset > before else fruitless + 1
        if fruitless > len(_PAUSES_S):
            raise UploadInterrupted(_lost(fault))
        if fruitless:
            time.sleep(_PAUSES_S[fruitless - 1])


def _send_from(
    http: httpx.Client, upload_id: str, path: Path, offset: int, size: int, progress: _Progress
) -> httpx.Response:
    def pieces() -> Iterator[bytes]:
        at = offset
        with path.open("rb") as file:
            file.seek(offset)
            while at < size and (piece := file.read(min(_PIECE_BYTES, size - at))):
                yield piece
                at += len(piece)
                progress.at(path.name, at)

    headers = {_OFFSET_HEADER: str(offset), "Content-Length": str(size - offset)}
    route = f"{_ROUTE}/{upload_id}/{url_segment(path.name)}"
    return http.patch(route, headers=headers, content=pieces())


def _offset_of(http: httpx.Client, upload_id: str, name: str, otherwise: int) -> int:
    """How much of a file the server has; `otherwise` when it cannot be asked."""
    try:
        answer = http.get(f"{_ROUTE}/{upload_id}")
    except httpx.TransportError:
        return otherwise
    if answer.status_code == 503:
        return otherwise
    offsets = {file["name"]: file["offset"] for file in _json(answer)["files"]}
    return offsets[name]


def _json(answer: httpx.Response) -> dict[str, Any]:
    if not answer.is_success:
        _refused(answer)
    return answer.json()


def _refused(answer: httpx.Response) -> None:
    """Raises what an answer other than success means."""
    if answer.status_code in (404, 409):
        raise _StartAnew(answer)
    raise UploadRefused(answer)


def _lost(fault: httpx.TransportError | None) -> str:
    reason = f" ({fault})" if fault is not None and str(fault) else ""
    return f"The upload broke off{reason}. Run the same command again: it goes on from there."
