"""What an adapter is called, and what it *is*: names and versions above, the digest below.

Everything under the API is keyed by the digest. It is taken over what an adapter does, not over how its files
happen to be written: each tensor's canonical name, its module's scale, dtype, shape and bytes, and the few
settings that no tensor shows. So the order of tensors, shards, PEFT's adapter-name infix, or `rank_pattern`
in place of `r` do not change it, and any change of a result does. What the files say to people is in it too
(`adapters.words`), since whoever has a digest may fetch its files.

Once an adapter is published, its digest is only a name: nothing computes it again to find the blob. Digests
of an earlier format stay valid beside new ones; the same files uploaded anew are then one more blob.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DIGEST_BYTES = 32
DIGEST_FORMAT = 2
MAX_VERSION = 2**31 - 1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_FORMAT = b"loraplex adapter %d\n" % DIGEST_FORMAT


class InvalidName(ValueError):
    """A name that no adapter can have; the message is a sentence for the user."""


def check_name(name: str) -> str:
    """Returns `name` if it can name an adapter, else raises `InvalidName`."""
    if _NAME.fullmatch(name) is None:
        raise InvalidName(
            f"The adapter name {name[:80]!a} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or digit."
        )
    return name


@dataclass(frozen=True, slots=True)
class DigestPart:
    """One tensor as the digest sees it."""

    name: str
    scale: float
    dtype: str
    shape: Sequence[int]
    sha256: bytes
    """Of the tensor's bytes."""


def digest_of(parts: Iterable[DigestPart], settings: Mapping[str, object]) -> bytes:
    """SHA-256 over an adapter's canonical form.

    It is a tree of two levels: tensors are hashed one by one, in any order and beside each other, and this
    hashes their hashes in the order of their names. `settings` is what decides the result and no tensor
    shows, as JSON can hold it; none for a plain LoRA. Each piece gives its own length, so no two different
    adapters have the same stream.
    """
    told = json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()
    sha = hashlib.sha256(_FORMAT + struct.pack("<Q", len(told)) + told)
    for part in sorted(parts, key=lambda part: part.name):
        name = part.name.encode()
        sha.update(struct.pack("<Id4sI", len(name), part.scale, part.dtype.encode(), len(part.shape)))
        sha.update(name)
        sha.update(struct.pack(f"<{len(part.shape)}Q", *part.shape))
        sha.update(part.sha256)
    return sha.digest()
