"""What can be said of an adapter's folder without the base model: before an upload sends a byte."""

from __future__ import annotations

from pathlib import Path

from adapters.errors import InvalidAdapter, shown
from adapters.peft_config import MAX_CONFIG_BYTES
from adapters.peft_format import (
    CONFIG_FILE,
    DTYPES,
    WEIGHTS_FILE,
    is_pickle,
    parse_config,
    pickle_refused,
    read_header,
)


def precheck(folder: Path) -> None:
    """Checks that both files are there and readable, and that the config is one that is served.

    Other files in the folder (PEFT writes a README.md) are fine: they are not sent. Raises `InvalidAdapter`.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            pickles = sorted(file.name for file in folder.iterdir() if is_pickle(file.name))
            if name == WEIGHTS_FILE and pickles:
                raise pickle_refused(pickles[0])
            raise InvalidAdapter(
                f"{folder} has no {name}; give the folder that PEFT's save_pretrained wrote.", name
            )
    with (folder / CONFIG_FILE).open("rb") as file:
        parse_config(file.read(MAX_CONFIG_BYTES + 1))
    for tensor in read_header(folder / WEIGHTS_FILE):
        if tensor.dtype not in DTYPES:
            raise InvalidAdapter(
                f"The tensor {shown(tensor.name)} has dtype {tensor.dtype}; save it as one of "
                f"{', '.join(DTYPES)}.",
                tensor.name,
            )
