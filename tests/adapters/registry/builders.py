"""Summaries for the registry's tests, by a word that stands for their content."""

from __future__ import annotations

import hashlib

from adapters.model_ref import parse_model_ref
from adapters.registry import AdapterVersion, Registry
from adapters.validation import AdapterSummary


def digest(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


def summary(content: str = "one") -> AdapterSummary:
    return AdapterSummary(
        digest=digest(content),
        rank=16,
        num_tensors=8,
        nbytes=len(content),
        base_model="base/model",
        target_modules=("q_proj", "down_proj"),
    )


ONE, TWO, THREE = summary("one"), summary("two"), summary("three")


async def meaning(registry: Registry, caller: str, ref: str) -> AdapterVersion | None:
    """The live version that a reference means to a tenant."""
    found = await registry.resolve(caller, parse_model_ref(ref))
    return found.live if found else None
