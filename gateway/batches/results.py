"""What came of a batch's lines, on its way to the output and the error file.

A result is a byte that says which of the two it belongs to, and its line of that file. Results gather in
Redis, where they survive a gateway; before they are many, they move to files of the store.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from adapters.file_store import FileStore
from gateway.batches.batch import Batch
from gateway.batches.files import StoredFile, new_file
from gateway.batches.lines import InputGone, parse_line, raw_lines

_OUTPUT, _ERROR = b"+", b"-"
_PIECE_BYTES = 1024 * 1024
SEGMENT_PREFIX = "results."


def result_of(custom_id: str, *, status: int, request_id: str, body: bytes) -> tuple[bytes, bool]:
    """The result of a line that was answered, and whether it failed."""
    failed = status >= 400
    answer = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return (_ERROR if failed else _OUTPUT) + _line(custom_id, answer, None), failed


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The result of a line that never was."""
    return _ERROR + _line(custom_id, None, {"code": code, "message": message})


def is_done(done: bytes, line: int) -> bool:
    """Whether a line has its bit in what `Batches.done` returns."""
    return line // 8 < len(done) and bool(done[line // 8] & (0x80 >> line % 8))


def write_segment(files: FileStore, tenant: str, batch_id: str, results: Iterable[bytes]) -> str:
    """Puts results into a new file of the store, and returns its name. Blocks; raises OSError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        with path.open("wb") as file:
            file.writelines(result + b"\n" for result in results)
        # The size goes with the name: a bucket is read by ranges.
        name = f"{tenant}/{SEGMENT_PREFIX}{batch_id}.{secrets.token_hex(8)}.{path.stat().st_size}"
        files.put(name, path)
    return name


def batch_of_segment(name: str) -> str | None:
    """The batch whose results a file of the store holds; None where it is no such file."""
    rest = name.partition("/")[2]
    return rest.removeprefix(SEGMENT_PREFIX).partition(".")[0] if rest.startswith(SEGMENT_PREFIX) else None


def missing(
    files: FileStore, source: StoredFile, batch: Batch, done: bytes, code: str, message: str
) -> Iterator[bytes]:
    """A result for each line of the input that has none; of an input that is gone, nobody knows them.

    Blocks; raises OSError.
    """
    with suppress(InputGone):
        for number, raw in raw_lines(files, source.name, source.bytes):
            if not is_done(done, number):
                yield unanswered(parse_line(number, raw, batch.endpoint).custom_id, code, message)


def write_files(
    files: FileStore, batch: Batch, segments: Iterable[str], results: Iterable[bytes]
) -> tuple[StoredFile | None, StoredFile | None, bool]:
    """Makes the output and the error file of all results, and puts them into the store. Where nothing would
    be in one, it is None. Says at last whether all segments were there. Blocks; raises OSError.
    """
    whole = True
    with TemporaryDirectory() as folder:
        paths = {mark: Path(folder) / name for mark, name in ((_OUTPUT, "output"), (_ERROR, "error"))}
        with paths[_OUTPUT].open("wb") as output, paths[_ERROR].open("wb") as error:
            target = {_OUTPUT: output, _ERROR: error}
            for segment in segments:
                try:
                    for line in _lines_of(files, segment):
                        target[line[:1]].write(line[1:] + b"\n")
                except FileNotFoundError:
                    whole = False
            for result in results:
                target[result[:1]].write(result[1:] + b"\n")
        return _put(files, batch, paths[_OUTPUT]), _put(files, batch, paths[_ERROR]), whole


def _put(files: FileStore, batch: Batch, path: Path) -> StoredFile | None:
    size = path.stat().st_size
    if not size:
        return None
    name = f"{batch.id}_{path.name}.jsonl"
    made = new_file(batch.tenant, name, "batch_output", size, batch.output_kept_s)
    files.put(made.name, path)
    return made


def _lines_of(files: FileStore, name: str) -> Iterator[bytes]:
    size, rest = int(name.rpartition(".")[2]), b""
    for start in range(0, size, _PIECE_BYTES):
        piece = files.read(name, start, min(_PIECE_BYTES, size - start))
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    named = f"batch_req_{secrets.token_hex(12)}"
    return orjson.dumps({"id": named, "custom_id": custom_id, "response": response, "error": error})
