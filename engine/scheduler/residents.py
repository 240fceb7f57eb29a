"""What there is to tell of the adapters in memory. Nothing here changes anything."""

from __future__ import annotations

from dataclasses import replace

from engine.adapter_counters import AdapterHistory
from engine.adapter_status import AdapterMemory, AdapterStatus, Residency
from engine.adapter_tiers import AdapterTiers
from engine.rank_pages import RankPages


def residency(pages: RankPages, tiers: AdapterTiers) -> dict[bytes, Residency]:
    """The fastest tier of each adapter in host or device memory."""
    return {
        **dict.fromkeys(tiers.held(), Residency.HOST),
        **dict.fromkeys(pages.residents(), Residency.DEVICE),
    }


def status(pages: RankPages, tiers: AdapterTiers, digest: bytes) -> AdapterStatus:
    """One adapter, wherever it is; what is not in memory is said to be nowhere."""
    history = replace(tiers.counters.histories.get(digest, AdapterHistory()))
    adapter = pages.resident(digest)
    if adapter is not None:
        return AdapterStatus(
            digest,
            Residency.DEVICE,
            rank=adapter.rank,
            num_pages=len(adapter.pages),
            references=pages.references(digest),
            is_pinned=digest in pages.pinned(),
            history=history,
        )
    copy = tiers.held().get(digest)
    if copy is not None:
        return AdapterStatus(digest, Residency.HOST, rank=copy.rank, history=history)
    return AdapterStatus(digest, Residency.NONE, history=history)


def memory(pages: RankPages, tiers: AdapterTiers) -> AdapterMemory:
    """How full the tiers are, and what has happened in them."""
    return AdapterMemory(
        pages.num_pages, pages.num_free, pages.num_pinned, tiers.host_bytes, tiers.counters.snapshot()
    )
