"""A whole engine stepped by hand, with a store, a disk cache and real weights: to look at all its tiers."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.blob_store import MANIFEST_FILE
from adapters.store_cache import StoreCache
from engine.adapter_status import Residency
from engine.adapter_tiers import AdapterTiers
from engine.beams import BeamOptions
from engine.block_pool import BlockPool, root_hash
from engine.model.adapter_reading import read_as_stored
from engine.model.adapter_weights import HostAdapter
from engine.model.loading import LoadedModel
from engine.rank_pages import RankPages
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scheduler.adapter_gate import AdapterGate
from engine.sequence import Request
from engine.step import SamplingParams
from kernels.native import release_threads

TIMEOUT_S = 60.0
ENDS_BYTES = 1 << 24


def digest_of(name: str) -> bytes:
    """The digest of an adapter that a test calls ``name``."""
    return hashlib.sha256(name.encode()).digest()


class FolderFarAway:
    """A remote store over folders: what an engine's disk cache fetches from."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = {digest_of(name): folder for name, folder in folders.items()}
        self.fetched: list[bytes] = []

    def contains(self, digest: bytes) -> bool:
        return digest in self._folders

    def manifest(self, digest: bytes) -> dict[str, Any]:
        folder = self._folders[digest]
        files = {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in folder.iterdir()
            if path.suffix in (".json", ".safetensors")
        }
        return {"files": files}

    def fetch(self, digest: bytes, folder: Path) -> dict[str, Any]:
        self.fetched.append(digest)
        manifest = self.manifest(digest)
        for name in manifest["files"]:
            shutil.copy(self._folders[digest] / name, folder / name)
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
        return manifest


class LiveEngine:
    """Steps only when it is told to; loads run in their own threads."""

    def __init__(
        self,
        model: LoadedModel,
        folders: Mapping[str, Path],
        disk: Path,
        *,
        num_pages: int,
        num_blocks: int = 256,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 128,
        host_bytes: int = 1 << 30,
    ) -> None:
        self._model = model
        self.runner = Runner(model, num_blocks=num_blocks, num_rank_pages=num_pages)
        self.store = FolderFarAway(folders)
        self.cache = StoreCache(self.store, disk, 1 << 30)
        self.tiers = AdapterTiers(
            self._read,
            is_local=self.cache.has_local,
            discard=self.cache.discard,
            num_pages=num_pages,
            ends_bytes=ENDS_BYTES,
            host_bytes=host_bytes,
        )
        self.pages = RankPages(num_pages, ends_bytes=ENDS_BYTES, in_host=self.tiers.has)
        self.gate = AdapterGate(self.pages, self.tiers, self.runner.write_adapter, self.runner.drop_adapter)
        self.pool = BlockPool(num_blocks)
        limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens)
        self.scheduler = Scheduler(limits, self.pool, self.gate)
        self.before_read: Callable[[], object] = lambda: None
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], str] = {}

    def _read(self, digest: bytes) -> HostAdapter:
        self.before_read()
        try:
            with self.cache.reading(digest) as folder:
                return read_as_stored(folder, self._model.network)
        finally:
            release_threads()

    # ---- requests -----------------------------------------------------------------------------------

    def submit(
        self,
        number: int,
        adapter: str | None,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        n: int = 1,
        link: str = "link",
        beams: BeamOptions | None = None,
    ) -> None:
        """Adds a greedy request, or a search; its number is unique over all links."""
        digest = digest_of(adapter) if adapter else b""
        logprobs = None if beams is None else beams.num_candidates
        self.scheduler.add(
            Request(
                link=link,
                request_id=number,
                prompt=tuple(prompt),
                sampling=tuple(SamplingParams(seed=choice, logprobs=logprobs) for choice in range(n)),
                max_len=len(prompt) + max_tokens,
                block_root=root_hash(self._model.digest, str(self._model.dtype), digest, b"scope"),
                adapter_digest=digest,
                beams=beams,
                arrival=time.monotonic(),
            )
        )

    def prefetch(self, name: str) -> Future[str]:
        answer: Future[str] = Future()
        self.gate.prefetch(digest_of(name), answer)
        return answer

    def step(self) -> None:
        """One turn of the loop, with all invariants checked after it."""
        plan = self.scheduler.schedule()
        if plan.rows:
            self.scheduler.update(plan, self.runner.execute(plan))
        elif self.tiers.is_loading:
            time.sleep(0.001)
        for output in self.scheduler.take_outputs().values():
            entries = zip(output.request_ids, output.choices, output.tokens, strict=True)
            for number, choice, token in entries:
                self.tokens.setdefault((number, choice), []).append(token)
            for end in output.finished:
                self.finished[end.request_id, end.choice] = end.reason.name
        self.scheduler.check()

    def until(self, condition: Callable[[], bool]) -> None:
        """Steps until the condition holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            self.step()

    def run(self) -> None:
        """Steps until nobody runs or waits, and nothing is on its way in or out."""
        self.step()
        scheduler, tiers = self.scheduler, self.tiers
        self.until(
            lambda: (
                not (scheduler.num_running + scheduler.num_waiting or tiers.is_loading)
                and not self.gate._ahead.prefetched()
            )
        )
        self.step()
        self.until(lambda: not tiers.is_loading)

    # ---- what is where ------------------------------------------------------------------------------

    def on_device(self) -> set[bytes]:
        return {status.digest for status in self.gate.statuses() if status.residency is Residency.DEVICE}

    def on_disk(self) -> set[bytes]:
        """What really lies there."""
        return {bytes.fromhex(path.name) for path in (self.cache._blobs).iterdir()}

    def references(self, name: str) -> int:
        return self.gate.status(digest_of(name)).references

    def check_tiers_agree(self, names: Sequence[str]) -> None:
        """Asserts that these adapters and no others are on the device, in host memory and on the disk, each
        once, and that pages and bytes are as many as theirs."""
        digests = {digest_of(name) for name in names}
        listed = [status.digest for status in self.gate.statuses()]
        assert sorted(listed) == sorted(digests), "the listing"
        copies = self.tiers.held()
        assert self.on_device() == copies.keys() == self.on_disk() == digests
        used = sum(copy.num_pages for copy in copies.values())
        assert self.pages.num_free == self.pages.num_pages - used
        assert self.tiers.host_bytes == sum(copy.nbytes for copy in copies.values())

    def check_all_free(self) -> None:
        """Asserts that no block, page or reference is held."""
        self.scheduler.check()
        assert self.pool.num_idle == self.pool.num_blocks
        assert self.pages.num_available == self.pages.num_pages
        assert all(status.references == 0 for status in self.gate.statuses())

    def close(self) -> None:
        self.tiers.close()
        self.cache.close()


@contextmanager
def live_engine(
    model: LoadedModel, folders: Mapping[str, Path], disk: Path, **sizes: Any
) -> Iterator[LiveEngine]:
    """An engine that is closed at the end."""
    engine = LiveEngine(model, folders, disk, **sizes)
    try:
        yield engine
    finally:
        engine.close()
