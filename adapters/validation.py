"""Decides whether an uploaded folder is an adapter that is served exactly, and computes its digest."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapters.adapter_files import (
    EFFECT_FILE,
    check_complete,
    is_adapter_file,
    is_pickle,
    pickle_refused,
    size_limit,
)
from adapters.base_model import MAX_ADDED_TOKENS, BaseModelShape
from adapters.errors import InvalidAdapter, shown
from adapters.identity import DigestPart, digest_of
from adapters.layout import AdapterLayout, LowRank
from adapters.reader import lay_out, read_config
from adapters.safetensors_header import MAX_HEADER_BYTES
from adapters.weight_files import read_tensors
from adapters.weights_scan import TensorScan, scan_weights
from adapters.words import words_of

__all__ = ["AdapterSummary", "InvalidAdapter", "largest_weights_file", "validate"]


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What is known of a valid adapter."""

    digest: bytes
    rank: int
    """The largest of its modules; 0 where it has no low-rank update."""
    num_tensors: int
    nbytes: int
    """Of all tensors."""
    base_model: str | None
    """As the config names it."""
    target_modules: tuple[str, ...]
    """The names of the modules that it adapts: linear layers of any decoder layer, embed_tokens, lm_head."""
    invocation_tokens: tuple[int, ...] = ()
    """Of activated LoRA; empty for any other."""
    tokenizer: str = ""
    """Hash of its own tokenizer, in hex; empty where it uses the base model's."""
    vocab_size: int = 0
    """Where it adds tokens: how many there are then. 0: the base model's."""


def validate(
    folder: Path, shape: BaseModelShape, *, allow_zero: bool = False, tokenizer: str = ""
) -> AdapterSummary:
    """Checks the adapter in `folder`, which holds exactly its files, against a base model.

    `allow_zero` accepts an adapter that does nothing, as one is before training. `tokenizer` is the hash of
    what its own tokenizer files do, which the caller has found out; it is part of the digest. Blocks on the
    disk for as long as reading and hashing the weights takes. Raises `InvalidAdapter` that names the fault
    and the mend.
    """
    _check_files(folder, shape, own_tokenizer=bool(tokenizer))
    config = read_config(folder)
    layout = lay_out(config, read_tensors(folder), shape)
    scans = scan_weights(folder, [part.tensor for part in layout.parts])
    if not allow_zero and not has_effect(layout, scans, shape.vocab_size):
        raise InvalidAdapter(
            "The adapter's update is zero in every module, so it would answer as the base model does; train "
            "it, or upload it with allow_zero=true."
        )
    return AdapterSummary(
        digest=digest_of_layout(layout, scans, words_of(folder, own_tokenizer=bool(tokenizer)), tokenizer),
        rank=max((update.rank for update in _updates(layout)), default=0),
        num_tensors=len(layout.parts),
        nbytes=sum(part.tensor.nbytes for part in layout.parts),
        base_model=config.base_model,
        target_modules=layout.target_modules,
        invocation_tokens=layout.invocation_tokens,
        tokenizer=tokenizer,
        vocab_size=layout.vocab_size if layout.vocab_size > shape.vocab_size else 0,
    )


def digest_of_layout(
    layout: AdapterLayout,
    scans: Mapping[str, TensorScan],
    words: Mapping[str, object],
    tokenizer: str = "",
) -> bytes:
    """The digest of an adapter whose tensors have been read; `words` are `words_of` its files."""
    parts = (
        DigestPart(
            part.name, part.scale, part.tensor.dtype, part.tensor.shape, scans[part.tensor.name].sha256
        )
        for part in layout.parts
    )
    told = {"tokenizer": tokenizer, "words": words}
    return digest_of(parts, {**layout.settings, **{name: value for name, value in told.items() if value}})


def has_effect(layout: AdapterLayout, scans: Mapping[str, TensorScan], base_vocab_size: int) -> bool:
    """Whether an adapter is known to change anything.

    A product of A and B that is not zero does, and a bias, with a scale; so do trained tokens, weights of
    `modules_to_save` (every weight that PEFT saved for another reason repeats the base's) and added tokens. A
    magnitude alone does not count: before training it is the norm of the base's weight, which is not known
    here.
    """

    def nonzero(name: str) -> bool:
        return scans[name].nonzero

    for update in _updates(layout):
        product = nonzero(update.a.name) and nonzero(update.b.name)
        bias = update.bias is not None and nonzero(update.bias.name)
        if update.scale != 0 and (product or bias):
            return True
    trained = layout.embedding_tokens or layout.lm_head_tokens or layout.trains_whole_ends
    return bool(trained) or layout.vocab_size > base_vocab_size


def largest_weights_file(shape: BaseModelShape) -> int:
    """The bytes of the largest weights file that can be valid, so that an upload can be cut off."""
    features = sum(sum(sizes) for sizes in shape.modules.values())
    outputs = sum(out_features for _, out_features in shape.modules.values())
    layers = shape.num_layers * (features * shape.max_lora_rank + outputs)
    ends = 0
    if shape.vocab_size:
        vocab_size = shape.vocab_size + MAX_ADDED_TOKENS
        whole_weights = 4  # the trained copy, its repetition, the original, and trained tokens
        per_token = shape.hidden_size * whole_weights + shape.max_lora_rank + 1
        ends = 2 * (vocab_size * per_token + shape.hidden_size * (shape.max_lora_rank + 1))
    return 8 + MAX_HEADER_BYTES + 4 * (layers + ends)


def _updates(layout: AdapterLayout) -> list[LowRank]:
    return [*layout.linear.values(), *(end for end in (layout.embedding, layout.lm_head) if end is not None)]


def _check_files(folder: Path, shape: BaseModelShape, *, own_tokenizer: bool) -> None:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    largest = largest_weights_file(shape)
    for entry in entries:
        if is_pickle(entry.name):
            raise pickle_refused(entry.name)
        if not is_adapter_file(entry.name) and not (own_tokenizer and entry.name == EFFECT_FILE):
            raise InvalidAdapter(
                f"The file {shown(entry.name)} is not part of an adapter; upload only what PEFT's "
                "save_pretrained and the tokenizer's wrote.",
                entry.name,
            )
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidAdapter(f"{entry.name} is not a regular file; upload the file itself.", entry.name)
        if status.st_size > size_limit(entry.name, largest):
            raise InvalidAdapter(
                f"{entry.name} has {status.st_size} bytes; the limit is {size_limit(entry.name, largest)}.",
                entry.name,
            )
    check_complete(entry.name for entry in entries)
