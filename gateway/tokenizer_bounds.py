"""What an adapter's own tokenizer may do with a text: nothing that takes more than time and memory in
proportion to it.

Asked of an upload, and again of what was stored: an adapter may have been taken by a gateway that asked less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Normalizer

from gateway.tokenizer_effect import TokenizerEffect, essence

_MAX_AROUND_BYTES = 16_384
_MAX_AROUND_TOKENS = 256
_ALWAYS_SLOW = ("lstrip", "single_word")


class Unbounded(ValueError):
    """The message completes 'The tokenizer …', and says what to do."""


def check_bounds(effect: TokenizerEffect, base: Tokenizer) -> None:
    """Raises Unbounded unless `base` with the effect encodes in proportion to a text, or as `base` does."""
    known = {each.content: each for each in base.get_added_tokens_decoder().values()}
    for token in effect.added_tokens:
        text = token["content"]
        own = AddedToken(text, **{flag: token[flag] for flag in (*_ALWAYS_SLOW, "rstrip", "normalized")})
        slow = _slow_flags(own, base.normalizer)
        if slow and text in known:
            slow = [flag for flag in slow if flag not in _slow_flags(known[text], base.normalizer)]
        if slow:
            raise Unbounded(
                f"sets {slow[0]} on the token {text[:80]!a}, with which splitting a text takes time in the "
                "square of its length; add the token without it."
            )
    around = effect.post_processor
    if around is not None and around != _around_of(base):
        _check_around(around, effect, base)


def _slow_flags(token: AddedToken, normalizer: Normalizer | None) -> Sequence[str]:
    slow = [flag for flag in _ALWAYS_SLOW if getattr(token, flag)]
    if token.rstrip and _is_blank(token, normalizer):
        # In a run of white space each one would match anew, and take all of the rest with it.
        slow.append("rstrip")
    return slow


def _is_blank(token: AddedToken, normalizer: Normalizer | None) -> bool:
    text = token.content
    if token.normalized and normalizer is not None:
        text = normalizer.normalize_str(text)  # as the library looks for it
    return not text.strip()


def _around_of(tokenizer: Tokenizer) -> Mapping[str, Any] | None:
    around = tokenizer.post_processor
    return None if around is None else essence(json.loads(around.__getstate__()))


def _check_around(around: Mapping[str, Any], effect: TokenizerEffect, base: Tokenizer) -> None:
    if len(json.dumps(around)) > _MAX_AROUND_BYTES:
        raise Unbounded(f"has a post_processor of more than {_MAX_AROUND_BYTES:,} bytes; make it smaller.")
    kind = around["type"]
    if kind == "Sequence":
        raise Unbounded("has a post_processor of several parts that add tokens; make them one.")
    if kind == "TemplateProcessing":
        numbers = _template_tokens(around["single"], around["special_tokens"])
    elif kind in ("BertProcessing", "RobertaProcessing"):
        numbers = [around["cls"][1], around["sep"][1]]
    else:
        raise Unbounded("has a post_processor of an unknown kind; use TemplateProcessing.")
    if len(numbers) > _MAX_AROUND_TOKENS:
        raise Unbounded(
            f"has a post_processor that adds more than {_MAX_AROUND_TOKENS} tokens; make it smaller."
        )
    added = {token["id"] for token in effect.added_tokens}
    for number in numbers:
        if number not in added and base.model.id_to_token(number) is None:
            raise Unbounded(
                f"has a post_processor that adds token {number}, which the vocabulary does not have; give it "
                "the token's own number."
            )


def _template_tokens(pieces: Sequence[Any], special: Mapping[str, Any]) -> list[int]:
    texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    if texts != ["A"]:
        raise Unbounded("has a post_processor whose 'single' does not have the text A once; write it once.")
    numbers: list[int] = []
    for piece in pieces:
        name = piece["SpecialToken"]["id"] if "SpecialToken" in piece else None
        if name is not None and name not in special:
            raise Unbounded(
                f"has a post_processor that adds {name[:80]!a}, which is not in its special_tokens; name it "
                "there."
            )
        numbers += special[name]["ids"] if name is not None else ()
    return numbers
