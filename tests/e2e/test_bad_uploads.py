"""Bad uploads to the real stack: each is refused by its fault's name; store and registry stay as they are."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from redis import Redis

from tests.e2e.conftest import Tenants
from tests.e2e.processes import Stack, adapters_command
from tests.gateway.control_plane import config_json, safetensors, tensor_shapes

pytestmark = pytest.mark.e2e

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# As in SmolLM2, whose q_proj and o_proj are square; two layers will do, and are told to be so.
SHAPES = tensor_shapes(layers=2, hidden=576)
FIRST = next(iter(SHAPES))
GOOD = {CONFIG: config_json(layers_to_transform=[0, 1]), WEIGHTS: safetensors(SHAPES)}
UNKNOWN = {
    CONFIG: config_json(target_modules=["q_proj", "w_proj"]),
    WEIGHTS: safetensors(tensor_shapes(hidden=576, modules=("q_proj", "w_proj"))),
}
PICKLED = pickle.dumps({"lora": [1.0]}, protocol=2)
BAD_FILES: dict[str, tuple[dict[str, bytes], str]] = {
    "truncated": (GOOD | {WEIGHTS: GOOD[WEIGHTS][:-100]}, "truncated"),
    "wrong shape": (GOOD | {WEIGHTS: safetensors({**SHAPES, FIRST: (4, 575)})}, re.escape(FIRST)),
    "a layer that the model has not": (
        {CONFIG: config_json(), WEIGHTS: safetensors(tensor_shapes(layers=31, hidden=576))},
        r"layers\.30",
    ),
    "unknown module": (UNKNOWN, "w_proj"),
    "pickle as weights": (GOOD | {WEIGHTS: PICKLED}, "no safetensors file"),
    "pickle by name": ({CONFIG: GOOD[CONFIG], "adapter_model.bin": PICKLED}, r"adapter_model\.bin"),
    "header of 1 GB": (GOOD | {WEIGHTS: struct.pack("<Q", 1 << 30) + b"{}"}, "header"),
    "path as a file's name": ({CONFIG: GOOD[CONFIG], f"../../{WEIGHTS}": GOOD[WEIGHTS]}, r"\.\./"),
}
BAD_NAMES = ("a/b", "..", "../sql", "sqł", "ѕql", "SQL", "sql@1", "", "a" * 64)


@pytest.fixture
def nothing_changes(stack: Stack, tenants: Tenants) -> Iterator[None]:
    """Compares every file of the store and every key of the registry before and after the test."""
    before = contents(stack)
    assert before[0] and before[1], "there is something that could be lost"
    yield
    assert contents(stack) == before


def contents(stack: Stack) -> tuple[dict[Path, bytes], dict[bytes, bytes]]:
    files = {path: path.read_bytes() for path in stack.store.rglob("*") if path.is_file()}
    with Redis.from_url(stack.redis_url) as redis:
        keys = {key: redis.dump(key) for key in redis.scan_iter("loraplex:{adapters}:*")}
    return files, keys  # type: ignore[return-value]


def post(stack: Stack, key: str, files: dict[str, bytes], name: str = "bad") -> httpx.Response:
    return httpx.post(
        f"{stack.url}/v1/adapters",
        headers={"Authorization": f"Bearer {key}"},
        data={"name": name},
        files=[("files", (file, content)) for file, content in files.items()],
        timeout=30,
    )


def assert_refused(answer: httpx.Response, fault: str) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(fault, f"{error['message']} {error['param']}"), error


@pytest.mark.usefixtures("nothing_changes")
def test_each_bad_file_is_refused_by_its_fault(stack: Stack, tenants: Tenants) -> None:
    for files, fault in BAD_FILES.values():
        assert_refused(post(stack, tenants.acme, files), fault)


@pytest.mark.usefixtures("nothing_changes")
def test_each_bad_name_is_refused(stack: Stack, tenants: Tenants) -> None:
    for name in BAD_NAMES:
        answer = post(stack, tenants.acme, GOOD, name)
        assert_refused(answer, "name")
        assert answer.json()["error"]["param"] == "name"


@pytest.mark.usefixtures("nothing_changes")
def test_the_command_says_the_same_and_exits_so(stack: Stack, tenants: Tenants, tmp_path: Path) -> None:
    for name, (files, _) in BAD_FILES.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / Path(file).name).write_bytes(content)
    (tmp_path / "good").mkdir()
    for file, content in GOOD.items():
        (tmp_path / "good" / file).write_bytes(content)
    faults = {name: fault for name, (_, fault) in BAD_FILES.items() if not name.startswith("path")}
    calls = [(name, "bad", 1, fault) for name, fault in faults.items()]
    calls += [("good", name, 2, "name") for name in ("a/b", "..", "sqł")]

    def check(call: tuple[str, str, int, str]) -> None:
        folder, name, status, fault = call
        done = adapters_command(
            "upload", str(tmp_path / folder), "--name", name, url=stack.url, key=tenants.acme
        )
        assert done.returncode == status, (folder, done)
        assert re.search(fault, done.stderr), (folder, done)
        assert len(done.stderr.splitlines()) == 1, done.stderr

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, calls))


def test_what_was_bad_with_one_fault_is_taken_without_it(stack: Stack) -> None:
    """The tests above fail for the fault alone."""
    key = stack.create_tenant("umbrella")
    made = post(stack, key, GOOD)
    assert made.status_code == 201, made.text
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.delete(f"{stack.url}/v1/adapters/bad", headers=headers).status_code == 200
