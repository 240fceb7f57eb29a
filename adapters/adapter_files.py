"""Which files make up an adapter, and how large each may be: for the CLI, uploads, stores and engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from adapters.errors import InvalidAdapter, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
MAX_SHARDS = 64

EFFECT_FILE = "tokenizer_effect.json"
"""What of an adapter's tokenizer counts, as the gateway has found; never part of an upload."""

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

SMALL_FILES: Mapping[str, int] = {CONFIG_FILE: _MIB, INDEX_FILE: 4 * _MIB, **TOKENIZER_FILES}
"""Every file but those of weights, with the bytes each may have."""

MAX_SMALL_BYTES = sum(SMALL_FILES.values())
MAX_FILES = len(SMALL_FILES) + MAX_SHARDS

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
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


def is_pickle(name: str) -> bool:
    """Whether a file is what older training programs save weights as."""
    return name.endswith(_PICKLE_SUFFIXES)


def pickle_refused(name: str) -> InvalidAdapter:
    """The error for such a file."""
    return InvalidAdapter(
        f"{shown(name)} is a pickle, which can run code when it is read; save the adapter with "
        f"save_pretrained(..., safe_serialization=True) and upload {WEIGHTS_FILE}.",
        name,
    )


def size_limit(name: str, max_weights_bytes: int) -> int:
    """The bytes that an adapter's file may have, where one of weights may have `max_weights_bytes`."""
    return SMALL_FILES.get(name, max_weights_bytes)


def check_complete(names: Iterable[str]) -> None:
    """Checks that files of these names can make up an adapter; names of anything else do not matter.

    It has a config, and either one file of weights, or all shards of one count with their index. Raises
    `InvalidAdapter` that names the file at fault.
    """
    present = set(names)
    shards = sorted(name for name in present if is_weights(name) and name != WEIGHTS_FILE)
    wanted = {CONFIG_FILE, *(_siblings(shards[0]) if shards else (WEIGHTS_FILE,))}
    missing = sorted(wanted - present)
    if missing:
        raise InvalidAdapter(
            f"The file {missing[0]} is missing; give all files that PEFT's save_pretrained wrote.", missing[0]
        )
    surplus = [name for name in (*shards, WEIGHTS_FILE, INDEX_FILE) if name in present - wanted]
    if surplus:
        raise InvalidAdapter(
            f"There is {surplus[0]} beside another set of weights; give either {WEIGHTS_FILE}, or shards of "
            f"one count with {INDEX_FILE}.",
            surplus[0],
        )


def _siblings(shard: str) -> list[str]:
    """The index and all shards of the set that a shard is of."""
    match = _SHARD.fullmatch(shard)
    assert match is not None
    count = match[2]
    return [INDEX_FILE, *(f"adapter_model-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1))]
