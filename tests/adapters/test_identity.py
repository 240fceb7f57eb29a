from __future__ import annotations

import pytest

from adapters.identity import DigestPart, InvalidName, check_name, digest_of


@pytest.mark.parametrize("name", ["a", "sql", "0", "a.b_c-d", "a" * 63, "llama3.1-8b"])
def test_names_that_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "a" * 64, "Sql", "-a", ".a", "_a", "..", "../x", "a/b", "a\\b", "a b", "a\n", "sql\n", "é", "ſql",
    "a\0", "a@1",
     "a:b", "%2e%2e"],
)  # fmt: skip
def test_names_that_are_not(name: str) -> None:
    with pytest.raises(InvalidName) as error:
        check_name(name)
    assert str(error.value).isascii() and str(error.value).isprintable()


def part(
    name: str, sha256: bytes = b"s" * 32, scale: float = 1.0, shape: tuple[int, ...] = (1,)
) -> DigestPart:
    return DigestPart(name, scale, "F32", shape, sha256)


def test_digest_does_not_depend_on_the_order_of_parts_or_settings() -> None:
    parts = [part("a"), part("b", b"t" * 32)]
    settings = {"x": [1, 2], "y": "z"}
    again = dict(reversed(settings.items()))
    assert digest_of(parts, settings) == digest_of(reversed(parts), again)
    assert len(digest_of([], {})) == 32


def test_digest_changes_with_all_that_it_covers() -> None:
    different = [
        digest_of([part("a")], {}),
        digest_of([part("b")], {}),
        digest_of([part("a", b"t" * 32)], {}),
        digest_of([part("a", scale=2.0)], {}),
        digest_of([part("a", shape=(1, 1))], {}),
        digest_of([part("a"), part("b")], {}),
        digest_of([part("a")], {"tie": True}),
    ]
    assert len(set(different)) == len(different)
