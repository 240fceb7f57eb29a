"""The memory that a container leaves, told from files as the kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.host_memory import available_ram

MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {1000 * 1024} kB\nSwapFree: 5 kB\n"
    )
    return tmp_path / "proc"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_this_machine_says_something() -> None:
    assert available_ram() > 0


def test_without_control_groups_it_is_the_machines(proc: Path, tmp_path: Path) -> None:
    assert available_ram(proc, tmp_path / "none") == 1000 * MIB


def test_version_2_counts_every_level_and_what_can_be_given_up(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    groups = tmp_path / "cgroup"
    write(groups / "pod" / "container", max="max", current=5)
    assert available_ram(proc, groups) == 1000 * MIB
    write(groups / "pod", max=600 * MIB, current=500 * MIB, stat=f"anon 1\ninactive_file {70 * MIB}")
    assert available_ram(proc, groups) == 170 * MIB
    write(groups / "pod" / "container", max=100 * MIB, current=60 * MIB)
    assert available_ram(proc, groups) == 40 * MIB
    write(groups / "pod" / "container", max=100 * MIB, current=160 * MIB)
    assert available_ram(proc, groups) == 0


def test_version_1_in_a_container_that_is_told_the_hosts_path(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n")
    groups = tmp_path / "cgroup"
    write(groups / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=7)
    assert available_ram(proc, groups) == 1000 * MIB
    write(groups / "memory", limit_in_bytes=300 * MIB, stat=f"total_inactive_file {MIB}")
    write(groups / "memory", usage_in_bytes=100 * MIB)
    assert available_ram(proc, groups) == 201 * MIB
