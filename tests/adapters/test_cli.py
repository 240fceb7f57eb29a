"""The `adapters` command against a real HTTP server: what it sends, prints and exits with."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.cli import main
from adapters.client import AdaptersClient, ClientError, Exit
from tests.adapters.fake_gateway import KEY, FakeGateway, plain, refusal, serve
from tests.adapters.files import config, write_adapter


@dataclass
class Result:
    exit_code: int
    out: str
    err: str


class Run(Protocol):
    def __call__(self, *arguments: str | Path) -> Result: ...


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Result:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(int(ended.value.code or 0), out, err)

    return call


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with serve(FakeGateway()) as served:
        monkeypatch.setenv("LORAPLEX_URL", served.url)
        monkeypatch.setenv("LORAPLEX_API_KEY", KEY)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


def test_uploads_the_two_files_and_says_what_became_of_them(
    gateway: FakeGateway, folder: Path, run: Run
) -> None:
    (folder / "README.md").write_text("PEFT writes one")
    result = run("upload", folder, "--name", "sql")
    assert (result.exit_code, result.err) == (0, "")
    assert result.out == "sql@1: rank 4, 123.5 kB, on q_proj, down_proj\n"
    assert gateway.files == {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
    assert gateway.options == {"name": "sql", "allow_zero": False, "promote": True}


def test_allow_zero_is_passed_on(gateway: FakeGateway, folder: Path, run: Run) -> None:
    assert run("upload", folder, "--name", "sql", "--allow-zero").exit_code == 0
    assert gateway.options["allow_zero"] is True


def test_an_upload_may_be_staged(gateway: FakeGateway, folder: Path, run: Run) -> None:
    result = run("upload", folder, "--name", "sql", "--no-promote")
    assert result.exit_code == 0 and gateway.options["promote"] is False
    assert result.out.endswith("not live yet; make it so with: adapters promote sql 1\n")


def test_options_win_over_the_environment(
    gateway: FakeGateway, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("LORAPLEX_API_KEY", "wrong")
    assert run("list", "--url", gateway.url + "/v1/", "--api-key", KEY).exit_code == 0


def test_json_is_what_the_server_said(gateway: FakeGateway, folder: Path, run: Run) -> None:
    uploaded = run("upload", folder, "--name", "sql", "--json")
    assert json.loads(uploaded.out) == gateway.adapters["sql"][0] and uploaded.err == ""
    assert json.loads(run("list", "--json").out)["data"][0].items() >= gateway.adapters["sql"][0].items()
    assert json.loads(run("show", "sql", "--json").out)["versions"] == gateway.adapters["sql"]
    deleted = run("delete", "sql", "--yes", "--json")
    assert json.loads(deleted.out) == {"id": "sql", "object": "adapter.deleted", "deleted": True}


def test_lists_and_shows(gateway: FakeGateway, folder: Path, run: Run) -> None:
    assert "no adapters" in run("list").out
    run("upload", folder, "--name", "sql")
    run("upload", folder, "--name", "sql")
    run("upload", folder, "--name", "pirate")
    listed = run("list")
    assert listed.exit_code == 0
    assert re.findall(r"^\S+@\d", listed.out, re.MULTILINE) == ["sql@2", "pirate@1"]
    shown = run("show", "sql")
    assert shown.out.startswith(f"sql@2  sha256:{'ab' * 32}\nsql means sql@2\n")
    assert re.findall(r"^sql@\d", shown.out, re.MULTILINE) == ["sql@2", "sql@1", "sql@2"]
    assert "2023-11-14" in shown.out and shown.out.endswith(
        "on engine-1: device, pinned; requests that found it on the device: 4, in host memory: 1, "
        "in neither: 2; loads: 2, the last in 0.020 s; "
        "evictions: 1\n"
    )


def test_delete_asks_first(
    gateway: FakeGateway, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("upload", folder, "--name", "sql")
    for answer, exit_code, left in (("n\n", 1, {"sql"}), ("y\n", 0, set())):
        reader, writer = os.pipe()
        os.write(writer, answer.encode())
        os.close(writer)
        with os.fdopen(reader) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            result = run("delete", "sql")
        assert "with all its versions?" in result.err
        assert (result.exit_code, gateway.adapters.keys()) == (exit_code, left)


def test_a_key_that_is_not_accepted_is_exit_4_before_files_are_sent(
    gateway: FakeGateway, folder: Path, run: Run
) -> None:
    result = run("upload", folder, "--name", "sql", "--api-key", "wrong")
    assert (result.exit_code, result.out, result.err) == (4, "", "error: The API key is not valid.\n")
    assert gateway.requests == ["GET /v1/adapters"]


def test_no_such_adapter_is_exit_5(gateway: FakeGateway, run: Run) -> None:
    for arguments in (("show", "nope"), ("delete", "nope", "-y")):
        result = run(*arguments)
        assert (result.exit_code, result.err) == (5, "error: There is no adapter 'nope'.\n")


@pytest.mark.parametrize("status", [400, 409, 413, 422, 429, 500, 503])
def test_a_refusal_is_exit_1_with_the_servers_words(
    gateway: FakeGateway, folder: Path, run: Run, status: int
) -> None:
    gateway.answer = refusal(status, "The tensor 'x' holds NaN.")
    result = run("upload", folder, "--name", "sql")
    assert (result.exit_code, result.out, result.err) == (1, "", "error: The tensor 'x' holds NaN.\n")


@pytest.mark.parametrize("status", [404, 409])
def test_an_upload_that_cannot_begin_is_refused_with_the_servers_words(
    gateway: FakeGateway, folder: Path, run: Run, status: int
) -> None:
    gateway.refusal_to_begin = refusal(status, "There is no route POST /v1/adapter-uploads.")
    result = run("upload", folder, "--name", "sql")
    assert result.err == "error: There is no route POST /v1/adapter-uploads.\n"
    assert result.exit_code == (5 if status == 404 else 1)


def test_what_no_key_may_do_is_no_fault_of_the_key(gateway: FakeGateway, run: Run) -> None:
    for code, exit_code in (("pull_not_allowed", 1), ("missing_scope", 4)):
        gateway.answer = refusal(403, "Not here.", code=code)
        result = run("pull", "hf:acme/lora", "--name", "sql")
        assert (result.exit_code, result.err) == (exit_code, "error: Not here.\n")


def test_an_answer_of_something_else(gateway: FakeGateway, folder: Path, run: Run) -> None:
    gateway.answer = plain(502, "<html>Bad gateway</html>")
    result = run("upload", folder, "--name", "sql")
    assert (result.exit_code, result.err) == (
        1,
        "error: The server answered 502 Bad Gateway without a reason.\n",
    )
    gateway.answer = plain(200, "hello")
    assert "not a Loraplex gateway" in run("upload", folder, "--name", "sql").err


def test_a_server_that_is_not_there_is_exit_3(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = run("list", "--url", url, "--api-key", KEY)
    assert result.exit_code == 3 and result.err.startswith(f"error: Cannot reach the server at {url}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("upload",),
        ("upload", "/nowhere", "--name", "sql"),
        ("list", "--api-key", ""),
        ("list", "--api-key", "k", "--url", "localhost:8000"),
        ("list", "--api-key", "k", "--url", "ftp://x"),
        ("list", "--api-key", "k", "--url", "http://x:port"),
        ("list", "--api-key", "schlüssel", "--url", "http://127.0.0.1:1"),
        ("show", "../etc"),
        ("delete", "a/b", "-y"),
        ("show", "SQL"),
    ],
)
def test_wrong_usage_is_exit_2(run: Run, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.err or not arguments


def test_a_bad_name_sends_nothing(gateway: FakeGateway, folder: Path, run: Run) -> None:
    assert run("upload", folder, "--name", "../x").exit_code == 2
    assert gateway.requests == []


@pytest.mark.parametrize("verb", ["grant", "revoke"])
@pytest.mark.parametrize("tenant", ["..", ".", "", "acme/sql"])
def test_a_tenant_that_makes_another_path_sends_nothing(
    gateway: FakeGateway, folder: Path, run: Run, verb: str, tenant: str
) -> None:
    run("upload", folder, "--name", "sql")
    gateway.requests.clear()
    result = run(verb, "sql", tenant)
    assert (result.exit_code, result.out) == (2, "")
    assert result.err == f"error: '{tenant}' is no name or id; write one as it is listed.\n"
    assert gateway.requests == [] and gateway.adapters.keys() == {"sql"}


def test_the_client_sends_no_name_that_makes_another_path(gateway: FakeGateway, tmp_path: Path) -> None:
    with AdaptersClient(gateway.url, KEY) as client:
        for call in (
            lambda: client.show(""),
            lambda: client.delete("."),
            lambda: client.of("sql", "DELETE", "grants", ".."),
            lambda: client.of("..", "GET", "files"),
            lambda: client.fetch("sql@1", "../../sql", tmp_path / "file", lambda count: None),
        ):
            with pytest.raises(ClientError, match="is no name or id") as refused:
                call()
            assert refused.value.exit_code == Exit.USAGE
    assert gateway.requests == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("percent", ["nan", "inf", "-inf", "1e400"])
def test_a_share_that_is_no_quantity_sends_nothing(gateway: FakeGateway, run: Run, percent: str) -> None:
    result = run("canary", "sql", "2", f"--percent={percent}")
    assert result.exit_code == 2 and "is no quantity" in result.err and gateway.requests == []


def test_a_bad_folder_sends_nothing(gateway: FakeGateway, tmp_path: Path, run: Run) -> None:
    def result_of(name: str, says: str, **contents: object) -> None:
        folder = write_adapter(tmp_path / name, **contents)  # type: ignore[arg-type]
        if name in (CONFIG_FILE, WEIGHTS_FILE):
            (folder / name).unlink()
        if name == "pickle":
            (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
        result = run("upload", folder, "--name", "sql")
        assert result.exit_code == 1 and says in result.err, result

    result_of(CONFIG_FILE, CONFIG_FILE)
    result_of(WEIGHTS_FILE, WEIGHTS_FILE)
    result_of("pickle", "safe_serialization")
    result_of("qalora", "use_qalora", config_json=config(use_qalora=True))
    result_of("no json", "not JSON", config_json=b"{")
    result_of("truncated", "truncated", weights=b"\0\0\0\1\0\0\0\0")
    result_of("dtype", "F64", weights={"x": ("F64", [1], b"\0" * 8)})
    assert gateway.requests == []


def test_a_file_that_may_not_be_read(
    gateway: FakeGateway, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / CONFIG_FILE))

    monkeypatch.setattr(Path, "open", refuse)
    result = run("upload", folder, "--name", "sql")
    assert (result.exit_code, result.err) == (
        1,
        f"error: Cannot read {folder / CONFIG_FILE}: Permission denied.\n",
    )


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("hf:acme/lora", {"repo": "acme/lora"}),
        ("hf:acme/lora@v1.0", {"repo": "acme/lora", "revision": "v1.0"}),
    ],
)
def test_pulls_from_the_hub(gateway: FakeGateway, run: Run, source: str, place: dict[str, str]) -> None:
    result = run("pull", source, "--name", "sql", "--no-promote")
    assert (result.exit_code, result.out) == (0, "sql@1: rank 4, 123.5 kB\n")
    assert gateway.announced == {**place, "name": "sql", "allow_zero": False, "promote": False}


@pytest.mark.parametrize("source", ["acme/lora", "hf:lora", "hf:a/b/c", "hf:acme/lora@", "https://x/y"])
def test_what_is_no_place_on_the_hub_is_not_asked_for(gateway: FakeGateway, run: Run, source: str) -> None:
    result = run("pull", source, "--name", "sql")
    assert result.exit_code == 2 and "hf:org/name" in result.err and gateway.requests == []


def test_memory_stays_flat_while_a_large_file_streams(gateway: FakeGateway, folder: Path) -> None:
    gateway.discard = True
    size = 300 * 1024 * 1024
    os.truncate(folder / WEIGHTS_FILE, size)
    counts: list[int] = []
    with AdaptersClient(gateway.url, KEY) as client:
        tracemalloc.start()
        client.upload(folder, "big", on_sent=counts.append)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert gateway.received == size + (folder / CONFIG_FILE).stat().st_size
    assert sum(counts) == size + (folder / CONFIG_FILE).stat().st_size
    assert peak < 8 * 1024 * 1024


def test_help_names_the_exit_codes_and_variables(run: Run) -> None:
    text = " ".join(run("--help").out.split())
    for part in (
        "LORAPLEX_URL",
        "LORAPLEX_API_KEY",
        "0 done",
        "3 the server cannot be reached",
        "5 there is no such",
    ):
        assert part in text
    assert "Example: adapters upload" in run("upload", "--help").out


def test_starts_soon_and_without_what_it_does_not_need() -> None:
    code = "import sys, adapters.cli; print(*sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "transformers", "peft", "numpy", "redis"} & set(loaded)
