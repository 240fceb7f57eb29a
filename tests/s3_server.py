"""A real S3 server in this process, which can also break connections: what the S3 store is tested against."""

from __future__ import annotations

import logging
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from moto.server import ThreadedMotoServer

BUCKET = "adapters"


class S3Server:
    """moto's server behind a proxy of our own, through which a test cuts connections and restarts it."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self._upstream = self._server.get_host_and_port()[1]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.cut_after: int | None = None
        """Bytes of an answer or a request, from now on, after which its connection is cut, once."""
        self.is_away = False
        """Connections are closed at once."""
        self.goes_on = threading.Event()
        """While it is not set, requests wait, and so do answers."""
        self.goes_on.set()
        self.num_refused = 0
        """Connections that were closed at once."""
        self._guard = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def variables(self) -> dict[str, str]:
        """What an operator would set to reach the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def reset(self) -> None:
        """Forgets everything, and makes the bucket anew."""
        self.cut_after, self.is_away, self.num_refused = None, False, 0
        self.goes_on.set()
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
            request = urllib.request.Request(f"http://127.0.0.1:{self._upstream}{path}", method=method)
            urllib.request.urlopen(request).close()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._accepting.join()
        self._listener.close()
        self._server.stop()

    def corrupt(self, key: str, data: bytes) -> None:
        """Writes an object past the store."""
        url = f"http://127.0.0.1:{self._upstream}/{BUCKET}/{key}"
        headers = {"Content-Type": "application/octet-stream"}
        urllib.request.urlopen(urllib.request.Request(url, data, headers, method="PUT")).close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_away:
                    self.num_refused += 1
                    client.close()
                    continue
                upstream = socket.create_connection(("127.0.0.1", self._upstream))
                for source, target in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with closing(source), closing(target), suppress(OSError):
            while data := source.recv(1 << 16):
                self.goes_on.wait()
                if self.is_away or self._cuts(len(data)):
                    break
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts(self, count: int) -> bool:
        with self._guard:
            if self.cut_after is None:
                return False
            self.cut_after -= count
            if self.cut_after > 0:
                return False
            self.cut_after = None
            return True


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that ends with the block."""
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
