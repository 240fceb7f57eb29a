"""What of an adapter's own tokenizer files makes a difference, in a form that is small and safe to load.

A fine-tune may bring a tokenizer: the base model's with tokens added, or with another chat template. The
vocabulary itself, and how text is split, are the base model's, whose embedding they belong to. So a
difference is a few kilobytes, and an extended tokenizer shares the base model's vocabulary in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Tokenizer

EFFECT_FILE = "tokenizer_effect.json"
MAX_EFFECT_BYTES = 4 * 1024 * 1024

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_PAIR = [_TEXT, {"Sequence": {"id": "B", "type_id": 1}}]


@dataclass(frozen=True, slots=True)
class TokenizerEffect:
    """How a tokenizer with this vocabulary behaves, as its files say it."""

    added_tokens: tuple[Mapping[str, Any], ...]
    """As in tokenizer.json, by id."""
    post_processor: Mapping[str, Any] | None
    """As in tokenizer.json: what goes around a text."""
    named_tokens: Mapping[str, str]
    """bos_token, eos_token and the like."""
    chat_template: str | None

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal effects have equal bytes."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenizerEffect:
        """The inverse of `to_bytes`. Raises ValueError, KeyError or TypeError for anything else."""
        values = json.loads(data)
        return cls(
            added_tokens=tuple(values["added_tokens"]),
            post_processor=values["post_processor"],
            named_tokens=values["named_tokens"],
            chat_template=values["chat_template"],
        )

    @property
    def identity(self) -> str:
        """SHA-256 over the effect, in hex."""
        return identity_of(self.to_bytes())


def identity_of(data: bytes) -> str:
    """The identity of the effect whose bytes these are."""
    return hashlib.sha256(data).hexdigest()


def essence(around: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A post-processor without what has no effect on a single text's tokens; None: nothing is left."""
    if around is None:
        return None
    kinds = around["processors"] if around["type"] == "Sequence" else [around]
    kinds = [kind for kind in kinds if kind["type"] != "ByteLevel" and kind.get("single") != [_TEXT]]
    kinds = [{**kind, "pair": _PAIR} if "pair" in kind else kind for kind in kinds]
    if len(kinds) > 1:
        return {"type": "Sequence", "processors": kinds}
    return kinds[0] if kinds else None


def extend(base: Tokenizer, effect: TokenizerEffect) -> Tokenizer:
    """Returns a tokenizer with `base`'s vocabulary and rules, which it shares, and what the effect changes.

    Raises what the `tokenizers` package raises for an effect that it cannot take.
    """
    extended = Tokenizer(base.model)
    extended.normalizer = base.normalizer
    extended.pre_tokenizer = base.pre_tokenizer
    extended.decoder = base.decoder
    extended.post_processor = _post_processor(effect.post_processor)
    for special, group in groupby(effect.added_tokens, key=lambda token: token["special"]):
        tokens = [AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS}) for token in group]
        if special:
            extended.add_special_tokens(tokens)
        else:
            extended.add_tokens(tokens)
    return extended


def _post_processor(section: Mapping[str, Any] | None) -> Any:
    """The package reads a post-processor as part of a tokenizer only."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    document = {"version": "1.0", "added_tokens": [], "post_processor": section, "model": empty}
    return Tokenizer.from_str(json.dumps(document)).post_processor
