"""What the tiers and the pages need to know of an adapter in host memory; its weights are the runner's."""

from __future__ import annotations

from typing import Protocol


class HostCopy(Protocol):
    """An adapter that has been read, whatever its weights look like. Never changed once made."""

    @property
    def rank(self) -> int:
        """The largest rank of its projections."""
        ...

    @property
    def num_pages(self) -> int:
        """Rank pages that it takes on the device."""
        ...

    @property
    def nbytes(self) -> int:
        """What it takes of the host's memory."""
        ...

    @property
    def has_vectors(self) -> bool:
        """See `StepAdapter.has_vectors`."""
        ...

    @property
    def ends_bytes(self) -> int:
        """Bytes on the device outside the rank pages, for the embedding and ``lm_head``; 0 for nearly all."""
        ...

    @property
    def vocab_size(self) -> int:
        """See `StepAdapter.vocab_size`."""
        ...
