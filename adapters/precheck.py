"""What can be said of an adapter's folder without the base model: before an upload sends a byte."""

from __future__ import annotations

from pathlib import Path

from adapters.adapter_files import WEIGHTS_FILE, check_complete, is_pickle, pickle_refused
from adapters.errors import InvalidAdapter
from adapters.reader import read_config
from adapters.weight_files import read_tensors


def precheck(folder: Path) -> None:
    """Checks that all files are there and readable, and that the config is one that is served.

    Other files in the folder (PEFT writes a README.md) are fine: they are not sent. Raises `InvalidAdapter`.
    """
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    try:
        check_complete(names)
    except InvalidAdapter as error:
        pickles = [name for name in names if is_pickle(name)]
        if error.field_or_tensor == WEIGHTS_FILE and pickles:
            raise pickle_refused(pickles[0]) from None
        raise
    read_config(folder)
    read_tensors(folder)
