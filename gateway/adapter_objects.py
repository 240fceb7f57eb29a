"""How adapters look in answers, and how a path names one."""

from __future__ import annotations

from typing import Any

from adapters.identity import InvalidName
from adapters.model_ref import parse_own_ref
from adapters.registry import AdapterName, AdapterNotFound, AdapterVersion, Event


def version_object(version: AdapterVersion) -> dict[str, Any]:
    """Returns one version."""
    return {
        "id": version.ref,
        "object": "adapter",
        "name": version.name,
        "version": version.version,
        "digest": version.digest.hex(),
        "rank": version.rank,
        "bytes": version.nbytes,
        "target_modules": list(version.target_modules),
        "base_model": version.base_model,
        "invocation_tokens": list(version.invocation_tokens),
        "tokenizer": version.tokenizer,
        "vocab_size": version.vocab_size or None,
        "created": version.created_at,
    }


def name_object(name: AdapterName) -> dict[str, Any]:
    """Returns what a name means: its live version, or the newest while none is live, and what goes for it."""
    canary = None
    if name.canary_version is not None:
        canary = {"version": name.canary_version, "percent": name.canary_percent}
    return {
        **version_object(name.live or name.newest),
        "live": name.live.version if name.live else None,
        "canary": canary,
        "pinned": name.pinned,
    }


def event_object(event: Event) -> dict[str, Any]:
    """Returns one line of a name's history."""
    return {
        "object": "adapter.event",
        "at": event.at,
        "action": event.action,
        "version": event.version,
        "detail": event.detail,
        "by": event.by,
    }


def own_ref(ref: str) -> tuple[str, int | None]:
    """Reads a path's `sql` or `sql@3`. What can be no adapter is answered as one that does not exist."""
    try:
        return parse_own_ref(ref)
    except InvalidName:
        raise AdapterNotFound(ref) from None


def own_name(ref: str) -> str:
    """Reads a path's `sql`, where a version makes no sense."""
    name, version = own_ref(ref)
    if version is not None:
        raise AdapterNotFound(ref)
    return name
