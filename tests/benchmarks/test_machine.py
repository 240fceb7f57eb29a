"""What benchmarks say of the machine is what the kernel says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks import machine

SPIN = "import time\nwhile time.process_time() < 1: pass\ninput()"


@pytest.fixture
def busy() -> subprocess.Popen[str]:
    """A child that works for a second and then waits for a line."""
    return subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, text=True)


def test_what_counts_as_ours_is_not_the_neighbours(busy: subprocess.Popen[str]) -> None:
    with_child = machine.NeighbourMeter(lambda: machine.process_tree(os.getpid()))
    without_child = machine.NeighbourMeter(lambda: [os.getpid()])
    try:
        while machine._ticks_of(busy.pid) < machine._TICKS_PER_SECOND // 2:
            time.sleep(0.05)
        ours, others = with_child.read(), without_child.read()
    finally:
        busy.communicate("\n", timeout=30)
    assert others.busy_cores - ours.busy_cores > 0.02


def test_the_tree_holds_a_child_and_its_peak_memory_is_known(busy: subprocess.Popen[str]) -> None:
    try:
        assert busy.pid in machine.process_tree(os.getpid())
        assert machine.peak_memory(busy.pid) > 1 << 20
    finally:
        busy.kill()
        busy.communicate(timeout=30)
    assert machine.peak_memory(busy.pid) == 0


def test_facts_name_the_machine() -> None:
    facts = machine.facts()
    assert facts["cores"] >= 1
    assert facts["memory_gb"] > 0.1
    assert facts["cpu"]
