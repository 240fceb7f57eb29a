"""What a client may write to mean an adapter, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from adapters.identity import MAX_VERSION, InvalidName, check_name

_OWNER = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A name, perhaps another tenant's, and perhaps one version of it.

    ``sql``: the live version, or a canary for its share; ``sql@live``: the live version whatever runs
    beside it; ``sql@3``: that version; ``acme/sql``, in all these forms: a name that tenant acme has granted.
    """

    name: str
    version: int | None = None
    live_only: bool = False
    owner: str | None = None
    """None: the caller's own."""


def parse_model_ref(ref: str) -> ModelRef:
    """Reads what a client wrote. Raises `InvalidName` for what can mean no adapter."""
    owner, slash, rest = ref.rpartition("/")
    if slash and _OWNER.fullmatch(owner) is None:
        raise InvalidName(f"{owner[:80]!a} is no tenant: an adapter of another is written 'tenant/name'.")
    name, separator, version = rest.partition("@")
    check_name(name)
    if not separator or version == "live":
        return ModelRef(name, live_only=bool(separator), owner=owner or None)
    return ModelRef(name, _parse_version(version, name), owner=owner or None)


def parse_own_ref(ref: str) -> tuple[str, int | None]:
    """Reads ``sql`` or ``sql@3``, as an owner names what to change or fetch; version None: none was written.

    Raises `InvalidName` for anything else.
    """
    name, separator, version = ref.partition("@")
    check_name(name)
    return name, _parse_version(version, name) if separator else None


def _parse_version(version: str, name: str) -> int:
    if _VERSION.fullmatch(version) is None or int(version) > MAX_VERSION:
        raise InvalidName(
            f"The version {version[:80]!a} of adapter '{name}' is not one: write '{name}', '{name}@live' or "
            f"a number, as in '{name}@1'."
        )
    return int(version)
