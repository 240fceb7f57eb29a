"""The committed stubs are what the .proto files say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto")),
        ],
        cwd=ROOT,
        check=True,
    )
    generated = sorted((tmp_path / "protos").iterdir())
    names = [f"{name}_pb2{part}" for name in ("engine", "loraplex") for part in (".py", ".pyi", "_grpc.py")]
    assert [file.name for file in generated] == names
    for file in generated:
        committed = ROOT / "protos" / file.name
        assert committed.read_text() == file.read_text(), f"{file.name} is stale: run `make protos`"
