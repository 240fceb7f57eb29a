"""What an adapter's files say to people and decides nothing: the base model's name, marks of who wrote them.

A blob is kept once, with the files of whoever uploaded it first, and all who have the adapter may fetch
them. So these words are part of the digest: nobody gets another's paths, or a config that sends PEFT to a
base model that somebody else chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapters.adapter_files import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILES, is_weights
from adapters.blob_store import sha256_of
from adapters.peft_config import HANDLED, HARMLESS, REFUSED
from adapters.safetensors_header import read_metadata
from adapters.strict_json import load_object

_BASE_MODEL = "base_model_name_or_path"
_RELEASE = re.compile(r"[0-9][0-9a-z.+]{0,31}")
_USUAL_METADATA = ({}, {"format": "pt"})
_USUAL_TEXTS = ("", "megatron.core")


def words_of(folder: Path, *, own_tokenizer: bool) -> Mapping[str, object]:
    """The words in the files of a valid adapter, as JSON can hold them; nothing where there are none.

    With `own_tokenizer` the tokenizer's files count as they are: what they do is a part of the digest anyway.
    """
    words = {file.name: said for file in sorted(folder.iterdir()) if (said := _words_in(file))}
    if own_tokenizer:
        words |= {name: sha256_of(folder / name) for name in TOKENIZER_FILES if (folder / name).exists()}
    return words


def _words_in(file: Path) -> Mapping[str, Any]:
    if file.name == CONFIG_FILE:
        return dict(_told(load_object(file.read_bytes())))
    if file.name == INDEX_FILE:
        index = load_object(file.read_bytes())
        del index["weight_map"]
        return {} if index.keys() <= {"metadata"} and _is_sizes(index.get("metadata")) else index
    if is_weights(file.name):
        metadata = read_metadata(file)
        return {} if metadata in _USUAL_METADATA else metadata
    return {}


def _told(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that decide nothing, and may hold what somebody has written."""
    for name, value in config.items():
        is_release = name == "peft_version" and isinstance(value, str) and _RELEASE.fullmatch(value)
        is_known = name in HANDLED or name in HARMLESS or name in REFUSED
        is_plain = not value or isinstance(value, (bool, int, float)) or value in _USUAL_TEXTS
        decides = name in HANDLED and name != _BASE_MODEL
        if not (decides or is_release or (is_known and is_plain)):
            yield name, value


def _is_sizes(metadata: Any) -> bool:
    """What `transformers` writes into an index: the bytes of all tensors."""
    return metadata is None or (
        isinstance(metadata, dict) and all(type(value) is int for value in metadata.values())
    )
