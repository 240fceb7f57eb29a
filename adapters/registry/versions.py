"""What the registry answers with: versions, what a name means, and what happened to it."""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from adapters.validation import AdapterSummary


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable upload under a tenant's name."""

    tenant: str
    name: str
    version: int
    digest: bytes
    rank: int
    nbytes: int
    target_modules: tuple[str, ...]
    base_model: str | None
    created_at: int
    """Unix time in seconds."""
    invocation_tokens: tuple[int, ...] = ()
    """From their last occurrence in a prompt on, the adapter applies; empty: from the start."""
    tokenizer: str = ""
    """Identity of the adapter's own tokenizer; empty: it uses the base model's."""
    vocab_size: int = 0
    """0: the base model's."""

    @property
    def ref(self) -> str:
        """As its owner writes it: ``sql@3``."""
        return f"{self.name}@{self.version}"

    def ref_for(self, tenant: str) -> str:
        """As a tenant writes it: ``sql@3``, and ``acme/sql@3`` where it is another's."""
        return self.ref if tenant == self.tenant else f"{self.tenant}/{self.ref}"


@dataclass(frozen=True, slots=True)
class Canary:
    """A version that gets a share of the requests for its bare name."""

    version: AdapterVersion
    percent: float


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a reference means now: one version, or while a canary runs one of two."""

    live: AdapterVersion | None
    """None: the name is there, but nothing was promoted yet."""
    canary: Canary | None = None

    def choose(self, caller: str, user: str | None) -> AdapterVersion | None:
        """The version for one request. A `user` meets the same one each time, without state: who gets the
        canary at some percent gets it at every higher one.
        """
        if self.live is None or self.canary is None:
            return self.live
        if user is None:
            share = random.random()
        else:
            key = "\0".join((caller, self.live.tenant, self.live.name, user))
            share = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8]) / 2**64
        return self.canary.version if share * 100 < self.canary.percent else self.live


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A tenant's name, and what it means."""

    tenant: str
    name: str
    live: AdapterVersion | None
    newest: AdapterVersion
    """The same as `live` in a list of names, unless nothing is live."""
    canary_version: int | None
    canary_percent: float | None
    pinned: bool
    versions: tuple[AdapterVersion, ...] = ()
    """All, oldest first; empty in a list of names."""
    grants: tuple[str, ...] = ()
    """The tenants that may use it as well; empty in a list of names."""


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a name."""

    at: int
    """Unix time in seconds, on Redis' clock."""
    action: str
    """upload, promote, rollback, canary, canary_off, pin, unpin, rename, grant, revoke or delete."""
    by: str
    """Id of the key that asked for it."""
    version: int | None
    detail: str
    """What else there is to say: a percent, a tenant, the former name."""


def new_record(summary: AdapterSummary) -> str:
    """What Redis keeps of a new version, as JSON."""
    values = {
        "digest": summary.digest.hex(),
        "rank": summary.rank,
        "nbytes": summary.nbytes,
        "target_modules": summary.target_modules,
        "base_model": summary.base_model,
        "created_at": int(time.time()),
        "invocation_tokens": summary.invocation_tokens,
        "tokenizer": summary.tokenizer,
        "vocab_size": summary.vocab_size,
    }
    return json.dumps(values, separators=(",", ":"))


def read_version(tenant: str, name: str, version: Any, record: str | bytes) -> AdapterVersion:
    """A version from its record; one that was written before a field was is read without."""
    values = json.loads(record)
    return AdapterVersion(
        tenant=tenant,
        name=name,
        version=int(version),
        digest=bytes.fromhex(values["digest"]),
        rank=values["rank"],
        nbytes=values["nbytes"],
        target_modules=tuple(values["target_modules"]),
        base_model=values["base_model"],
        created_at=values["created_at"],
        invocation_tokens=tuple(values.get("invocation_tokens", ())),
        tokenizer=values.get("tokenizer", ""),
        vocab_size=values.get("vocab_size", 0),
    )


def read_event(document: str | bytes) -> Event:
    """An event from the log."""
    values = json.loads(document)
    return Event(
        at=int(values["at"]),
        action=values["action"],
        by=values["by"],
        version=values.get("version"),
        detail=values.get("detail", ""),
    )
