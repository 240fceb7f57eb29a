"""How a model's embeddings are made, as sentence-transformers keeps it beside the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from engine.step import Pooling

_log = logging.getLogger(__name__)

_MODULES_FILE = "modules.json"
_CONFIG_FILE = "config.json"
_MODES = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}


def read_pooling(folder: Path) -> Pooling:
    """The pooling that ``modules.json`` and its pooling module's config name; without them, the last token's.

    What is neither the mean nor the last token's is not computed here: the log says so, and it is the last.
    """
    module = next((each for each in _read(folder / _MODULES_FILE, []) if _is_pooling(each)), None)
    if module is None:
        return Pooling.LAST
    config = _read(folder / str(module.get("path", "")) / _CONFIG_FILE, {})
    pooling = _MODES.get(str(config.get("pooling_mode") or _flagged(config)))
    if pooling is None:
        _log.warning("%s asks for a pooling that is neither mean nor lasttoken: it is lasttoken", folder)
    return pooling or Pooling.LAST


def _is_pooling(module: Any) -> bool:
    return isinstance(module, dict) and str(module.get("type", "")).endswith("Pooling")


def _flagged(config: dict[str, Any]) -> str | None:
    """The one mode whose flag is set; None where it is another, or several are, which are concatenated."""
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return _FLAGS.get(flags[0]) if len(flags) == 1 else None


def _read(path: Path, absent: Any) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return absent
    return found if isinstance(found, type(absent)) else absent
