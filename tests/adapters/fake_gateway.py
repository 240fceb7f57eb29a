"""A real HTTP server that speaks the adapters API as documented, and remembers what it was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

KEY = "lpx_abc_secret"


@dataclass
class FakeGateway:
    """One tenant's adapters. `answer`, when set, is what every upload gets instead; of `refusals` each call
    takes one, or None.
    """

    adapters: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    announced: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    received: int = 0
    discard: bool = False
    answer: Response | None = None
    refusal_to_begin: Response | None = None
    refusals: list[Response | None] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def authenticate(request: Request, call_next: Any) -> Response:
            self.requests.append(f"{request.method} {request.url.path}")
            if request.headers.get("authorization") != f"Bearer {KEY}":
                return _error(401, "The API key is not valid.")
            refused = self.refusals.pop(0) if self.refusals else None
            return refused or await call_next(request)

        @app.post("/v1/adapter-uploads")
        async def begin(request: Request) -> Response:
            self.announced = await request.json()
            return self.refusal_to_begin or JSONResponse(self._session(), 201)

        @app.get("/v1/adapter-uploads/{upload_id}")
        def show_upload(upload_id: str) -> dict[str, Any]:
            return self._session()

        @app.patch("/v1/adapter-uploads/{upload_id}/{file}")
        async def append(upload_id: str, file: str, request: Request) -> Response:
            return await self._append(file, request)

        @app.post("/v1/adapter-uploads/{upload_id}/complete")
        def complete(upload_id: str) -> Response:
            return self.answer or JSONResponse(self._add(self.announced["name"]), 201)

        @app.get("/v1/adapter-base")
        def show_base() -> dict[str, Any]:
            return self.base

        @app.post("/v1/adapter-pulls")
        async def pull(request: Request) -> Response:
            self.announced = await request.json()
            return self.answer or JSONResponse(self._add(self.announced["name"]), 201)

        @app.get("/v1/adapters")
        def show_all() -> dict[str, Any]:
            return {"object": "list", "data": [self._meaning(name) for name in self.adapters]}

        @app.get("/v1/adapters/{name}")
        def show(name: str) -> Response:
            if name not in self.adapters:
                return _error(404, f"There is no adapter '{name}'.")
            state = {
                "tier": "device",
                "pinned": True,
                "hits": 5,
                "requests": {"device": 4, "host": 1, "none": 2},
                "loads": 2,
                "load_seconds": 0.02,
                "evictions": 1,
            }
            more = {"versions": self.adapters[name], "grants": [], "engines": {"engine-1": state}}
            return JSONResponse(self._meaning(name) | more)

        @app.delete("/v1/adapters/{name}")
        def delete(name: str) -> Response:
            if self.adapters.pop(name, None) is None:
                return _error(404, f"There is no adapter '{name}'.")
            return JSONResponse({"id": name, "object": "adapter.deleted", "deleted": True})

        return app

    @property
    def options(self) -> dict[str, Any]:
        """What the last upload asked for beside its files."""
        return {key: value for key, value in self.announced.items() if key != "files"}

    def _session(self) -> dict[str, Any]:
        files = [
            {"name": file["name"], "bytes": file["bytes"], "offset": len(self.files.get(file["name"], b""))}
            for file in self.announced["files"]
        ]
        return {"id": "0" * 32, "object": "adapter.upload", "status": "open", "files": files}

    async def _append(self, file: str, request: Request) -> Response:
        content = bytearray()
        async for chunk in request.stream():
            self.received += len(chunk)
            if not self.discard:
                content += chunk
        self.files[file] = bytes(content)
        return JSONResponse({"offset": self.received})

    def _add(self, name: str) -> dict[str, Any]:
        versions = self.adapters.setdefault(name, [])
        versions.append(
            {
                "id": f"{name}@{len(versions) + 1}",
                "object": "adapter",
                "name": name,
                "version": len(versions) + 1,
                "digest": "ab" * 32,
                "rank": 4,
                "bytes": 123_456,
                "target_modules": ["q_proj", "down_proj"],
                "base_model": "base/model",
                "created": 1_700_000_000,
            }
        )
        return versions[-1]

    def _meaning(self, name: str) -> dict[str, Any]:
        newest = self.adapters[name][-1]
        return newest | {"live": newest["version"], "canary": None, "pinned": False}


def refusal(status: int, message: str, *, code: str | None = None) -> Response:
    return _error(status, message, code)


def plain(status: int, text: str) -> Response:
    return PlainTextResponse(text, status)


@contextmanager
def serve(gateway: FakeGateway) -> Iterator[FakeGateway]:
    """Serves on a free port of 127.0.0.1 in a thread, and fills in `url`."""
    config = uvicorn.Config(
        gateway.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    gateway.url = f"http://{host}:{port}"
    try:
        yield gateway
    finally:
        server.should_exit = True
        thread.join()


def _error(status: int, message: str, code: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)
