"""Tokens of short texts, put together from those of their words.

A byte-level tokenizer cuts a text into words before it looks at any, and a word's tokens do not depend on
what is around it. The tokenizers library keeps spellings and offsets beside the tokens, in some ten small
pieces of memory for each word; a regular expression and a dictionary take a third of the time.

The dictionary is the vocabulary's own common words, with what the model's template puts around messages, and
learns nothing from texts: how long one takes must not tell what others have sent. What is not plainly the
same here is left to the library: characters beyond ASCII, of which versions of Unicode know more or fewer,
and ways to cut a text that are not known here.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.models import Model

_LONGEST_TEXT = 4096
"""Characters. Longer ones are tokenised in threads, and the library does not hold the interpreter's lock."""
_MOST_WORDS = 8192
"""That are known: the first ones of a vocabulary, which are its most frequent."""
_SAMPLE = "It's 1984, isn't it?  WE'LL see!\n\n\tdef f(x): return x ** 2 + 10_000\r\n I've it. <|im_end|>\n  "
"""What the library must agree on, before it is trusted that the same is done here."""

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How ByteLevel cuts unless it is told not to: GPT-2's way."""
_ASCII_OF = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}
_PARTS = re.compile(r"\\p\{\w+\}|\\.|\[|\]|[^\\\[\]]+", re.DOTALL)
_BEYOND_RE = re.compile(r"\\[pPhHRXKGZ]|\[:|&&|\((?!\?)|(?<!\[)\^|\$")
"""What a pattern may hold that Python's `re` does not know, or takes for something else."""
_LEAVE_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that do not change ASCII."""


class KnownWords:
    """How one tokenizer cuts texts, and common words of its. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        between: re.Pattern[str],
        words: re.Pattern[str],
        common: Mapping[str, int],
        letters: Mapping[int, str],
    ) -> None:
        """See `of`. `between` has a group around what separates the parts of a text that `words` cuts."""
        self._model = tokenizer.model
        self._between = between
        self._words = words
        self._letters = letters
        added = tokenizer.get_added_tokens_decoder()
        self.known = {**common, **{each.content: token for token, each in added.items()}}
        """Tokens of the words, and of what was added to the vocabulary. Never changed."""
        self.kept: dict[str, Sequence[int]] = {}
        """Tokens of whole parts of texts; see `keep`."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, common: Mapping[str, int], letters: Mapping[int, str]
    ) -> KnownWords | None:
        """Returns them; None where not all of what the tokenizer does to ASCII is known.

        `common` are of `common_words`, made with this tokenizer's vocabulary; `letters` are as there.
        """
        separators, pattern = _separators(tokenizer), None
        if separators is None or not _leaves_ascii(tokenizer):
            return None
        for step in _steps(_state(tokenizer.pre_tokenizer)):
            match step:
                case {"type": "Digits", "individual_digits": True} if pattern is None:
                    separators += string.digits
                case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"} if (
                    pattern is None and not step["invert"]
                ):
                    pattern = regex
                case {"type": "ByteLevel", "add_prefix_space": False} if step["use_regex"] == (
                    pattern is None
                ):
                    pattern = pattern or _BYTE_LEVEL
                case _:
                    return None
        words = None if pattern is None else _compiled(pattern)
        if words is None:
            return None
        known = cls(tokenizer, _any_of(separators), words, common, letters)
        known.keep(separators)
        return (
            known
            if known.encode(_SAMPLE) == tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
            else None
        )

    def encode(self, text: str) -> list[int] | None:
        """Returns the text's tokens, as the tokenizer makes them without any around them; None where it is
        the tokenizer's to say.
        """
        if len(text) > _LONGEST_TEXT or not text.isascii():
            return None
        tokens: list[int] = []
        for number, part in enumerate(self._between.split(text)):
            found = self.kept.get(part)
            if found is None:
                words = [part] if number % 2 else self._words.findall(part)
                if len("".join(words)) != len(part):
                    return None
                found = self._tokens(words)
            tokens += found
        return tokens

    def keep(self, parts: Iterable[str]) -> None:
        """Keeps the tokens of added tokens and what may be between. It must not be what clients have sent."""
        for part in parts:
            tokens = self.encode(part)
            if tokens is not None:
                self.kept[part] = tokens

    def parts(self, text: str) -> list[str]:
        """Returns what is between the added tokens of a text."""
        return self._between.split(text)[::2]

    def _tokens(self, words: Sequence[str]) -> list[int]:
        known = list(map(self.known.get, words))
        tokens: list[int] = []
        begin = 0
        for _ in range(known.count(None)):  # few
            at = known.index(None, begin)
            tokens += cast(list[int], known[begin:at])
            tokens += _tokens_of(words[at], self._model, self._letters)
            begin = at + 1
        return tokens + cast(list[int], known[begin:])


def common_words(tokenizer: Tokenizer, texts: Sequence[bytes], letters: Mapping[int, str]) -> dict[str, int]:
    """Returns the first words of ASCII in a vocabulary. Takes some 20 ms.

    `texts` are what its tokens stand for; `letters`, for str.translate, how it spells ASCII.
    """
    model = tokenizer.model
    found: dict[str, int] = {}
    for token, raw in enumerate(texts):
        # A word may be in a vocabulary whose merges do not lead to it.
        if raw and raw.isascii() and _tokens_of(word := raw.decode(), model, letters) == [token]:
            found[word] = token
            if len(found) == _MOST_WORDS:
                break
    return found


def _tokens_of(word: str, model: Model, letters: Mapping[int, str]) -> list[int]:
    """Returns a word's tokens, as the library makes them."""
    return [token.id for token in model.tokenize(word.translate(letters))]


def _separators(tokenizer: Tokenizer) -> list[str] | None:
    """Returns the added tokens, the longest first; None where some take more of a text than what they are."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(each.normalized or each.lstrip or each.rstrip or each.single_word for each in added):
        return None
    return sorted((each.content for each in added if each.content), key=len, reverse=True)


def _any_of(separators: Sequence[str]) -> re.Pattern[str]:
    """Returns what finds them, in a group. Of plain texts, `re` looks for their first characters only."""
    return re.compile(f"({'|'.join(map(re.escape, separators)) or '(?!)'})")


def _leaves_ascii(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer cuts a text as it is, and makes the same of it each time."""
    normalizer = tokenizer.normalizer
    return (
        (normalizer is None or _state(normalizer)["type"] in _LEAVE_ASCII)
        and tokenizer.pre_tokenizer is not None
        and not getattr(tokenizer.model, "dropout", None)
    )


def _state(part: Any) -> dict[str, Any]:
    """Returns a part of a tokenizer as tokenizer.json has it; all of that would take far longer to parse."""
    return json.loads(part.__getstate__())


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields what a pre-tokenizer does, one thing after the other."""
    if state["type"] == "Sequence":
        for each in state["pretokenizers"]:
            yield from _steps(each)
    else:
        yield state


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Returns a pattern as Python has it for ASCII; None where it has none that is plainly the same."""
    translated, in_class = "", False
    for part in _PARTS.findall(pattern):
        if part in _ASCII_OF:
            part = _ASCII_OF[part] if in_class else f"[{_ASCII_OF[part]}]"
        elif part in ("[", "]"):
            if in_class and part == "[":
                return None  # a class in a class
            in_class = part == "["
        translated += part
    if _BEYOND_RE.search(translated):
        return None
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
