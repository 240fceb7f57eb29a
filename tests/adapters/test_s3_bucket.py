"""What a bucket that does not answer, or refuses, looks like: soon, and in one sentence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from adapters import s3_bucket
from adapters.blob_store import StoreRefused, StoreUnavailable
from adapters.s3_bucket import S3Objects

URL = "s3://adapters/loraplex"
REFUSAL = b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code><Message>None.</Message></Error>'


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "test")


class Refusing(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(403)
        self.send_header("content-length", str(len(REFUSAL)))
        self.end_headers()
        self.wfile.write(REFUSAL)

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def refusing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent() -> Iterator[str]:
    """Takes connections, and says nothing."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        for client in taken:
            client.close()


def test_refused_credentials_are_told_with_their_code_and_without_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    with refusing() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects = S3Objects.at(URL)
        for call in (
            lambda: objects.get("key"),
            lambda: objects.put("key", b""),
            lambda: objects.put_file("key", tmp_path / "file"),
            lambda: objects.get_range("key", 0, 1),
            lambda: list(objects.list_keys("folder")),
        ):
            with pytest.raises(StoreRefused, match=r"refuses the credentials \(InvalidAccessKeyId\)") as told:
                call()
            assert "127.0.0.1" not in str(told.value)


def test_little_has_less_time_than_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bucket that hangs, what is small ends while what is large could still come."""
    monkeypatch.setattr(s3_bucket, "_SMALL_REQUEST_S", 0.2)
    monkeypatch.setattr(s3_bucket, "_REQUEST_S", 600.0)
    monkeypatch.setattr(s3_bucket, "_RETRY_S", 0.1)
    (tmp_path / "small").write_bytes(bytes(s3_bucket._SMALL_BYTES))
    with silent() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects = S3Objects.at(URL)
        for call in (
            lambda: objects.get("key"),
            lambda: objects.put("key", b""),
            lambda: objects.put_file("key", tmp_path / "small"),
            lambda: objects.get_range("key", 0, s3_bucket._SMALL_BYTES),
            lambda: list(objects.list_keys("folder")),
            lambda: objects.remove(["key"]),
        ):
            with pytest.raises(StoreUnavailable):
                call()

        def read_much() -> None:
            with suppress(StoreUnavailable):
                objects.get_range("key", 0, s3_bucket._SMALL_BYTES + 1)
            ended.set()

        ended = threading.Event()
        threading.Thread(target=read_much, daemon=True).start()
        assert not ended.wait(1)
    assert ended.wait(60)
