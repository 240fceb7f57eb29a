"""Judges the tokenizer files that came with an adapter: `python -m gateway.tokenizer_check ADAPTER BASE`.

A process of its own with limits, since these are files of strangers for a parser of some size: whatever it
does, the gateway only sees one JSON object on standard output, or that there was none in time. The object
has an `effect` (None: the same as the base model's), or a `fault` and the `file` at fault.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from adapters.adapter_files import TOKENIZER_FILES
from adapters.chat_templates import stated_template
from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.tokenizer import NAMED_TOKENS
from gateway.tokenizer_bounds import Unbounded, check_bounds
from gateway.tokenizer_effect import MAX_EFFECT_BYTES, TokenizerEffect, essence, extend

_MAX_MEMORY_BYTES = 4 << 30
_MAX_CPU_S = 60
_MAX_ADDED_TOKENS = 65_536
_MAX_TOKEN_CHARS = 256
_MAX_TEMPLATE_CHARS = 262_144
_CONFIG_FILES = {"tokenizer_config.json", "special_tokens_map.json"}

Files = Mapping[str, bytes]


class Unfit(Exception):
    """A file that is not served exactly; the message is for whoever uploads it."""

    def __init__(self, file: str, fault: str) -> None:
        super().__init__(fault)
        self.file = file


def judge(own: Files, base: Files) -> TokenizerEffect | None:
    """Returns what the adapter's files change of the base model's tokenizer; None when that is nothing.

    A file that the adapter lacks is the base model's. Raises Unfit.
    """
    base_tokenizer = _read_tokenizer(base)
    tokenizer = _read_tokenizer(own) if "tokenizer.json" in own else base_tokenizer
    config = _config_of(own if _CONFIG_FILES & own.keys() else {**base, **own})
    document, base_document = (json.loads(each.to_str()) for each in (tokenizer, base_tokenizer))
    _check_shared(document, base_document)
    effect = _effect_of(tokenizer, document, config, _template_of(own, base))
    if effect == _effect_of(base_tokenizer, base_document, _config_of(base), _template_of(base, base)):
        return None
    if "tokenizer.json" in own:
        _check_numbers(_object(own, "tokenizer.json"), tokenizer)
    if config != _config_of(base):
        _check_named(config, tokenizer)
    _check_added(effect)
    _check_bounds(effect, base_tokenizer)
    _check_template(effect)
    _check_extended(effect, base_tokenizer)
    return effect


def _effect_of(
    tokenizer: Tokenizer, document: Mapping[str, Any], config: Mapping[str, Any], template: str | None
) -> TokenizerEffect:
    """`document` is the tokenizer's own JSON."""
    tokens = {token["content"]: dict(token) for token in document["added_tokens"]}
    named = _named_tokens(config)
    # As transformers has them once it is loaded: what the config names is special.
    for text in [*named.values(), *_extra_tokens(config)]:
        number = tokenizer.token_to_id(text)
        if text in tokens:
            tokens[text]["special"] = True
        elif number is not None:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokens[text] = {"id": number, "content": text, **flags, "special": True}
    return TokenizerEffect(
        added_tokens=tuple(sorted(tokens.values(), key=lambda token: token["id"])),
        post_processor=essence(document["post_processor"]),
        named_tokens=named,
        chat_template=template,
    )


