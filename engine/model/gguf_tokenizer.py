"""The tokenizer files of a model whose vocabulary lies in a GGUF file.

GGUF names the pre-tokenizer (``tokenizer.ggml.pre``) instead of spelling it out. What each name means is
written here, and an unknown name is refused: a tokenizer that splits a little differently still answers,
only worse, and nobody notices.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from engine.model.errors import UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BOS_BY_DEFAULT = ("llama-bpe",)


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and, if there is one, ``chat_template.jinja``.

    Raises:
        UnsupportedModel: the vocabulary is not byte-level BPE, or splits text in a way not known here.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModel(
            f"The GGUF tokenizer model {model!r} is not supported, only byte-level BPE ('gpt2') is; "
            "serve this model from its Hugging Face folder instead."
        )
    for field in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if field not in metadata:
            raise UnsupportedModel(f"The GGUF file lacks {field}, so it holds no byte-level BPE tokenizer.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    special = {
        f"{name}_token": tokens[token_id]
        for name in ("bos", "eos", "pad")
        if (token_id := _special_id(metadata, name)) is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    tokenizer = _build(metadata, pre)
    bos = special.get("bos_token") if add_bos else None
    eos = special.get("eos_token") if add_eos else None
    _add_template(tokenizer, bos, eos)
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def _special_id(metadata: dict[str, Any], name: str) -> int | None:
    key = "padding" if name == "pad" else name
    return metadata.get(f"tokenizer.ggml.{key}_token_id")


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in metadata["tokenizer.ggml.merges"]:
        left, right = line.split(" ", 1)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _pre_tokenizer(pre: str) -> PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2"):
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.get(pre)
    if digits is None:
        raise UnsupportedModel(
            f"The GGUF pre-tokenizer {pre!r} is not known here; "
            "serve this model from its Hugging Face folder instead."
        )
    words = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Have the tokenizer itself put BOS and EOS around a text, where the file asks for it."""
    if bos is None and eos is None:
        return
    pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=" ".join(pieces), special_tokens=special)
