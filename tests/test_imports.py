"""Imports go one way, and a gateway stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("adapters", "engine", "gateway", "protos")


def modules_after_import(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_kernels_know_nothing_of_serving(path: Path) -> None:
    # A namespace package is out of import-linter's reach, so the lines themselves are read.
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] in ("import", "from"):
            assert words[1].split(".")[0] not in OURS, f"{path.name}: {line.strip()}"


def test_kernels_is_a_namespace_package() -> None:
    assert not list((ROOT / "kernels").rglob("__init__.py")), (
        "transformers takes a top-level `kernels` with an __init__.py for Hugging Face's package of that name"
    )


def test_gateway_loads_no_model_library() -> None:
    loaded = modules_after_import("import gateway.app, gateway.cli, adapters.cli")
    assert not loaded & {"torch", "transformers", "peft", "triton", "safetensors"}


def test_engine_core_loads_no_web_library() -> None:
    loaded = modules_after_import("import engine.loop, engine.runner, engine.server, engine.model.loading")
    assert not loaded & {"pydantic", "fastapi", "redis", "gguf", "transformers"}
