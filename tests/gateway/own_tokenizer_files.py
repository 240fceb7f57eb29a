"""Tokenizer files as adapters bring them: a base model's, with changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Files = dict[str, bytes]


def write(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def changed(base: Files, change: Callable[[dict[str, Any]], None]) -> Files:
    document = json.loads(base["tokenizer.json"])
    change(document)
    return {"tokenizer.json": json.dumps(document).encode()}


def token(number: int, text: str, **flags: bool) -> dict[str, Any]:
    defaults = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": text, **defaults, **flags}


def extra_token(**flags: Any) -> Callable[[dict[str, Any]], None]:
    number, text = flags.pop("id", 462), flags.pop("content", "<x>")
    return lambda document: document["added_tokens"].append(token(number, text, **flags))
