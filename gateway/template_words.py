"""Which words stand in the tags of a chat template."""

from __future__ import annotations

import re
from functools import cache


def in_tag(template: str, word: str) -> bool:
    """Whether a tag of the template has the word among its first 200 characters, before any `%` or `}`."""
    return _pattern(word).search(template) is not None


@cache
def _pattern(word: str) -> re.Pattern[str]:
    # From one tag's beginning it never reads past the next one's: whoever publishes a model writes its
    # template, and one of braces alone would be read 200 times.
    return re.compile(rf"\{{[%{{](?:[^%}}{{]|\{{(?![%{{])){{0,200}}?\b{word}\b")
