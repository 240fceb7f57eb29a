from __future__ import annotations

import pytest

from adapters.identity import DigestPart, InvalidName, check_name, digest_of, parse_model_ref


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


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("sql", ("sql", None)),
        ("sql@live", ("sql", None)),
        ("sql@1", ("sql", 1)),
        ("sql@2147483647", ("sql", 2**31 - 1)),
    ],
)
def test_model_refs(ref: str, expected: tuple[str, int | None]) -> None:
    assert parse_model_ref(ref) == expected


@pytest.mark.parametrize(
    "ref",
    ["sql@", "sql@0", "sql@-1", "sql@01", "sql@1.0", "sql@١", "sql@2147483648", "@1", "a/b@1", "sql@1@2"],
)
def test_model_refs_that_are_none(ref: str) -> None:
    with pytest.raises(InvalidName):
        parse_model_ref(ref)


def test_digest_does_not_depend_on_how_the_bytes_come_in_pieces() -> None:
    def digest(chunks: list[bytes]) -> bytes:
        return digest_of([DigestPart("layers.0.q_proj.A", 2.0, "F32", (1, 2), chunks)])

    assert digest([b"abcdefgh"]) == digest([b"abc", b"", b"defgh"])
    assert len(digest([])) == 32


def test_digest_tells_a_boundary_between_tensors_from_data() -> None:
    one = [DigestPart("a", 1.0, "F32", (1,), [b"1234"]), DigestPart("b", 1.0, "F32", (1,), [b"5678"])]
    other = [DigestPart("a", 1.0, "F32", (2,), [b"12345678"])]
    assert digest_of(one) != digest_of(other)
