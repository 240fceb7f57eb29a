"""All kernels compile, and the start of an engine has those compiled that the steps of any requests need."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest


def ask(*arguments: object, **variables: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels_needed", *map(str, arguments)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["graphs", "eager"])
@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(256, 8192), (16, 512)])
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled(
    mode: str, max_num_seqs: int, max_tokens: int
) -> None:
    seed = random.randrange(1 << 30)
    found = ask(mode, seed, max_num_seqs, max_tokens)
    kernels = found["kernels"]
    assert isinstance(kernels, list) and {"decode", "prefill", "shrink", "expand"} <= set(kernels)
    assert found["late"] == [], f"seed {seed}"


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    jobs = ask("compile", TRITON_CACHE_DIR=str(tmp_path))["jobs"]
    assert jobs == len(list(tmp_path.rglob("*.cubin"))) > 50
