"""Which files make up an adapter, and how large each may be: for the CLI, uploads, stores and engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
MAX_SHARDS = 64

_MIB = 1024 * 1024
TOKENIZER_FILES: Mapping[str, int] = {
    "tokenizer.json": 64 * _MIB,
    "tokenizer_config.json": 16 * _MIB,
    "special_tokens_map.json": _MIB,
    "added_tokens.json": 4 * _MIB,
    "chat_template.jinja": _MIB,
    "chat_template.json": _MIB,
}
"""The files of a tokenizer that an adapter may bring, with the bytes each may have."""

SMALL_FILES: Mapping[str, int] = {CONFIG_FILE: _MIB, INDEX_FILE: 16 * _MIB, **TOKENIZER_FILES}
"""Every file but those of weights, with the bytes each may have."""

MAX_SMALL_BYTES = sum(SMALL_FILES.values())
MAX_FILES = len(SMALL_FILES) + MAX_SHARDS

_SHARD = re.compile(r"adapter_model-(\d{5})-of-(\d{5})\.safetensors")


def is_weights(name: str) -> bool:
    """Whether a file holds tensors: the one file of weights, or a shard."""
    if name == WEIGHTS_FILE:
        return True
    match = _SHARD.fullmatch(name)
    return match is not None and 1 <= int(match[1]) <= int(match[2]) <= MAX_SHARDS


def is_adapter_file(name: str) -> bool:
    """Whether a file of this name is part of an adapter; anything else is left out of uploads, or refused."""
    return name in SMALL_FILES or is_weights(name)


def size_limit(name: str, max_weights_bytes: int) -> int:
    """The bytes that an adapter's file may have, where one of weights may have `max_weights_bytes`."""
    return SMALL_FILES.get(name, max_weights_bytes)


def fault_of(names: Iterable[str]) -> str | None:
    """Says what is wrong with this set of file names, as the end of 'The adapter …'; None for a whole one.

    It has a config, and either one file of weights, or all shards of one count with their index.
    """
    present = set(names)
    if CONFIG_FILE not in present:
        return f"has no {CONFIG_FILE}"
    shards = sorted(name for name in present if is_weights(name) and name != WEIGHTS_FILE)
    if not shards:
        if WEIGHTS_FILE not in present:
            return f"has no {WEIGHTS_FILE}"
        if INDEX_FILE in present:
            return f"has an {INDEX_FILE} but no shards"
        return None
    if WEIGHTS_FILE in present:
        return f"has both {WEIGHTS_FILE} and shards of it"
    if INDEX_FILE not in present:
        return f"has shards but no {INDEX_FILE}"
    counts = {match[2] for match in map(_SHARD.fullmatch, shards) if match}
    if len(counts) > 1:
        return f"has shards of different counts ({shards[0]}, {shards[-1]})"
    (count,) = counts
    wanted = {f"adapter_model-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    missing = sorted(wanted - present)
    return f"has no {missing[0]}" if missing else None
