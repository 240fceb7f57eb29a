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
            "protos/engine.proto",
        ],
        cwd=ROOT,
        check=True,
    )
    generated = sorted((tmp_path / "protos").iterdir())
    assert [file.name for file in generated] == ["engine_pb2.py", "engine_pb2.pyi", "engine_pb2_grpc.py"]
    for file in generated:
        committed = ROOT / "protos" / file.name
        assert committed.read_text() == file.read_text(), f"{file.name} is stale: run `make protos`"
