"""Takes a version's files away from a gateway, and makes sure that they are what the digest says."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.adapter_files import is_adapter_file
from adapters.client import AdaptersClient, ClientError, Exit
from adapters.identity import DIGEST_FORMAT
from adapters.standalone import digest_of_folder


def download_version(
    client: AdaptersClient,
    ref: str,
    target: Path,
    *,
    on_total: Callable[[int], None],
    on_received: Callable[[int], None],
) -> dict[str, Any]:
    """Writes the files of ``sql@3``, or of what ``sql`` means, into `target`: all of them, or nothing.

    `target` is a new or an empty folder. Returns the server's list of the files. Raises `ClientError`, also
    where a file or the adapter as a whole is not what the server's list says, or cannot be written. A digest
    of another format than this program's is not taken again: then files' hashes decide.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ClientError(f"{target} is there already and not an empty folder. Name another.", Exit.USAGE)
    answer = client.of(ref, "GET", "files")
    version, files = answer["adapter"], answer["data"]
    on_total(sum(file["bytes"] for file in files))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arriving = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _fetch_all(client, version, files, arriving, on_received)
            arriving.chmod(0o755)
            arriving.replace(target)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
    except OSError as error:
        raise ClientError(f"Cannot write to {target}: {error.strerror}.", Exit.REFUSED) from None
    return answer


def _fetch_all(
    client: AdaptersClient,
    version: dict[str, Any],
    files: list[dict[str, Any]],
    folder: Path,
    on_received: Callable[[int], None],
) -> None:
    for file in files:
        if not is_adapter_file(file["name"]):
            message = f"The server lists a file {file['name']!a}, which no adapter has."
            raise ClientError(message, Exit.REFUSED)
        # By its number: the name may come to mean another version meanwhile.
        digest = client.fetch(version["id"], file["name"], folder / file["name"], on_received)
        if digest != file["sha256"]:
            raise _damaged(version["id"], file["name"])
    is_ours = version["digest_format"] == DIGEST_FORMAT
    if is_ours and digest_of_folder(folder, version["tokenizer"]).hex() != version["digest"]:
        raise _damaged(version["id"], "the adapter as a whole")


def _damaged(ref: str, what: str) -> ClientError:
    message = f"What arrived of {ref} is not what its digest says ({what}). Try again, or tell your operator."
    return ClientError(message, Exit.REFUSED)
