"""How many adapters, bytes and pinned pages a tenant may have; the count is the scripts' own."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.registry.errors import AdapterConflict


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may have in all; None: as much as it likes."""

    names: int | None = None
    nbytes: int | None = None
    """Of the files of its versions; those of one digest count once."""
    pinned_pages: int | None = None
    """Rank pages of its pins, each counted by the largest of its name's versions."""

    def to_args(self) -> tuple[str, str, str]:
        """The quota as scripts take it."""
        return _arg(self.names), _arg(self.nbytes), _arg(self.pinned_pages)

    def raise_fault(self, status: str, *, name: str, used: str, more: int) -> None:
        """Raises `AdapterConflict` for a script's status that stands for an exceeded quota."""
        if status == "adapter_quota":
            raise AdapterConflict(
                f"This tenant has {used} adapters and may have {self.names}: there is no room for '{name}'. "
                "Delete one, upload a new version of one that is there, or ask your operator for more.",
                "adapter_quota_exceeded",
            )
        if status == "versions":
            raise AdapterConflict(
                f"'{name}' has {int(used):,} versions, the most that a name may have. Delete some that you "
                "no longer need.",
                "too_many_versions",
            )
        if status == "bytes_quota":
            raise AdapterConflict(
                f"This tenant's adapters take {int(used):,} of the {self.nbytes or 0:,} bytes that they may, "
                f"and this upload to '{name}' takes {more:,} more. Delete versions that you no longer need, "
                "or ask your operator for more.",
                "adapter_bytes_quota_exceeded",
            )
        if status == "pinned_pages":
            raise AdapterConflict(
                f"'{name}' is pinned, and this version would take more rank pages than are left: this tenant "
                f"may pin {self.pinned_pages}, of which its other pins take {used}. Unpin '{name}', or "
                "another, or ask your operator for more.",
                "pinned_pages_quota_exceeded",
            )


NO_QUOTA = Quota()


def _arg(limit: int | None) -> str:
    return "" if limit is None else str(limit)
