"""Objects of an S3 bucket, by obstore: small ones whole, large ones in parts, and faults in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as Bucket

from adapters.blob_store import StoreRefused, StoreUnavailable

_CUT = ("connection was not ready", "response body error")
_TOO_LATE = "TimedOut"
_NO_BUCKET = "NoSuchBucket"
_REFUSED = ("403 Forbidden", "401 Unauthorized")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_PART_BYTES = 16 * 1024 * 1024
_PARTS_AT_ONCE = 4
_RETRY_S = 20.0
_REQUEST_S = 120.0
"""A part of 16 MiB in less: anything slower is a fault."""
_SMALL_BYTES = 1024 * 1024
_SMALL_REQUEST_S = 15.0
"""So much in less, tried twice. Every use of a blob begins with one: so a bucket that hangs is told soon."""

T = TypeVar("T")


class S3Objects:
    """The objects under a prefix of a bucket. Credentials, region and endpoint come from AWS' own variables,
    or from the machine's role. Safe for many threads.

    Every method raises `StoreUnavailable` when the bucket does not answer as it should.
    """

    def __init__(self, bucket: Bucket, small: Bucket | None = None) -> None:
        """`small` is the same one, for requests that move little and so may take less time."""
        self._bucket = bucket
        self._small = small or bucket

    @classmethod
    def at(cls, url: str) -> S3Objects:
        """Those at ``s3://bucket/prefix``. Does not connect."""
        name, _, prefix = url.removeprefix("s3://").partition("/")

        def within(seconds: float) -> Bucket:
            return Bucket(
                name,
                prefix=prefix.strip("/") or None,
                # Whether HTTP is right is the endpoint's question, and the operator has answered it.
                client_options={"allow_http": True, "timeout": timedelta(seconds=seconds)},
                retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=_RETRY_S)},
            )

        with _clear_faults():
            return cls(within(_REQUEST_S), within(_SMALL_REQUEST_S))

    def get(self, key: str) -> bytes | None:
        """A small object, or None if there is none."""
        with _clear_faults():
            try:
                return bytes(_again(lambda: obstore.get(self._small, key).bytes()))
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return None

    def put(self, key: str, data: bytes, *, create: bool = False) -> bool:
        """Writes a small object. False: it is there already, where `create` asks that it be new."""
        with _clear_faults():
            try:
                _again(lambda: obstore.put(self._small, key, data, mode="create" if create else "overwrite"))
            except AlreadyExistsError:
                return False
            return True

    def put_file(self, key: str, path: Path) -> None:
        """Writes an object from a file, in parts; it is there whole or not at all."""
        bucket = self._for(path.stat().st_size)
        with _clear_faults():
            _again(
                lambda: obstore.put(bucket, key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
            )

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """So many bytes of an object. Raises FileNotFoundError when there is none."""
        bucket = self._for(length)
        with _clear_faults():
            try:
                return bytes(_again(lambda: obstore.get_range(bucket, key, start=start, end=start + length)))
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
        raise FileNotFoundError(key)

    def list_keys(self, prefix: str) -> Iterator[tuple[str, float]]:
        """The objects under a folder, and when each was written."""
        with _clear_faults():
            for page in obstore.list(self._small, prefix):
                for item in page:
                    yield item["path"], item["last_modified"].timestamp()

    def sizes(self, prefix: str) -> dict[str, int]:
        """The objects under a folder that holds few, with the bytes of each."""
        with _clear_faults():
            pages = obstore.list(self._small, prefix)
            return {item["path"]: item["size"] for page in pages for item in page}

    def remove(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there are no error."""
        if keys:
            with _clear_faults():
                obstore.delete(self._small, list(keys))

    def parts(self, key: str, size: int) -> Iterator[memoryview]:
        """An object of `size` bytes in order, a few parts fetched ahead; memory stays flat.

        Raises FileNotFoundError when there is none.
        """

        def fetch(start: int) -> memoryview:
            return memoryview(self.get_range(key, start, min(_PART_BYTES, size - start)))

        starts = range(0, size, _PART_BYTES)
        with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="s3-fetch") as pool:
            pending = [pool.submit(fetch, start) for start in starts[:_PARTS_AT_ONCE]]
            for start in starts:
                yield pending.pop(0).result()
                ahead = start + _PARTS_AT_ONCE * _PART_BYTES
                if ahead < size:
                    pending.append(pool.submit(fetch, ahead))

    def _for(self, nbytes: int) -> Bucket:
        return self._small if nbytes <= _SMALL_BYTES else self._bucket


def _again(call: Callable[[], T]) -> T:
    """What the call returns. A kept connection that has been closed meanwhile, and an answer that is cut, are
    no faults that the client itself tries again, as it does others.
    """
    try:
        return call()
    except BaseError as error:
        said = str(error)
        if _TOO_LATE in said or not any(cut in said for cut in _CUT):
            raise
        return call()


@contextmanager
def _clear_faults() -> Iterator[None]:
    """Turns what the client raises, which may quote whole requests and answers, into one sentence."""
    try:
        yield
    except (BaseError, OSError) as error:
        said = str(error)
        if _NO_BUCKET in said:
            raise StoreRefused("The bucket of the S3 store does not exist.") from error
        code = _CODE.search(said)
        if any(status in said for status in _REFUSED):
            why = f" ({code[1]})" if code else ""
            message = (
                f"The S3 store refuses the credentials{why}. Are they right, and may they use the bucket?"
            )
            raise StoreRefused(message) from error
        reason = said.partition("<?xml")[0].split("\n")[0][:300] + (code[1] if code else "")
        raise StoreUnavailable(f"The S3 store does not answer as it should: {reason}") from error
