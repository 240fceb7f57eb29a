from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import native, reference
from kernels.activation import silu_mul
from kernels.kv_write import rope_write_kv
from kernels.lora import apply_lora
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.sampling import SamplingBatch, sample

ROOT = Path(__file__).parents[2]
GCC = shutil.which("gcc") or ""


@pytest.fixture
def fresh() -> Iterator[None]:
    """The module as in a new process."""
    caches = (native.compiled, native._warn_once)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _mapped_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[-1]).name for line in lines if ".so" in line}


def test_there_are_kernels_here_and_one_openmp_runtime(dtype: torch.dtype) -> None:
    assert native.compiled(dtype) is not None, "without them every other test would test the reference"
    assert (
        len([name for name in _mapped_libraries() if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
    )


def test_to_release_threads_looks_for_the_runtime_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load of an adapter does: to look takes longer than to read one."""
    native.release_threads()
    monkeypatch.setattr(native, "_openmp_runtime", lambda: pytest.fail("looked for again"))
    native.release_threads()


def test_without_a_compiler_the_reference_serves_and_one_line_says_so(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    x, weight = torch.randn(3, 8), torch.randn(8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        assert native.compiled(torch.bfloat16) is None
    assert len(caplog.records) == 1 and "install gcc" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.compiled(torch.float32) is None
    assert "out of cheese" in caplog.text
    assert not list((tmp_path / "loraplex").iterdir()), "nothing half built stays"


def test_processes_that_build_at_the_same_time_share_one_whole_library(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from kernels import native\n"
        "kernels = native._open_or_build(sys.argv[1], torch.float32)\n"
        "assert kernels.rms_norm.argtypes"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script, GCC]
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list((tmp_path / "loraplex").iterdir())) == 1


def test_a_library_is_kept_and_a_changed_source_makes_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = native._fingerprint(GCC)
    assert native._fingerprint(GCC) == before
    sources = tmp_path / "cpu"
    shutil.copytree(native._SOURCES, sources)
    monkeypatch.setattr(native, "_SOURCES", sources)
    assert native._fingerprint(GCC) == before
    (sources / "norm.c").write_text((sources / "norm.c").read_text() + "\n")
    assert native._fingerprint(GCC) != before


def test_where_the_cache_cannot_be_written_the_process_builds_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert native._open_or_build(GCC, torch.float32).rms_norm.argtypes
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_builds_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert native._open_or_build(GCC, torch.float32).rms_norm.argtypes


@pytest.mark.parametrize("fault", ["writable by others", "damaged"])
def test_a_library_that_is_not_to_be_trusted_is_not_run(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "loraplex"
    cache.mkdir()
    planted = cache / f"cpu-float32-{native._fingerprint(GCC)}.so"
    planted.write_bytes(b"\x7fELF, and then nothing")
    cache.chmod(0o777 if fault == "writable by others" else 0o700)
    assert native._open_or_build(GCC, torch.float32).rms_norm.argtypes
    assert planted.read_bytes().endswith(b"nothing")


@pytest.mark.parametrize(
    ("target", "dtype", "tolerance"),
    [
        ("x86-64", torch.bfloat16, 2e-2),
        ("x86-64-v3", torch.float32, 2e-5),
        ("x86-64-v4", torch.bfloat16, 2e-2),
    ],
)
def test_the_code_for_lesser_processors_is_right_too(
    target: str,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    attention_case: Callable[..., Any],
    lora_case: Callable[..., Any],
) -> None:
    if target == "x86-64-v4" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor lacks AVX-512")
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, f"-march={target}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = native._open_or_build(GCC, dtype)
    monkeypatch.setattr(native, "compiled", lambda dtype: kernels)

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)

    torch.manual_seed(0)
    x, weight, residual = (torch.randn(shape).to(dtype) for shape in ((5, 70), (70,), (5, 70)))
    close(rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
    rms_norm(x, weight, 1e-5, residual)
    close(silu_mul(x), reference.silu_mul(x.double()))

    case = attention_case((9, 3, 64), [(1, 700), (1, 17), (40, 70)], dtype=dtype, padding=1)
    rope_write_kv(case.qkv, case.cos_sin, case.plan, case.k_cache, case.v_cache, num_heads=9)
    heads = {"num_heads": 9, "scale": case.scale}
    qkv, k_cache, v_cache = case.qkv.double(), case.k_cache.double(), case.v_cache.double()
    out = paged_attention(case.qkv, case.k_cache, case.v_cache, case.plan, **heads)
    close(out, reference.paged_attention(qkv, k_cache, v_cache, case.plan, **heads))

    lora = lora_case([(24, [0, 3, 4]), (4, [1])], in_features=70, outputs=[64, 9], tokens=5, dtype=dtype)
    expected = lora.y.float()
    reference.lora_expand(reference.lora_shrink(lora.x, lora.pool, lora.plan), expected, lora.pool, lora.plan)
    apply_lora(lora.x, lora.y, lora.pool, lora.plan)
    torch.testing.assert_close(lora.y.float(), expected, atol=10 * tolerance, rtol=tolerance)

    logits = (torch.randn(50, 1003) * 3).to(dtype)
    ones, zeros, ids = torch.ones(50), torch.zeros(50), torch.arange(50)
    batch = SamplingBatch(ones, torch.full((50,), 40, dtype=torch.int32), ones * 0.9, zeros, ids, ids)
    assert torch.equal(sample(logits, batch).tokens, reference.sample(logits.double(), batch).tokens)
    logits[3, 1000] = float("nan")
    assert sample(logits, batch).finite.tolist() == [row != 3 for row in range(50)]


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """It probes for a distribution's package of that name; see the README on the tree."""
    script = "from transformers import LlamaForCausalLM; from kernels.norm import rms_norm"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
