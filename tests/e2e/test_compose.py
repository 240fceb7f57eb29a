"""docker-compose.yml cannot rot: its services run here as local processes, as the file says.

Each service's own command runs with its own environment and health check, in the order of its dependencies;
only what containers give is replaced: host names become 127.0.0.1, ports free ones, volumes folders.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from engine.settings import EngineSettings, variable_of
from examples.smollm2 import gguf_file
from gateway.settings import GatewaySettings
from gateway.stack import valkey_argv
from tests.ports import reserve_port

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PORTS = {"redis": "6379", "gateway": "8000", "engine": "50051"}
OPERATOR_KEY = "operator-key-of-this-test"
OWN_SETTINGS = "loraplex.env"
START_LIMIT_S = 120


def substituted(text: str, environment: Mapping[str, str]) -> str:
    """Compose's own `${NAME:-default}`."""
    return re.sub(
        r"\$\{(\w+)(?::-([^}]*))?\}", lambda match: environment.get(match[1]) or match[2] or "", text
    )


def env_files(service: str) -> list[str]:
    """The paths of a service's files of variables, of which later ones win."""
    return [entry["path"] for entry in SERVICES[service].get("env_file", [])]


def variables_in(text: str) -> dict[str, str]:
    """What such a file sets."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def image_variables(service: str) -> dict[str, str]:
    """What the image of a service sets for its processes."""
    if "build" not in SERVICES[service]:
        return {}
    text = (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text()
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)", text, re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", block))


@dataclass
class LocalCompose:
    """The services as processes, with what replaces the containers' world."""

    folder: Path
    given: Mapping[str, str]
    ports: dict[str, str] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def local(self, text: str) -> str:
        """A word of the compose file as it must read outside of containers."""
        text = substituted(text, self.given)
        for service, port in PORTS.items():
            text = re.sub(rf"\b{port}\b", self.ports[service], text)
            text = re.sub(rf"\b{service}:(?=\d)", "127.0.0.1:", text)
        return text.replace("0.0.0.0", "127.0.0.1").replace("/var/lib/loraplex", str(self.folder))

    def environment(self, service: str) -> dict[str, str]:
        """What the service's process sees."""
        named = image_variables(service)
        for name in env_files(service):
            file = self.folder / name if name == OWN_SETTINGS else ROOT / name
            named |= variables_in(file.read_text()) if file.exists() else {}
        named |= SERVICES[service].get("environment", {})
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        shared = {"PATH": path, "HOME": str(self.folder), "OMP_NUM_THREADS": "2"}
        return {**shared, **{name: self.local(value) for name, value in named.items()}}

    def command(self, words: list[str]) -> list[str]:
        """A command of the file; Valkey's programs come from the wheel, which has only the server."""
        local = [self.local(word) for word in words]
        if local[0] == "valkey-server":
            return [*valkey_argv(int(self.ports["redis"]), self.folder / "redis"), *local[1:]]
        if local[0] == "valkey-cli":
            ping = "import redis, sys; redis.Redis(port=int(sys.argv[1])).ping()"
            return [sys.executable, "-c", ping, self.ports["redis"]]
        return local

    async def start(self, service: str) -> None:
        """Starts a service and waits until its own health check says that it is healthy."""
        log = (self.folder / f"{service}.log").open("wb")
        self.processes[service] = process = await asyncio.create_subprocess_exec(
            *self.command(SERVICES[service]["command"]),
            env=self.environment(service),
            cwd=self.folder,
            stdout=log,
            stderr=log,
        )
        log.close()
        deadline = time.monotonic() + START_LIMIT_S
        while not await self._healthy(service):
            text = (self.folder / f"{service}.log").read_text()
            assert process.returncode is None, f"{service} ended with {process.returncode}:\n{text}"
            assert time.monotonic() < deadline, f"{service} is not healthy:\n{text}"
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """Ends all services, the last started first."""
        for process in reversed(self.processes.values()):
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 20)
                except TimeoutError:
                    process.kill()
                    await process.wait()

    async def _healthy(self, service: str) -> bool:
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        check = await asyncio.create_subprocess_exec(
            *self.command(words),
            env=self.environment(service),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await check.wait() == 0


def start_order(wanted: set[str]) -> list[str]:
    """The services, each after those that it depends on."""
    order: list[str] = []

    def add(service: str) -> None:
        for name, dependency in SERVICES[service].get("depends_on", {}).items():
            assert dependency["condition"] == "service_healthy"
            if name in wanted:
                add(name)
        if service not in order:
            order.append(service)

    for service in sorted(wanted):
        add(service)
    return order


@asynccontextmanager
async def compose_up(folder: Path, **given: str) -> AsyncIterator[LocalCompose]:
    stack = LocalCompose(folder, given, {service: str(reserve_port()) for service in PORTS})
    try:
        for service in start_order(set(PORTS)):
            await stack.start(service)
        yield stack
    finally:
        await stack.stop()


@pytest.mark.e2e
async def test_the_services_of_the_compose_file_answer_a_tenant(tmp_path: Path) -> None:
    given = {"LORAPLEX_ENGINE_MODEL": str(gguf_file()), "LORAPLEX_OPERATOR_KEY": "what-the-shell-has-left"}
    settings = (
        f"LORAPLEX_OPERATOR_KEY={OPERATOR_KEY}",
        "LORAPLEX_MAX_ADAPTER_BYTES=1048576",
        "LORAPLEX_ENGINE_SERVED_MODEL_NAME=a-name-of-its-own",
    )
    (tmp_path / OWN_SETTINGS).write_text("\n".join(settings) + "\n")
    async with compose_up(tmp_path, **given) as stack:
        url = f"http://127.0.0.1:{stack.ports['gateway']}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            operator = {"Authorization": f"Bearer {OPERATOR_KEY}"}
            await client.post("/admin/tenants", headers=operator, json={"id": "acme", "name": "Acme"})
            key = (await client.post("/admin/tenants/acme/keys", headers=operator, json={})).json()["key"]
            headers = {"Authorization": f"Bearer {key}"}
            [model] = (await client.get("/v1/models", headers=headers)).json()["data"]
            assert model["id"] == "a-name-of-its-own"
            large = {"files": ("adapter_model.safetensors", bytes(1048577))}
            refused = await client.post("/v1/adapters", headers=headers, data={"name": "large"}, files=large)
            assert refused.status_code == 413, refused.text
            body = {"model": model["id"], "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", headers=headers, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert answer.json()["choices"][0]["text"].strip()


def test_every_variable_that_a_service_is_given_is_a_setting_of_it() -> None:
    engine = {variable_of(field) for field in EngineSettings.model_fields}
    gateway = {f"LORAPLEX_{field.upper()}" for field in GatewaySettings.model_fields}
    for service, known in (("gateway", gateway), ("engine", engine), ("engine-gpu", engine)):
        (tracked, _) = env_files(service)
        given = {*SERVICES[service].get("environment", {}), *variables_in((ROOT / tracked).read_text())}
        for name in given:
            assert not name.startswith("LORAPLEX_") or name in known, (service, name)


def test_a_file_that_git_does_not_keep_may_hold_any_setting_but_hosts_and_ports() -> None:
    for service in ("gateway", "engine", "engine-gpu"):
        assert SERVICES[service]["env_file"][-1] == {"path": OWN_SETTINGS, "required": False}
        # What stands in `environment` and in flags wins over the file.
        fixed = {*SERVICES[service].get("environment", {})}
        flags = [word.partition("=")[0] for word in SERVICES[service]["command"] if word.startswith("-")]
        assert fixed == ({"LORAPLEX_HOST", "LORAPLEX_PORT"} if service == "gateway" else set())
        assert flags == ([] if service == "gateway" else ["--host", "--port", "--advertise"])
    assert f"/{OWN_SETTINGS}" in (ROOT / ".gitignore").read_text().splitlines()
    assert not [name for name in variables_in((ROOT / ".env").read_text()) if name != "COMPOSE_PROFILES"]


def test_the_gpu_engine_is_the_cpu_engine_on_a_gpu() -> None:
    cpu, gpu = SERVICES["engine"], SERVICES["engine-gpu"]
    assert [word.replace("engine-gpu", "engine") for word in gpu["command"]] == cpu["command"]
    assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
    for part in ("env_file", "volumes", "healthcheck", "depends_on"):
        assert cpu[part] == gpu[part]


def test_nothing_secret_is_in_the_files_and_every_mount_is_a_volume() -> None:
    for name, service in SERVICES.items():
        given = dict(service.get("environment", {}))
        for file in env_files(name):
            given |= variables_in((ROOT / file).read_text()) if file != OWN_SETTINGS else {}
        for variable, value in given.items():
            if "KEY" in variable or "TOKEN" in variable:
                assert value == f"${{{variable}:-}}"
        for mount in service["volumes"]:
            assert mount.split(":")[0] in COMPOSE["volumes"]
        assert service["healthcheck"]["test"]


def test_the_images_run_without_root_and_the_gateways_has_no_torch() -> None:
    for service in ("gateway", "engine"):
        lines = (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text().splitlines()
        assert "USER loraplex" in lines
        text = "\n".join(line for line in lines if not line.startswith("#"))
        assert ("torch" in text) == (service == "engine")
        for source in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
            assert (ROOT / source).exists()


def test_whatever_is_kept_in_a_container_has_a_folder_that_its_user_may_write_to() -> None:
    engine = {variable_of(name): field for name, field in EngineSettings.model_fields.items()}
    gateway = {f"LORAPLEX_{name.upper()}": field for name, field in GatewaySettings.model_fields.items()}
    for service, settings in (("gateway", gateway), ("engine", engine)):
        text = (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text()
        (made,) = re.findall(r"install -d -o loraplex -g loraplex (.*)", text)
        set_to = image_variables(service)
        assert {name for name in set_to if name.startswith("LORAPLEX_")} == {
            name for name, each in settings.items() if str(each.default).startswith("var/")
        }
        assert set(set_to.values()) <= set(made.split())


def test_the_images_see_all_that_they_are_built_from() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    built_from = ("adapters", "engine", "gateway", "kernels", "protos")
    for name in (*built_from, "pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
        assert f"!{name}" in ignored
        assert (ROOT / name).exists()
    assert "*" in ignored and f"!{OWN_SETTINGS}" not in ignored
