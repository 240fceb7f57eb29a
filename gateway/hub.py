"""Takes an adapter's files from the Hugging Face hub, and from nowhere else.

A tenant names a repository; everything else of an address is fixed here. Redirects are followed by hand, over
https and to the hub's own hosts only, so that no answer can lead the server into its operator's network.
Sizes are bounded while bytes arrive, whatever the hub has announced.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from adapters.adapter_files import check_complete, is_adapter_file, is_weights, size_limit
from adapters.errors import InvalidAdapter
from gateway.errors import ApiError, invalid_request
from gateway.incoming_files import FileWriter, HashedFile

_MAX_REDIRECTS = 5
_MAX_LISTING_BYTES = 4 * 1024 * 1024
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_WHOLE_S = 3600.0
_REDIRECTS = (301, 302, 303, 307, 308)

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubOrigin:
    """Where a hub is, and which hosts its redirects may lead to."""

    url: str
    domains: Sequence[str]
    """Hosts; one that begins with a dot stands for all below it."""

    def allows(self, url: httpx.URL) -> bool:
        """Whether a redirect may lead there: the hub's own scheme and port, and one of its hosts."""
        own = httpx.URL(self.url)
        known = any(
            url.host.endswith(domain) if domain.startswith(".") else url.host == domain
            for domain in self.domains
        )
        return known and url.scheme == own.scheme and not url.userinfo and url.port in (None, own.port)


HUGGING_FACE = HubOrigin("https://huggingface.co", ("huggingface.co", ".huggingface.co", ".hf.co"))
"""Files lie on its CDN, below hf.co."""


class Hub:
    """One hub. Every fault is an ApiError that says whose it is."""

    def __init__(self, origin: HubOrigin = HUGGING_FACE) -> None:
        self._origin = origin

    async def fetch(self, repo: str, revision: str, folder: Path, max_weights_bytes: int) -> dict[str, str]:
        """Fetches the adapter's files of a repository's top folder into `folder`, all of one commit.

        Returns their SHA-256 in hex, by name. What has arrived when it raises is the caller's to remove.
        """
        if _REPO.fullmatch(repo) is None or ".." in repo:
            raise _refused(f"{repo[:80]!a} is no repository of the hub; write org/name.", "repo")
        if _REVISION.fullmatch(revision) is None or ".." in revision:
            raise _refused(f"{revision[:80]!a} is no branch, tag or commit.", "revision")
        try:
            async with (
                asyncio.timeout(_WHOLE_S),
                httpx.AsyncClient(timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"}) as http,
            ):
                commit, names = await self._list(http, repo, revision)
                return await self._fetch_all(http, repo, commit, names, folder, max_weights_bytes)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise _away(f"The hub cannot be reached, or broke off ({type(error).__name__}).") from error

    async def _list(self, http: httpx.AsyncClient, repo: str, revision: str) -> tuple[str, list[str]]:
        """The commit that the revision means, and the adapter's files in it."""
        url = f"{self._origin.url}/api/models/{repo}/revision/{quote(revision, safe='')}"
        raw = bytearray()
        async with self._get(http, url, repo) as answer:
            async for piece in answer.aiter_raw():
                raw += piece
                if len(raw) > _MAX_LISTING_BYTES:
                    raise _refused(f"The hub's list of files in {repo} is too long.", "repo")
        try:
            listing: Any = orjson.loads(raw)
            commit, siblings = listing["sha"], [str(item["rfilename"]) for item in listing["siblings"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise _away("The hub's answer makes no sense.") from None
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise _away("The hub's answer makes no sense.")
        names = sorted(filter(is_adapter_file, siblings))
        try:
            check_complete(siblings)
        except InvalidAdapter as error:
            raise _refused(f"{repo} is no adapter in PEFT's format. {error.message}", "repo") from None
        return commit, names

    async def _fetch_all(
        self,
        http: httpx.AsyncClient,
        repo: str,
        commit: str,
        names: Sequence[str],
        folder: Path,
        max_weights_bytes: int,
    ) -> dict[str, str]:
        hashes: dict[str, str] = {}
        weights_left = max_weights_bytes
        for name in names:
            limit = size_limit(name, weights_left)
            url = f"{self._origin.url}/{repo}/resolve/{commit}/{name}"
            async with self._get(http, url, repo) as answer:
                file = await _write(answer, folder / name, limit)
            hashes[name] = file.sha256
            weights_left -= file.size if is_weights(name) else 0
        return hashes

    @asynccontextmanager
    async def _get(self, http: httpx.AsyncClient, url: str, repo: str) -> AsyncIterator[httpx.Response]:
        """The answer to a GET, after redirects within the hub. Raises ApiError for anything but 200."""
        for _ in range(_MAX_REDIRECTS + 1):
            async with http.stream("GET", url) as answer:
                if answer.status_code not in _REDIRECTS:
                    _check(answer, repo)
                    yield answer
                    return
                target = answer.url.join(answer.headers.get("location", ""))
            if not self._origin.allows(target):
                raise _away(f"The hub leads to {target.host!a}, which is not its own: not followed.")
            url = str(target)
        raise _away("The hub leads in circles.")


async def _write(answer: httpx.Response, path: Path, limit: int) -> HashedFile:
    """Writes a file as it arrives. Raises ApiError 413 for more than `limit` bytes."""
    file, writer, arrived = HashedFile.create(path), FileWriter(), 0
    try:
        async for piece in answer.aiter_raw():
            arrived += len(piece)
            if arrived > limit:
                message = f"The file '{path.name}' is larger than {limit:,} bytes, the most that is taken."
                raise ApiError(
                    413, message, type="invalid_request_error", code="upload_too_large", param="repo"
                )
            writer.add(file, piece)
            await writer.pace()
        await writer.finish()
    finally:
        await writer.settle()
        file.close()
    return file


def _check(answer: httpx.Response, repo: str) -> None:
    if answer.status_code == 200:
        return
    if answer.status_code in (401, 403):
        message = f"The hub does not give {repo} to everybody: it is private, gated or not there."
        raise _refused(message, "repo")
    if answer.status_code == 404:
        raise _refused(f"The hub has no {repo} with this revision and these files.", "repo")
    raise _away(f"The hub answered {answer.status_code}.")


def _refused(message: str, param: str) -> ApiError:
    return invalid_request(message, param=param, code="pull_refused")


def _away(message: str) -> ApiError:
    return ApiError(502, f"{message} Try again later.", type="server_error", code="hub_unavailable")
