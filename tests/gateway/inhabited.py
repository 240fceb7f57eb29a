"""A stack in which all that a path can name is there: tenants, keys, adapters, an upload that is open."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from redis import Redis

from gateway.batches.files import new_file
from gateway.services import Services
from tests.gateway.control_plane import config_json, safetensors, tensor_shapes
from tests.gateway.local_stack import LocalStack

OPERATOR_KEY = "operator-key-of-the-tests-own"
OPERATOR = {"authorization": f"Bearer {OPERATOR_KEY}"}
TENANT, OTHER_TENANT, ADAPTER = "acme", "globex", "sql"
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": ADAPTER, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def adapter_files(seed: int) -> dict[str, bytes]:
    """The files of an adapter that fits the fake engine's model."""
    shapes = tensor_shapes(hidden=8, modules=("q_proj",))
    return {
        "adapter_config.json": config_json(target_modules=["q_proj"]),
        "adapter_model.safetensors": safetensors(shapes, seed=seed),
    }


@dataclass
class Inhabitants:
    """Makes what is missing again, however much of it a test has destroyed."""

    stack: LocalStack
    key: str = "none yet"
    spare_key_id: str = ""
    upload_id: str = ""
    file_id: str = "file-5f0c6a1be2d34f7a9c8b7d6e"  # the one that examples name
    batch_id: str = ""

    def settle(self) -> None:
        """Sees to it that all of it is there."""
        with httpx.Client(base_url=self.stack.url, timeout=30) as client:
            for tenant in (TENANT, OTHER_TENANT):
                self._settle_tenant(client, tenant)
            own = {"authorization": f"Bearer {self.key}"}
            if client.get("/v1/adapters", headers=own).status_code != 200:
                self.key = self._new_key(client)["key"]
                own = {"authorization": f"Bearer {self.key}"}
            keys = client.get(f"/admin/tenants/{TENANT}/keys", headers=OPERATOR).json()["data"]
            if self.spare_key_id not in [key["id"] for key in keys]:
                self.spare_key_id = self._new_key(client)["id"]
            if client.get(f"/v1/adapters/{ADAPTER}/diff?from=1&to=2", headers=own).status_code != 200:
                self._settle_adapter(client, own)
            if client.get(f"/v1/adapter-uploads/{self.upload_id}", headers=own).status_code != 200:
                self.upload_id = self._open_upload(client, own)
            if client.get(f"/v1/files/{self.file_id}/content", headers=own).status_code != 200:
                self._settle_file()
            if client.get(f"/v1/batches/{self.batch_id}", headers=own).status_code != 200:
                self.batch_id = self._new_batch(client, own)

    def headers(self, path: str) -> dict[str, str]:
        """The headers that hold the key of whoever uses this path."""
        key = OPERATOR_KEY if path.startswith("/admin") else self.key
        return {"authorization": f"Bearer {key}"}

    def known(self, parameter: str) -> Any:
        """Something that is there, for a path's parameter."""
        return {
            "name": ADAPTER,
            "tenant": OTHER_TENANT,
            "tenant_id": TENANT,
            "key_id": self.spare_key_id,
            "upload_id": self.upload_id,
            "file_name": "adapter_model.safetensors",
            "file": "adapter_config.json",
            "file_id": self.file_id,
            "batch_id": self.batch_id,
        }.get(parameter)

    def _settle_tenant(self, client: httpx.Client, tenant: str) -> None:
        found = client.get(f"/admin/tenants/{tenant}", headers=OPERATOR).json()
        if "error" in found:
            with Redis.from_url(self.stack.redis_url) as redis:  # a deleted tenant's id is not given again
                redis.srem("loraplex:tenants:retired", tenant)
            client.post("/admin/tenants", json={"id": tenant, "name": tenant}, headers=OPERATOR)
        elif found["suspended"] or found["base_models"] is not None or any(found["limits"].values()):
            free = {"suspended": False, "base_models": None, "limits": None}
            client.patch(f"/admin/tenants/{tenant}", json=free, headers=OPERATOR)

    def _settle_adapter(self, client: httpx.Client, own: dict[str, str]) -> None:
        client.delete(f"/v1/adapters/{ADAPTER}", headers=own)
        for seed in (1, 2):
            parts = [("files", item) for item in adapter_files(seed).items()]
            answer = client.post("/v1/adapters", data={"name": ADAPTER}, files=parts, headers=own)
            assert answer.status_code == 201, answer.text

    def _new_key(self, client: httpx.Client) -> dict[str, Any]:
        answer = client.post(f"/admin/tenants/{TENANT}/keys", json={}, headers=OPERATOR)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def _open_upload(self, client: httpx.Client, own: dict[str, str]) -> str:
        files = [
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in adapter_files(3).items()
        ]
        answer = client.post("/v1/adapter-uploads", json={"name": "open", "files": files}, headers=own)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def _settle_file(self) -> None:
        """Puts a file there by the id that it must have, which no client can choose."""
        services: Services = self.stack.app.state.services
        content = json.dumps(LINE).encode()
        made = replace(new_file(TENANT, "in.jsonl", "batch", len(content)), id=self.file_id)

        async def add() -> None:
            with TemporaryDirectory() as folder:
                source = Path(folder) / "source"
                source.write_bytes(content)
                services.file_store.put(made.name, source)
            await services.files.add(made, most_bytes=None)

        self.stack.call(add())

    def _new_batch(self, client: httpx.Client, own: dict[str, str]) -> str:
        body = {"input_file_id": self.file_id, "endpoint": LINE["url"], "completion_window": "24h"}
        answer = client.post("/v1/batches", json=body, headers=own)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]
