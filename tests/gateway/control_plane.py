"""A gateway without engines, for tests: real HTTP on a real socket, real Valkey, a real store."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from redis.asyncio import Redis

from adapters.blob_store import open_store, read_file
from adapters.collector import collect
from adapters.file_store import open_files
from adapters.registry import Registry
from gateway.accounts.calls import CallLimits
from gateway.api import (
    adapter_aliases,
    adapter_base,
    adapter_contents,
    adapter_grants,
    admin_audit,
    admin_keys,
    admin_tenants,
    admin_usage,
    batches,
    files,
    pulls,
    uploads,
    usage,
)
from gateway.api import adapters as adapters_api
from gateway.audit import Audit
from gateway.auth import Authenticator
from gateway.batches.files import Files
from gateway.batches.store import Batches
from gateway.errors import ErrorBoundary, install_error_handling
from gateway.hub import Hub
from gateway.keys import Keys
from gateway.metrics import Metrics
from gateway.own_tokenizers import OwnTokenizers
from gateway.prices import load_prices
from gateway.redis_client import connect
from gateway.redis_health import RedisHealth
from gateway.services import Services
from gateway.settings import GatewaySettings
from gateway.tenant_slots import download_slots, upload_slots
from gateway.tenants import Tenants
from gateway.tokenizer import Tokenizers
from gateway.upload_sessions import UploadSessions
from gateway.upload_transfers import UploadTransfers
from gateway.usage import UsageReader
from protos.engine_pb2 import LinearModule, ModelInfo

OPERATOR_KEY = "operator-key-of-the-tests-own"


def model_info(*, layers: int = 2, hidden: int = 32, max_lora_rank: int = 64) -> ModelInfo:
    """A small base model with two square projections a layer."""
    modules = [
        LinearModule(name=name, in_features=hidden, out_features=hidden) for name in ("q_proj", "o_proj")
    ]
    return ModelInfo(
        name="base", digest=bytes(32), num_layers=layers, modules=modules, max_lora_rank=max_lora_rank
    )


@dataclass
class Engines:
    """Stands for the fleet: what the model is, and what engines were told to forget."""

    info: ModelInfo | None = field(default_factory=model_info)
    unloaded: list[bytes] = field(default_factory=list)

    def model_info(self, name: str | None = None) -> ModelInfo | None:
        return self.info if name is None or (self.info and self.info.name == name) else None

    def residency(self, digest_hex: str) -> dict[str, str]:
        return {"engine-1": "device"}

    async def adapter_states(self, digest: bytes) -> dict[str, dict[str, Any]]:
        counts = {"hits": 3, "loads": 2, "evictions": 1, "load_seconds": 0.25}
        requests = {"device": 2, "host": 1, "none": 1}
        return {"engine-1": {"tier": "device", "pinned": False, "requests": requests, **counts}}

    async def unload(self, digest: bytes) -> None:
        self.unloaded.append(digest)


@dataclass
class ControlPlane:
    """What a test holds of the running gateway."""

    url: str
    client: httpx.AsyncClient
    services: Services
    engines: Engines
    store: Path

    async def tenant(self, tenant_id: str, *scopes: str) -> dict[str, str]:
        """Makes a tenant, unless it is there, and a key. Returns the headers that hold the key."""
        await self.admin("POST", "/tenants", {"id": tenant_id, "name": tenant_id.title()})
        answer = await self.admin("POST", f"/tenants/{tenant_id}/keys", {"scopes": scopes} if scopes else {})
        return {"Authorization": f"Bearer {answer.json()['key']}"}

    async def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        return await self.client.request(method, f"/admin{path}", json=body, headers=headers)

    async def refusal(self, headers: Mapping[str, str]) -> httpx.Response:
        """What a key gets that is taken no more. Redis' news of that may come just behind its answer to who
        asked for it, so the key is tried for about a second.
        """
        for _ in range(100):
            answer = await self.client.get("/v1/adapters", headers=headers)
            if answer.status_code != 200:
                break
            await asyncio.sleep(0.01)
        return answer

    async def upload(
        self, headers: Mapping[str, str], files: Mapping[str, bytes], *, name: str = "sql", **fields: str
    ) -> httpx.Response:
        parts = [("files", (file, content)) for file, content in files.items()]
        return await self.client.post(
            "/v1/adapters", headers=headers, data={"name": name, **fields}, files=parts
        )

    async def collect(self) -> None:
        """Removes the blobs that nobody refers to, as the gateway does after their grace."""
        await collect(self.services.registry, self.services.store, grace_s=0)

    def blobs(self) -> list[str]:
        """The digests in the store."""
        return sorted(path.name for path in (self.store / "sha256").glob("*/*"))

    def leftovers(self) -> list[Path]:
        """What lies in the store beside its blobs."""
        return [*(self.store / "staging").iterdir(), *(self.store / "trash").iterdir()]


@asynccontextmanager
async def control_plane(
    valkey_url: str, folder: Path, *, hub: Hub | None = None, **settings: Any
) -> AsyncIterator[ControlPlane]:
    """Serves the admin and the adapters API on a free port; the store is a folder unless told otherwise."""
    config = GatewaySettings(
        redis_url=valkey_url,
        operator_key=SecretStr(OPERATOR_KEY),
        **{"store": str(folder / "store"), "store_cache": folder / "cache", **settings},
    )
    engines = Engines()
    async with connect(valkey_url) as redis:
        services = _services(config, redis, engines, hub)
        await services.authenticator.start()
        app = FastAPI()
        install_error_handling(app)
        app.add_middleware(ErrorBoundary)
        for module in (
            admin_tenants,
            admin_keys,
            admin_audit,
            admin_usage,
            adapters_api,
            uploads,
            pulls,
            adapter_aliases,
            adapter_base,
            adapter_contents,
            adapter_grants,
            usage,
            files,
            batches,
        ):
            app.include_router(module.router)
        app.state.services = services
        try:
            async with _serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
                yield ControlPlane(url, client, services, engines, Path(config.store))
        finally:
            await services.authenticator.close()


def _services(config: GatewaySettings, redis: Redis, engines: Engines, hub: Hub | None) -> Services:
    tenants, keys = Tenants(redis), Keys(redis)
    health = RedisHealth(redis)
    authenticator = Authenticator(
        redis,
        health,
        operator_key=config.operator_key,
        cache_s=config.auth_cache_s,
        grace_s=config.auth_grace_s,
    )
    store = open_store(config.store, config.store_cache)
    metrics = Metrics()
    # Only what these two APIs use: they must not come to need the rest.
    used = SimpleNamespace(
        settings=config,
        redis=redis,
        authenticator=authenticator,
        tenants=tenants,
        keys=keys,
        audit=Audit(redis),
        registry=Registry(redis),
        store=store,
        engines=engines,
        own_tokenizers=OwnTokenizers(Tokenizers(), partial(read_file, store)),
        hub=hub,
        usage=UsageReader(redis),
        metrics=metrics,
        calls=CallLimits(redis, health, metrics.rejected),
        prices=load_prices(config.prices) if config.prices else None,
        upload_slots=upload_slots(config.uploads_per_tenant),
        download_slots=download_slots(),
        upload_sessions=UploadSessions(store.scratch, config.uploads_per_tenant),
        upload_transfers=UploadTransfers(),
        file_store=open_files(config.store, store),
        files=Files(redis),
        batches=Batches(redis, lease_s=config.lease_s),
    )
    return cast(Services, used)


@asynccontextmanager
async def _serving(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


# ---- adapters in PEFT's format, written by hand -------------------------------------------------------


def config_json(**changes: Any) -> bytes:
    """An adapter_config.json as PEFT writes it, for the base model above."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj"],
        "bias": "none",
        **changes,
    }
    return json.dumps(config).encode()


def tensor_shapes(
    *, layers: int = 2, hidden: int = 32, rank: int = 4, modules: Sequence[str] = ("q_proj", "o_proj")
) -> dict[str, tuple[int, int]]:
    """The tensors' names and shapes that fit `model_info`."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        for module in modules:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes[f"{prefix}.lora_A.weight"] = (rank, hidden)
            shapes[f"{prefix}.lora_B.weight"] = (hidden, rank)
    return shapes


def safetensors_header(shapes: Mapping[str, tuple[int, int]]) -> bytes:
    """The length and header of a safetensors file of float32 tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


def safetensors(shapes: Mapping[str, tuple[int, int]], *, seed: int = 0) -> bytes:
    """A safetensors file of float32 tensors of small random values."""
    count = sum(rows * columns for rows, columns in shapes.values())
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype("<f4")
    return safetensors_header(shapes) + values.tobytes()


def adapter_files(*, seed: int = 0, **config: Any) -> dict[str, bytes]:
    """The two files of an adapter that is right."""
    return {
        "adapter_config.json": config_json(**config),
        "adapter_model.safetensors": safetensors(tensor_shapes(), seed=seed),
    }
