"""An adapter's files of weights: one, or shards with an index, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapters.adapter_files import INDEX_FILE, SMALL_FILES, WEIGHTS_FILE, check_complete, is_weights
from adapters.errors import InvalidAdapter, shown
from adapters.layout import StoredTensor
from adapters.safetensors_header import MAX_TENSORS, RawHeader, parse_header, read_raw_header
from adapters.strict_json import NotStrictJson, load_object

DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class RawHeaders:
    """What an adapter's files of weights say of their tensors, not parsed yet.

    Equal ones, which adapters have that one program saved with one config, tell of the same tensors.
    """

    files: tuple[tuple[str, RawHeader], ...]
    """By the file's name, in its order."""
    index: bytes | None
    """Of shards; None for one file."""


def read_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of all files, in the order of files and of their data. Reads headers and the index only.

    Raises `InvalidAdapter`: for a set of files that is not whole, a file that is no safetensors file, a dtype
    that is not served, or an index that does not say what the files hold.
    """
    tensors = _parsed(_headers(folder))  # one header after the other, since each may have megabytes
    if not any(tensor.file == WEIGHTS_FILE for tensor in tensors.values()):
        _check_index(_read_index(folder), tensors)
    return list(tensors.values())


def read_headers(folder: Path) -> RawHeaders:
    """The headers and the index of an adapter that was checked before: all in memory at once.

    Raises as `read_tensors`, for what shows without parsing them.
    """
    headers = tuple(_headers(folder))
    return RawHeaders(headers, None if headers[0][0] == WEIGHTS_FILE else _read_index(folder))


def parse_headers(headers: RawHeaders) -> list[StoredTensor]:
    """The tensors that the headers tell of, as `read_tensors`. Raises as that."""
    tensors = _parsed(headers.files)
    if headers.index is not None:
        _check_index(headers.index, tensors)
    return list(tensors.values())


def _headers(folder: Path) -> Iterator[tuple[str, RawHeader]]:
    names = sorted(entry.name for entry in folder.iterdir())
    check_complete(names)
    for file in filter(is_weights, names):
        yield file, read_raw_header(folder / file)


def _parsed(headers: Iterable[tuple[str, RawHeader]]) -> dict[str, StoredTensor]:
    """By name, in the order of files and of their data."""
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers:
        for info in parse_header(header):
            if info.dtype not in DTYPES:
                raise InvalidAdapter(
                    f"The tensor {shown(info.name)} has dtype {info.dtype}; save it as one of "
                    f"{', '.join(DTYPES)}.",
                    info.name,
                )
            if info.name in tensors:
                raise InvalidAdapter(f"The tensor {shown(info.name)} is in two shards.", info.name)
            tensors[info.name] = StoredTensor(
                info.name, file, info.dtype, info.shape, info.offset, info.nbytes
            )
        if len(tensors) > MAX_TENSORS:
            raise InvalidAdapter(f"The shards hold more than {MAX_TENSORS} tensors.")
    return tensors


def _read_index(folder: Path) -> bytes:
    with (folder / INDEX_FILE).open("rb") as file:
        return file.read(SMALL_FILES[INDEX_FILE] + 1)


def _check_index(raw: bytes, tensors: Mapping[str, StoredTensor]) -> None:
    # Counted before parsing costs memory.
    if len(raw) > SMALL_FILES[INDEX_FILE] or raw.count(b":") > 2 * MAX_TENSORS:
        raise InvalidAdapter(f"{INDEX_FILE} is larger than an index can be.", INDEX_FILE)
    try:
        mapping = load_object(raw).get("weight_map")
    except NotStrictJson as error:
        raise InvalidAdapter(f"{INDEX_FILE} {error}; save the adapter anew.", INDEX_FILE) from None
    if mapping != {name: tensor.file for name, tensor in tensors.items()}:
        raise InvalidAdapter(
            f"{INDEX_FILE} does not say which shard holds which tensor as the shards do; save the adapter "
            "anew.",
            INDEX_FILE,
        )
