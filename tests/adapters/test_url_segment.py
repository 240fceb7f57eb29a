"""A name stays one segment of a URL's path, on both sides of the connection."""

from __future__ import annotations

from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.url_segment import NoSegment, url_segment

# What has a meaning somewhere between a name and a path, and other text.
PIECES = st.sampled_from([".", "..", "/", "%2e", "%2F", "\\", "?", "#", ";", "@", " ", "ü", "\n"])


@given(st.lists(PIECES | st.text(max_size=3), max_size=4).map("".join))
def test_it_stays_one_segment_or_is_refused(name: str) -> None:
    try:
        path = f"/adapters/{url_segment(name)}/grants"
    except NoSegment:
        assert name in ("", ".", "..") or "/" in name
        return
    sent = httpx.URL(f"http://host{path}").raw_path.decode()
    assert sent == path and unquote(sent).split("/") == ["", "adapters", name, "grants"]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "../a"])
def test_what_would_be_another_path_is_refused(name: str) -> None:
    with pytest.raises(NoSegment, match="is no name or id"):
        url_segment(name)


def test_bytes_of_the_command_line_that_are_no_text_are_sent_as_they_are() -> None:
    assert url_segment("a\udcff") == "a%FF"
