"""Tokens of short texts by those of their words, each of which the tokenizer makes once.

A byte-level tokenizer cuts a text into words before it looks at any, and a word's tokens do not depend on
what is around it. The tokenizers library keeps spellings and offsets beside the tokens, in some ten small
pieces of memory for each word; a regular expression and a dictionary take a quarter of the time. What is not
plainly the same here is left to the library: characters beyond ASCII, of which versions of Unicode know more
or fewer, and ways to cut a text that are not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

_LONGEST_TEXT = 4096
"""Characters. Longer ones are tokenised in threads, and the library does not hold the interpreter's lock."""
_LONGEST_WORD = 64
_MOST_WORDS = 10_000
_MOST_NEW = 64
"""Words of one text that are learnt: each takes as long as ten known ones, and some texts have no others."""

_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How ByteLevel cuts unless it is told not to: GPT-2's way."""
_ASCII_OF = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}
_PARTS = re.compile(r"\\p\{\w+\}|\\.|\[|\]|[^\\\[\]]+", re.DOTALL)
_BEYOND_RE = re.compile(r"\\[pPhHRXKGZ]|\[\[|\[:|&&|\((?!\?)|(?<!\[)\^|\$")
"""What a pattern may hold that Python's `re` does not know, or takes for something else."""
_LEAVE_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that do not change ASCII."""


class KnownWords:
    """The words that one tokenizer has met lately. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        between: re.Pattern[str],
        words: re.Pattern[str],
        letters: Mapping[int, str],
    ) -> None:
        """See `of`. `between` has a group around what separates the parts of a text that `words` cuts."""
        self._model = tokenizer.model
        self._between = between
        self._words = words
        self._letters = letters
        self._added = {each.content: [token] for token, each in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[str, list[int]] = dict(self._added)

    @classmethod
    def of(cls, tokenizer: Tokenizer, letters: Mapping[int, str]) -> KnownWords | None:
        """Returns them, with none known yet; None where not all of what the tokenizer does to ASCII is known.

        `letters`, for str.translate, are those by which the vocabulary writes ASCII.
        """
        added = tokenizer.get_added_tokens_decoder().values()
        if any(each.normalized or each.lstrip or each.rstrip or each.single_word for each in added):
            return None
        if tokenizer.normalizer is not None and _state(tokenizer.normalizer)["type"] not in _LEAVE_ASCII:
            return None
        if tokenizer.pre_tokenizer is None or getattr(tokenizer.model, "dropout", None):
            return None
        separators = [re.escape(each.content) for each in sorted(added, key=lambda each: -len(each.content))]
        pattern = None
        for step in _steps(_state(tokenizer.pre_tokenizer)):
            match step:
                case {"type": "Digits", "individual_digits": True} if pattern is None:
                    separators.append("[0-9]")
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
        between = re.compile(f"({'|'.join(separators) or '(?!)'})")
        return cls(tokenizer, between, words, letters)

    def encode(self, text: str) -> list[int] | None:
        """Returns the text's tokens, as the tokenizer makes them without any around them; None where it is
        the tokenizer's to say.
        """
        if len(text) > _LONGEST_TEXT or not text.isascii():
            return None
        pieces: list[str] = []
        for number, part in enumerate(self._between.split(text)):
            if number % 2:
                pieces.append(part)
            elif part:
                words = self._words.findall(part)
                if sum(map(len, words)) != len(part):
                    return None
                pieces += words
        known = self._known
        if not all(map(known.__contains__, pieces)):
            new = {piece for piece in pieces if piece not in known}
            few = [piece for piece in new if len(piece) <= _LONGEST_WORD][:_MOST_NEW]
            self._learn(few, known)
            if len(few) < len(new):
                return None
        return list(chain.from_iterable(map(known.__getitem__, pieces)))

    def _learn(self, words: Iterable[str], known: dict[str, list[int]]) -> None:
        for word in words:
            spelt = self._model.tokenize(word.translate(self._letters))
            known[word] = [token.id for token in spelt]
        if len(known) > _MOST_WORDS:
            self._known = dict(self._added)  # another thread may still read the old one


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
            in_class = part == "["
        translated += part
    if _BEYOND_RE.search(translated):
        return None
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
