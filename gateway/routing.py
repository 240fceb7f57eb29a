"""Which engine takes a request: rendezvous hashing, corrected by load and residency.

Every gateway ranks the engines by a hash of (key, engine), so that all of them
agree without talking, and one engine more or less moves only its own share of the
keys. The key is the adapter, or for the base model the prompt's beginning, so that
requests meet the weights and the KV blocks that are already there. Two corrections:

- An engine whose load exceeds 1.25 × the mean + 4 is passed over (consistent hashing with bounded loads,
  Mirrokni et al. 2018), so that one popular adapter spreads over as many engines as it needs.
- Of the engines that remain, the first that already holds the adapter in memory wins over one that would load
  it.

What it costs: loads come from leases up to a second old,
so gateways may disagree for that long while loads move.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_LOAD_FACTOR = 1.25
_LOAD_SLACK = 4
_PREFIX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as routing sees it. `load` counts sequences
    that run or wait; `resident`: the adapter is in memory.
    """

    engine_id: str
    load: int
    resident: bool = False


def affinity_key(adapter_digest: bytes, cache_scope: bytes, prompt: Sequence[int]) -> bytes:
    """Returns what requests must share to be better off on one engine."""
    if adapter_digest:
        return adapter_digest
    return cache_scope + array("I", prompt[:_PREFIX_TOKENS]).tobytes()


def choose(key: bytes, candidates: Sequence[Candidate]) -> str:
    """Returns the id of the engine that takes a request with this key; `candidates` are not empty."""
    if len(candidates) == 1:
        return candidates[0].engine_id
    bound = _LOAD_FACTOR * sum(candidate.load for candidate in candidates) / len(candidates) + _LOAD_SLACK
    # Never empty: the least loaded engine is at or below the mean.
    ranked = sorted(
        (candidate for candidate in candidates if candidate.load <= bound),
        key=lambda candidate: _weight(key, candidate.engine_id),
        reverse=True,
    )
    return next((candidate for candidate in ranked if candidate.resident), ranked[0]).engine_id


def _weight(key: bytes, engine_id: str) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=_hash_key(engine_id)).digest()


@lru_cache(maxsize=1024)
def _hash_key(engine_id: str) -> bytes:
    return hashlib.sha256(engine_id.encode()).digest()
