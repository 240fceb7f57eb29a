"""Reads every byte of an adapter's tensors once: hashes it, and looks for numbers that none should have.

In pieces, in the order of the files, by a few threads: memory stays flat whatever the size, and hashing
(which lets other threads run) takes about as long as reading.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import InvalidAdapter, shown
from adapters.layout import StoredTensor

_PIECE_BYTES = 1024 * 1024
_BATCH_BYTES = 16 * 1024 * 1024
_MAX_THREADS = 4


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
class TensorScan:
    """What a tensor's bytes are."""

    sha256: bytes
    nonzero: bool
    """Whether any number in it is not zero."""


def scan_weights(
    folder: Path, tensors: Sequence[StoredTensor], *, follow_links: bool = False
) -> Mapping[str, TensorScan]:
    """Reads all `tensors` of the adapter in `folder`; the scans by the tensors' names.

    A server never follows links in an upload; whoever checks files of their own may.
    Raises `InvalidAdapter` that names the tensor: for NaN or Inf, and a file that is shorter than its header
    says or is a link.
    """
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for file in sorted({tensor.file for tensor in tensors}):
            files[file] = _open(folder / file, follow_links)
            stack.callback(os.close, files[file])
        batches = list(_batches(tensors))
        threads = min(_MAX_THREADS, os.cpu_count() or 1, len(batches))
        if threads < 2:
            return {name: scan for batch in batches for name, scan in _scan_batch(files, batch)}
        with ThreadPoolExecutor(threads, thread_name_prefix="adapter-scan") as pool:
            futures = [pool.submit(_scan_batch, files, batch) for batch in batches]
            try:
                return {name: scan for future in futures for name, scan in future.result()}
            except InvalidAdapter:
                pool.shutdown(cancel_futures=True)
                raise


def _open(path: Path, follow_links: bool) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW))
    except OSError as error:
        raise InvalidAdapter(
            f"{path.name} cannot be read as a file ({error.strerror}); upload the file itself.", path.name
        ) from None


def _batches(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    batch: list[StoredTensor] = []
    left = _BATCH_BYTES
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset)):
        batch.append(tensor)
        left -= tensor.nbytes
        if left <= 0:
            yield batch
            batch, left = [], _BATCH_BYTES
    if batch:
        yield batch


def _scan_batch(files: Mapping[str, int], batch: Sequence[StoredTensor]) -> list[tuple[str, TensorScan]]:
    buffer = memoryview(bytearray(min(_PIECE_BYTES, max(tensor.nbytes for tensor in batch))))
    return [(tensor.name, _scan(files[tensor.file], tensor, buffer)) for tensor in batch]


def _scan(descriptor: int, tensor: StoredTensor, buffer: memoryview) -> TensorScan:
    import numpy as np  # here, since every gateway imports this module, and should start quickly

    bits = _FLOAT_BITS[tensor.dtype]
    sha = hashlib.sha256()
    nonzero = False
    done = 0
    while done < tensor.nbytes:
        piece = buffer[: min(len(buffer), tensor.nbytes - done)]
        _read_exactly(descriptor, piece, tensor.offset + done, tensor.file)
        values = np.frombuffer(piece, bits.view)
        if ((values & bits.exponent) == bits.exponent).any():
            raise InvalidAdapter(
                f"The tensor {shown(tensor.name)} holds NaN or Inf; the training has diverged: use an "
                "earlier checkpoint.",
                tensor.name,
            )
        nonzero = nonzero or bool((values & bits.magnitude).any())
        sha.update(piece)
        done += len(piece)
    return TensorScan(sha.digest(), nonzero)


def _read_exactly(descriptor: int, target: memoryview, offset: int, file: str) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise InvalidAdapter(f"{file} became shorter while it was read; upload it again.", file)
        target, offset = target[count:], offset + count
