"""Files that grow at their end, also where the disk is full before they are whole."""

from __future__ import annotations

import errno
import hashlib
import io
from pathlib import Path

import pytest

from gateway.incoming_files import HashedFile, IncomingFile


class FullDisk(io.FileIO):
    """Has room for so many bytes more, and takes a few at a time."""

    room = 100

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(data[: min(40, self.room)])
        self.room -= count
        return count


def test_a_full_disk_leaves_what_it_has_and_the_hash_of_that(tmp_path: Path) -> None:
    path, content = tmp_path / "file", bytes(range(200))
    file = HashedFile(path, FullDisk(path, "x"))  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        file.write([content[:10], content[10:]])
    assert (file.size, file.sha256) == (100, hashlib.sha256(content[:100]).hexdigest())
    file.close()
    rest = IncomingFile.resume(path)
    assert rest.size == 100
    rest.write([content[100:]])
    rest.close()
    assert (rest.size, path.read_bytes()) == (200, content)
