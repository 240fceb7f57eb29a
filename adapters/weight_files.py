"""An adapter's files of weights: one, or shards with an index, and the tensors in them."""

from __future__ import annotations

from pathlib import Path

from adapters.adapter_files import INDEX_FILE, SMALL_FILES, WEIGHTS_FILE, check_complete, is_weights
from adapters.errors import InvalidAdapter, shown
from adapters.layout import StoredTensor
from adapters.safetensors_header import MAX_TENSORS, read_header
from adapters.strict_json import NotStrictJson, load_object

DTYPES = ("F32", "F16", "BF16")


def read_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of all files, in the order of files and of their data. Reads headers and the index only.

    Raises `InvalidAdapter`: for a set of files that is not whole, a file that is no safetensors file, a dtype
    that is not served, or an index that does not say what the files hold.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    check_complete(names)
    tensors: dict[str, StoredTensor] = {}
    for file in filter(is_weights, names):
        for info in read_header(folder / file):
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
    if WEIGHTS_FILE not in names:
        _check_index(folder, tensors)
    return list(tensors.values())


def _check_index(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    limit = SMALL_FILES[INDEX_FILE]
    with (folder / INDEX_FILE).open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit or raw.count(b":") > 2 * MAX_TENSORS:  # counted before parsing costs memory
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
