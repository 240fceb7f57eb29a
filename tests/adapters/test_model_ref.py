from __future__ import annotations

import pytest

from adapters.identity import InvalidName
from adapters.model_ref import ModelRef, parse_model_ref, parse_own_ref


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("sql", ModelRef("sql")),
        ("sql@live", ModelRef("sql", live_only=True)),
        ("sql@1", ModelRef("sql", 1)),
        ("sql@2147483647", ModelRef("sql", 2**31 - 1)),
        ("acme/sql", ModelRef("sql", owner="acme")),
        ("acme-2/sql@live", ModelRef("sql", live_only=True, owner="acme-2")),
        ("acme/sql@3", ModelRef("sql", 3, owner="acme")),
    ],
)
def test_model_refs(ref: str, expected: ModelRef) -> None:
    assert parse_model_ref(ref) == expected


@pytest.mark.parametrize(
    "ref",
    ["sql@", "sql@0", "sql@-1", "sql@01", "sql@1.0", "sql@١", "sql@2147483648", "@1", "sql@1@2", "/sql",
     "acme/", "a/b/c", "Acme/sql", "acme:x/sql", "acme/sql@x", "../sql", "acme@1/sql", "acme\n/sql"],
)  # fmt: skip
def test_model_refs_that_are_none(ref: str) -> None:
    with pytest.raises(InvalidName):
        parse_model_ref(ref)


def test_an_owner_writes_a_name_or_a_number() -> None:
    assert parse_own_ref("sql") == ("sql", None)
    assert parse_own_ref("sql@3") == ("sql", 3)
    for ref in ("acme/sql", "sql@live", "sql@0", "SQL", ""):
        with pytest.raises(InvalidName):
            parse_own_ref(ref)
