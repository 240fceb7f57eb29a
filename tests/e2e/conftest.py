"""One stack for all tests that leave it as they found it, on the real model with the trained adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks.random_adapters import write_adapter
from tests.e2e.processes import EXACT, JSON, PIRATE, Stack
from tests.e2e.tiny import FLAGS, TinyZoo

# Small enough that a burst is preempted, and has to wait for blocks, pages and its turn.
_TIGHT = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024"),
    *("--num-gpu-blocks-override", "128", "--lora-memory-bytes", "100MiB"),
)
RANDOM_RANK = 64


@dataclass(frozen=True)
class Tenants:
    """Keys of two tenants. Both have an adapter `sql`: acme's speaks as a pirate, globex's in JSON.

    acme has the pirate as `pirate` too, and as `wide` random weights that fill most of the rank pages.
    """

    acme: str
    globex: str


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), [*EXACT, *_TIGHT])
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
    stack.assert_calm()


@pytest.fixture(scope="session")
def tenants(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    wide = tmp_path_factory.mktemp("adapters") / "wide"
    write_adapter(wide, rank=RANDOM_RANK, seed=1)
    acme, globex = stack.create_tenant("acme"), stack.create_tenant("globex")
    for folder, name, key in (
        (PIRATE, "sql", acme),
        (JSON, "sql", globex),
        (PIRATE, "pirate", acme),
        (wide, "wide", acme),
    ):
        stack.upload(folder, name, key)
    return Tenants(acme, globex)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> TinyZoo:
    """A tiny model, and PEFT over it."""
    return TinyZoo.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_stack(zoo: TinyZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that serves the tiny model of `zoo`. Tests make tenants of their own."""
    # Threads have little to share in so small a model, and on a busy machine wait for each other instead.
    settings = {"OMP_NUM_THREADS": "1", "LORAPLEX_GRPC_PORT": "0", "LORAPLEX_LEASE_S": "2"}
    stack = Stack(tmp_path_factory.mktemp("tiny-stack"), FLAGS, model=zoo.folder / "model", **settings)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
    stack.assert_calm()