def _read_tokenizer(files: Files) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the binding raises bare Exception
        raise Unfit("tokenizer.json", f"cannot be read: {str(error)[:200]}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _object(files: Files, name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        raise Unfit(name, "is not JSON.") from None
    if not isinstance(value, dict):
        raise Unfit(name, "is not a JSON object.")
    return value


def _config_of(files: Files) -> dict[str, Any]:
    """The tokenizer's settings, with the older files beside it where transformers reads them."""
    config = _object(files, "tokenizer_config.json")
    if not isinstance(config.get("added_tokens_decoder"), dict):
        config |= _object(files, "special_tokens_map.json")
        added = {str(token): text for text, token in _object(files, "added_tokens.json").items()}
        config["added_tokens_decoder"] = added
    return config


def _text_of(value: Any) -> str | None:
    """A token is written as its text, or as an object with its `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name in NAMED_TOKENS if (text := _text_of(config.get(name))) is not None}


def _template_of(own: Files, base: Files) -> str | None:
    """A file of its own comes before the config's; what an adapter lacks is the base model's."""
    for files in (own, base):
        if "chat_template.jinja" in files:
            return files["chat_template.jinja"].decode(errors="replace")
        for name in ("tokenizer_config.json", "chat_template.json"):
            template = stated_template(_object(files, name).get("chat_template"))
            if template is not None:
                return template
    return None


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    return [text for value in values if (text := _text_of(value)) is not None]


def _check_shared(document: Mapping[str, Any], base_document: Mapping[str, Any]) -> None:
    """Raises Unfit for a tokenizer that is another one than the base model's, not the same with more."""
    for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
        if document[part] != base_document[part]:
            raise Unfit(
                "tokenizer.json",
                f"has another {part} than the base model's tokenizer; it may differ in added tokens and in "
                "what goes around a text only. If your fine-tune uses the base model's tokenizer, leave the "
                "tokenizer's files out.",
            )


def _check_numbers(written: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raises Unfit for an added token that does not get the number that the file gives it."""
    for token in written.get("added_tokens", []):
        text, number = token["content"], token["id"]
        if tokenizer.token_to_id(text) != number:
            raise Unfit(
                "tokenizer.json",
                f"gives the token {text[:80]!a} the number {number}, but it comes to be "
                f"{tokenizer.token_to_id(text)}; number added tokens one after the other behind the "
                "vocabulary.",
            )


def _check_named(config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raises Unfit for a token of the config that tokenizer.json does not have, or under another number."""
    named = {text: None for text in [*_named_tokens(config).values(), *_extra_tokens(config)]}
    listed = {_text_of(token): number for number, token in config["added_tokens_decoder"].items()}
    for text, number in {**named, **listed}.items():
        found = None if text is None else tokenizer.token_to_id(text)
        if found is None or (number is not None and str(found) != number):
            raise Unfit(
                "tokenizer_config.json",
                f"names the token {(text or '')[:80]!a}, which tokenizer.json does not have there; load the "
                "tokenizer with transformers, save it, and upload it again.",
            )


def _check_added(effect: TokenizerEffect) -> None:
    """Raises Unfit for too many tokens, and for too long ones."""
    if len(effect.added_tokens) > _MAX_ADDED_TOKENS or len(effect.to_bytes()) > MAX_EFFECT_BYTES:
        raise Unfit("tokenizer.json", f"adds more than {_MAX_ADDED_TOKENS:,} tokens, or too long ones.")
    for token in effect.added_tokens:
        size = len(token["content"])
        if not 0 < size <= _MAX_TOKEN_CHARS:
            raise Unfit("tokenizer.json", f"adds a token of {size} characters, not 1 to {_MAX_TOKEN_CHARS}.")
    if any(len(text) > _MAX_TOKEN_CHARS for text in effect.named_tokens.values()):
        raise Unfit("tokenizer_config.json", f"names a token of more than {_MAX_TOKEN_CHARS} characters.")


def _check_bounds(effect: TokenizerEffect, shared: Tokenizer) -> None:
    try:
        check_bounds(effect, shared)
    except Unbounded as error:
        raise Unfit("tokenizer.json", str(error)) from None


def _check_template(effect: TokenizerEffect) -> None:
    source = effect.chat_template
    if source is None:
        return
    if len(source) > _MAX_TEMPLATE_CHARS:
        raise Unfit("chat_template.jinja", f"has more than {_MAX_TEMPLATE_CHARS:,} characters.")
    try:
        ChatTemplate(source, effect.named_tokens)
    except RecursionError:
        raise Unfit("chat_template.jinja", "is nested too deeply.") from None
    except ChatTemplateError as error:
        raise Unfit(
            "chat_template.jinja", f"is no template: {str(error.__cause__ or error)[:300]}."
        ) from None


def _check_extended(effect: TokenizerEffect, shared: Tokenizer) -> None:
    """Raises Unfit unless the gateway will build, from the effect alone, what the files say."""
    try:
        document = json.loads(extend(shared, effect).to_str())
    except Exception as error:  # the binding raises bare Exception
        raise Unfit("tokenizer.json", f"cannot be used: {str(error)[:200]}.") from None
    if tuple(document["added_tokens"]) != effect.added_tokens:
        raise Unfit("tokenizer.json", "has added tokens that change when they are loaded.")
    if document["post_processor"] != effect.post_processor:
        raise Unfit("tokenizer.json", "has a post_processor that changes when it is loaded.")


def _read(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name in TOKENIZER_FILES if (path := folder / name).is_file()}


def main() -> None:
    """Judges the files in two folders, and writes what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    own, base = (_read(Path(folder)) for folder in sys.argv[1:3])
    try:
        effect = judge(own, base)
        answer: dict[str, Any] = {"effect": None if effect is None else effect.to_bytes().decode()}
    except Unfit as unfit:
        answer = {"fault": str(unfit), "file": unfit.file}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
