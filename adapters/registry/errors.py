"""What a verb of the registry refuses, in sentences for the user."""

from __future__ import annotations


class AdapterNotFound(LookupError):
    """The tenant has no such name, or the name no such version."""

    def __init__(self, ref: str) -> None:
        super().__init__(f"There is no adapter {ref!a}.")
        self.ref = ref


class AdapterConflict(Exception):
    """What was asked for does not fit the state of the name; the message says what would.

    ``code`` is a word that programs can compare.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def raise_fault(status: str, *, name: str, version: int | None = None, detail: str = "") -> None:
    """Raises what a script's status stands for; returns for 'ok'. `detail` is the script's own, if any."""
    if status == "ok":
        return
    if status == "no_name":
        raise AdapterNotFound(name)
    if status == "no_version":
        raise AdapterNotFound(name if version is None else f"{name}@{version}")
    text, code = _CONFLICTS[status]
    raise AdapterConflict(text.format(name=name, ref=f"{name}@{version}", detail=detail), code)


_CONFLICTS = {
    "is_live": (
        "{ref} is the live version of '{name}'. Promote another version first, or delete all of '{name}'.",
        "version_is_live",
    ),
    "is_canary": (
        "{ref} gets a share of the requests for '{name}'. End the canary first: promote a version, or turn "
        "it off.",
        "version_is_canary",
    ),
    "canary_is_live": (
        "{ref} is the live version of '{name}' already, and gets every request. Name another version.",
        "version_is_live",
    ),
    "no_live": (
        "'{name}' has no live version yet. Promote one of its versions first.",
        "no_live_version",
    ),
    "nothing_before": (
        "No version of '{name}' that is still there was live before this one. Promote the version that you "
        "want.",
        "nothing_to_roll_back",
    ),
    "taken": (
        "There is an adapter '{detail}' already. Delete it first, or choose another name.",
        "name_taken",
    ),
    "used": (
        "The name '{detail}' has had versions before, and their numbers are not given again. Choose another "
        "name.",
        "name_used",
    ),
    "too_many_renames": (
        "This tenant has {detail} former names of adapters, the most that are kept. Upload a version under "
        "the other name instead.",
        "too_many_renames",
    ),
    "too_many_grants": (
        "'{name}' is shared with {detail} tenants, the most that is allowed. Revoke a grant first.",
        "too_many_grants",
    ),
    "pin_quota": (
        "This tenant has pinned {detail} adapters, as many as it may. Unpin another first, or ask your "
        "operator for more.",
        "pin_quota_exceeded",
    ),
    "pinned_pages": (
        "This tenant's pins take {detail} rank pages that it may pin: there is no room for '{name}' beside "
        "them, of whose versions the largest counts. Unpin another first, or ask your operator for more.",
        "pinned_pages_quota_exceeded",
    ),
}
