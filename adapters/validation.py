"""Decides whether an uploaded folder is an adapter that is served exactly, and computes its digest.

One pass over the weights does both: each tensor is read once, in pieces, in canonical order; a piece is
checked for NaN and Inf by its bits and fed to the hash. Memory stays flat whatever the size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import InvalidAdapter, shown
from adapters.identity import DigestPart, digest_of
from adapters.peft_config import MAX_CONFIG_BYTES
from adapters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    BaseModelShape,
    LoraTensor,
    is_pickle,
    map_tensors,
    parse_config,
    pickle_refused,
    read_header,
)
from adapters.safetensors_header import MAX_HEADER_BYTES

__all__ = ["AdapterSummary", "InvalidAdapter", "largest_weights_file", "validate"]

_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _FloatBits:
    """Where the parts of a float lie in its bits."""

    view: str
    """numpy's name of the unsigned integer of this size."""
    exponent: int
    """All of these bits set: Inf or NaN."""
    magnitude: int
    """None of these bits set: zero, of either sign."""


_FLOAT_BITS = {
    "F32": _FloatBits("<u4", 0x7F800000, 0x7FFFFFFF),
    "F16": _FloatBits("<u2", 0x7C00, 0x7FFF),
    "BF16": _FloatBits("<u2", 0x7F80, 0x7FFF),
}


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What is known of a valid adapter."""

    digest: bytes
    rank: int
    """The largest of its modules."""
    num_tensors: int
    nbytes: int
    """Of all tensors."""
    base_model: str | None
    """As the config names it."""
    target_modules: tuple[str, ...]
    """The names of the linear layers that it adapts, in any decoder layer."""


def validate(folder: Path, shape: BaseModelShape, *, allow_zero: bool = False) -> AdapterSummary:
    """Checks the adapter in `folder`, which holds exactly
    the two files of PEFT's format, against a base model.

    `allow_zero` accepts an adapter whose update is zero everywhere, as one is before training. Blocks on the
    disk for as long as reading and hashing the weights takes. Raises `InvalidAdapter` that names the fault
    and the mend.
    """
    _check_files(folder)
    config = parse_config(_read_config(folder / CONFIG_FILE))
    weights = folder / WEIGHTS_FILE
    tensors = map_tensors(config, read_header(weights), shape)
    digest, nonzero = _read_weights(weights, tensors)
    if not allow_zero and not _has_effect(tensors, nonzero):
        raise InvalidAdapter(
            "The adapter's update is zero in every module, so it would answer as the base model does; train "
            "it, or upload it with allow_zero=true."
        )
    adapted = {tensor.module for tensor in tensors}
    return AdapterSummary(
        digest=digest,
        rank=max(tensor.rank for tensor in tensors),
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        base_model=config.base_model,
        target_modules=tuple(module for module in shape.modules if module in adapted),
    )


def largest_weights_file(shape: BaseModelShape) -> int:
    """The bytes of the largest weights file that can be valid, so that an upload can be cut off."""
    features = sum(sum(sizes) for sizes in shape.modules.values())
    return 8 + MAX_HEADER_BYTES + shape.num_layers * features * shape.max_lora_rank * 4


def _check_files(folder: Path) -> None:
    entries = {entry.name: entry for entry in os.scandir(folder)}
    for name in sorted(entries.keys() - {CONFIG_FILE, WEIGHTS_FILE}):
        if is_pickle(name):
            raise pickle_refused(name)
        raise InvalidAdapter(
            f"The file {shown(name)} is not part of an adapter; upload only {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}.",
            name,
        )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in entries:
            raise InvalidAdapter(
                f"The file {name} is missing; upload both {CONFIG_FILE} and {WEIGHTS_FILE}.", name
            )
        if not stat.S_ISREG(entries[name].stat(follow_symlinks=False).st_mode):
            raise InvalidAdapter(f"{name} is not a regular file; upload the file itself.", name)


def _read_config(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _read_weights(path: Path, tensors: Sequence[LoraTensor]) -> tuple[bytes, set[str]]:
    """The digest, and the canonical names of the tensors that are not all zero."""
    nonzero: set[str] = set()
    with path.open("rb", buffering=0) as file:

        def parts() -> Iterator[DigestPart]:
            for tensor in sorted(tensors, key=lambda tensor: tensor.canonical_name):
                yield DigestPart(
                    name=tensor.canonical_name,
                    scale=tensor.scale,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    chunks=_checked_pieces(file.fileno(), tensor, nonzero),
                )

        return digest_of(parts()), nonzero


def _checked_pieces(descriptor: int, tensor: LoraTensor, nonzero: set[str]) -> Iterator[memoryview]:
    """A tensor's bytes, each piece valid until the next; notes it in `nonzero` unless all zero."""
    import numpy as np  # here, since every gateway imports this module, and should start quickly

    bits = _FLOAT_BITS[tensor.dtype]
    buffer = memoryview(bytearray(min(_PIECE_BYTES, tensor.nbytes)))
    done = 0
    while done < tensor.nbytes:
        piece = buffer[: min(len(buffer), tensor.nbytes - done)]
        _read_exactly(descriptor, piece, tensor.offset + done)
        values = np.frombuffer(piece, bits.view)
        if ((values & bits.exponent) == bits.exponent).any():
            raise InvalidAdapter(
                f"The tensor {shown(tensor.name)} holds NaN or Inf; the training has diverged: use an "
                "earlier checkpoint.",
                tensor.name,
            )
        if tensor.canonical_name not in nonzero and (values & bits.magnitude).any():
            nonzero.add(tensor.canonical_name)
        yield piece
        done += len(piece)


def _read_exactly(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise InvalidAdapter(
                f"{WEIGHTS_FILE} became shorter while it was read; upload it again.", WEIGHTS_FILE
            )
        target, offset = target[count:], offset + count


def _has_effect(tensors: Sequence[LoraTensor], nonzero: set[str]) -> bool:
    """Whether some module has a scale and both sides that are not zero."""
    sides = {"A": set[tuple[int, str]](), "B": set[tuple[int, str]]()}
    for tensor in tensors:
        if tensor.scale != 0 and tensor.canonical_name in nonzero:
            sides[tensor.side].add((tensor.layer, tensor.module))
    return bool(sides["A"] & sides["B"])
