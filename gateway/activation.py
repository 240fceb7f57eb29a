"""Where an activated adapter begins to apply in a prompt, as PEFT has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def activation_start(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Returns where the last occurrence of the adapter's `invocation` begins; None when there is none.

    What is generated later never moves it. Takes time in proportion to the prompt whatever the tokens are:
    they are searched as characters, from the end, where `str.find` is linear and `str.rfind` is not.
    """
    text, sought = _as_text(reversed(prompt)), _as_text(reversed(invocation))
    found = text.find(sought)
    return None if found < 0 else len(prompt) - found - len(invocation)


def _as_text(tokens: Iterable[int]) -> str:
    """One character for each token: there are more of them than any vocabulary has tokens."""
    return "".join(map(chr, tokens))
