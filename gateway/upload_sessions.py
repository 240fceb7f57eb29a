"""Uploads that may be interrupted: what has arrived of each lies on disk until it is complete, or expires.

    scratch/<tenant>/<id>/session.json    what is to arrive
    scratch/<tenant>/<id>/files/<name>    what has: a file's size is where it goes on
    scratch/.half/<random>/               sessions in the making, and on their way out

The id is a hash over what is to arrive, so who starts the same upload again finds what it sent before, on any
gateway that has the same folder. A session is its tenant's by its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from adapters.blob_store import check_present
from gateway.tenant_slots import too_many_uploads

KEPT_S = 24 * 3600.0
_GIVES_WAY_AFTER_S = 3600.0
"""A session that nobody has touched for this long gives way to a new one of its tenant."""

_HALF = ".half"
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """What an upload asks for beside its files."""

    name: str
    allow_zero: bool = False
    promote: bool = True


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file as the client announces it."""

    name: str
    bytes: int
    sha256: str
    """In hex."""


@dataclass(frozen=True, slots=True)
class UploadSession:
    """One upload under way. `folder` holds what has arrived."""

    id: str
    folder: Path
    options: UploadOptions
    files: Sequence[ExpectedFile]
    touched_at: float
    """Unix time."""

    @property
    def hashes(self) -> dict[str, str]:
        """What the files' hashes are to be, by name."""
        return {file.name: file.sha256 for file in self.files}

    def file(self, name: str) -> ExpectedFile | None:
        """The announced file of this name."""
        return next((file for file in self.files if file.name == name), None)

    def offset(self, name: str) -> int:
        """How many bytes of a file have arrived."""
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return 0

    def touch(self) -> None:
        """Notes that the client is there. The session may be gone."""
        with suppress(FileNotFoundError):
            os.utime(self.folder.parent)


class UploadSessions:
    """The sessions under `scratch`, at most so many for each tenant. Every method blocks on the disk."""

    def __init__(self, scratch: Path, per_tenant: int) -> None:
        self._scratch = scratch
        self._per_tenant = per_tenant

    def open(self, tenant: str, options: UploadOptions, files: Sequence[ExpectedFile]) -> UploadSession:
        """The session for these files, whether it is new or goes on.

        The names of the files have been checked. Raises ApiError 429 when the tenant has too many others.
        """
        document = {"options": asdict(options), "files": [asdict(file) for file in _in_order(files)]}
        text = json.dumps(document, sort_keys=True)
        session_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        session = self.find(tenant, session_id)
        if session is None:
            self._make_room(tenant)
            self._create(self._scratch / tenant / session_id, text)
            session = self.find(tenant, session_id)
            assert session is not None, "a session of now has not expired"
        session.touch()
        return session

    def find(self, tenant: str, session_id: str) -> UploadSession | None:
        """The tenant's session, or None: there is none, or it has ended or expired.

        Raises `StoreUnavailable` when nothing is there any more, as with an unmounted volume.
        """
        if _ID.fullmatch(session_id) is None:
            return None
        folder = self._scratch / tenant / session_id
        try:
            values = json.loads((folder / "session.json").read_bytes())
            touched_at = folder.stat().st_mtime
        except FileNotFoundError:
            check_present(self._scratch)
            return None
        if touched_at < time.time() - KEPT_S:
            return None
        return UploadSession(
            id=session_id,
            folder=folder / "files",
            options=UploadOptions(**values["options"]),
            files=[ExpectedFile(**file) for file in values["files"]],
            touched_at=touched_at,
        )

    def remove(self, tenant: str, session: UploadSession) -> None:
        """Ends a session, with what has arrived."""
        self._remove(self._scratch / tenant / session.id)

    def clean(self) -> int:
        """Removes what has expired, or was left by a crash, of all tenants. Returns how many sessions."""
        expired = [folder for folder, at in _by_age(self._scratch.glob("*/*")) if at < time.time() - KEPT_S]
        for folder in expired:
            self._remove(folder)
        for tenant, touched_at in _by_age(self._scratch.iterdir()):
            if touched_at < time.time() - KEPT_S:
                with suppress(OSError):  # not empty
                    tenant.rmdir()
        return len(expired)

    def _make_room(self, tenant: str) -> None:
        sessions = _by_age((self._scratch / tenant).glob("*"))
        if len(sessions) < self._per_tenant:
            return
        oldest, touched_at = sessions[0]
        if touched_at > time.time() - _GIVES_WAY_AFTER_S:
            raise too_many_uploads(f"{self._per_tenant} uploads of this tenant are not complete")
        self._remove(oldest)

    def _create(self, folder: Path, text: str) -> None:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        # Outside of what counts as sessions until it is whole; of two that come at once, one is kept.
        made = self._half()
        (made / "files").mkdir(parents=True, mode=0o700)
        (made / "session.json").write_text(text)
        try:
            made.rename(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():
                raise

    def _remove(self, folder: Path) -> None:
        # By another name first: who looks now finds nothing, not half of it.
        out = self._half()
        out.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            folder.rename(out)
        shutil.rmtree(out, ignore_errors=True)

    def _half(self) -> Path:
        return self._scratch / _HALF / secrets.token_hex(16)


def describe(session: UploadSession, *, status: str) -> Mapping[str, object]:
    """How a session looks in answers."""
    return {
        "id": session.id,
        "object": "adapter.upload",
        "status": status,
        "name": session.options.name,
        "expires": int(session.touched_at + KEPT_S),
        "files": [
            {"name": file.name, "bytes": file.bytes, "offset": session.offset(file.name)}
            for file in session.files
        ],
    }


def _in_order(files: Sequence[ExpectedFile]) -> Sequence[ExpectedFile]:
    return sorted(files, key=lambda file: file.name)


def _by_age(folders: Iterator[Path]) -> list[tuple[Path, float]]:
    """Folders with when each was touched, the oldest first."""
    found: list[tuple[Path, float]] = []
    for folder in folders:
        with suppress(FileNotFoundError):
            found.append((folder, folder.stat().st_mtime))
    return sorted(found, key=lambda item: item[1])
