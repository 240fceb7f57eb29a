"""How a load of an adapter into host memory ends."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from adapters.blob_store import BlobNotFound, CorruptBlob, StoreUnavailable
from engine.host_copy import HostCopy


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that has arrived in host memory, from where, and in how long."""

    digest: bytes
    copy: HostCopy
    was_local: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """An adapter that could not be read, and why, in one sentence. A later `want` tries again."""

    digest: bytes
    reason: str
    may_be_read_later: bool = False
    """What is at fault is the store or the disk, and not what they keep."""


def failed_by(error: Exception, digest: bytes) -> LoadFailed:
    """What an exception makes of a load. The text of a system's has a path, which is no client's business."""
    if isinstance(error, CorruptBlob | BlobNotFound):
        return LoadFailed(digest, "the adapter's files in the store are lost or damaged: upload them again")
    if not isinstance(error, OSError):
        return LoadFailed(digest, str(error) or type(error).__name__)
    reason = f"the adapter's files could not be read ({error.strerror or type(error).__name__})"
    # What is missing, or too large for the cache, stays so.
    is_passing = isinstance(error, StoreUnavailable) or error.errno not in (None, errno.ENOENT)
    return LoadFailed(digest, reason, may_be_read_later=is_passing)
