"""The tokenizers that adapters bring: judged at upload, and loaded with an adapter's first request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread

from adapters.adapter_files import TOKENIZER_FILES
from adapters.store_threads import in_store_thread
from gateway.errors import ApiError, invalid_request, unavailable
from gateway.resolve import ResolvedModel
from gateway.tokenizer import ModelTokenizer, TokenizerFiles, Tokenizers
from gateway.tokenizer_bounds import Unbounded
from gateway.tokenizer_effect import EFFECT_FILE, MAX_EFFECT_BYTES, TokenizerEffect, identity_of

logger = logging.getLogger(__name__)

_JUDGE_TIMEOUT_S = 60.0
_MAX_JUDGES = 2
"""Uploads that are judged at once: each may take gigabytes."""
_MAX_ANSWER_BYTES = 4 * MAX_EFFECT_BYTES
_MAX_LOADED = 32


class OwnTokenizers:
    """Adapters' tokenizers by identity, the least recently used forgotten first."""

    def __init__(self, tokenizers: Tokenizers, read: Callable[[bytes, str], bytes]) -> None:
        """`read` returns a small file of a blob by digest and name; it is called in a thread."""
        self._tokenizers = tokenizers
        self._read = read
        self._loaded: OrderedDict[tuple[bytes, str], asyncio.Task[ModelTokenizer]] = OrderedDict()
        self._judges = asyncio.Semaphore(_MAX_JUDGES)

    async def of(self, model: ResolvedModel) -> ModelTokenizer:
        """Returns the tokenizer for requests to a model: the base model's, unless the adapter has its own.

        Raises ApiError 503 when the adapter's cannot be read, 400 when it is one that is no longer taken.
        """
        base, adapter = self._tokenizers.get(model.info.digest), model.adapter
        if adapter is None or not adapter.tokenizer:
            return base
        return await self._own(model.info.digest, base, adapter.tokenizer, adapter.digest)

    async def take(self, folder: Path, model_digest: bytes) -> str:
        """Judges the tokenizer files of an upload in `folder`, and returns the tokenizer's identity.

        What they change of the base model's is written beside them. Where that is nothing, or there are none,
        they are removed, and the identity is "". Raises ApiError 400 that names the file at fault.
        """
        present = [name for name in TOKENIZER_FILES if (folder / name).exists()]
        if not present:
            return ""
        with tempfile.TemporaryDirectory(prefix="loraplex-tokenizer-") as base_folder:
            await anyio.to_thread.run_sync(
                lambda: _write_all(Path(base_folder), self._tokenizers.files(model_digest))
            )
            async with self._judges:
                answer = await _judged(folder, Path(base_folder))
        if "fault" in answer:
            name = str(answer["file"])
            raise _refused(f"The file '{name}' {answer['fault']}", name)
        if answer["effect"] is None:
            for name in present:
                (folder / name).unlink()
            return ""
        effect = str(answer["effect"]).encode()
        (folder / EFFECT_FILE).write_bytes(effect)
        return identity_of(effect)

    async def _own(
        self, model_digest: bytes, base: ModelTokenizer, identity: str, digest: bytes
    ) -> ModelTokenizer:
        key = (model_digest, identity)
        loading = self._loaded.get(key)
        if loading is None:
            loading = asyncio.create_task(in_store_thread(self._load, base, identity, digest))
            self._loaded[key] = loading
            if len(self._loaded) > _MAX_LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        try:
            # Others may wait for the same one when this request is cancelled.
            return await asyncio.shield(loading)
        except Unbounded as error:  # stays so: the task is kept, and says it again
            message = f"The adapter's tokenizer {error} Then upload the adapter again."
            raise invalid_request(message, param="model", code="invalid_adapter") from error
        except (OSError, LookupError, ValueError, TypeError) as error:
            if self._loaded.get(key) is loading:
                del self._loaded[key]
            logger.error("the tokenizer of adapter %s cannot be loaded: %s", digest.hex(), error)
            message = "The adapter's tokenizer cannot be read at the moment. Try again shortly."
            raise unavailable(message, code="store_unavailable") from error

    def _load(self, base: ModelTokenizer, identity: str, digest: bytes) -> ModelTokenizer:
        data = self._read(digest, EFFECT_FILE)
        if identity_of(data) != identity:
            raise ValueError(f"{EFFECT_FILE} is not what was published")
        return base.extended(TokenizerEffect.from_bytes(data))


async def check_own_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raises ApiError 400 when the tokenizer that was taken in `folder`, if one was, has tokens that the
    adapter has no weights for: `vocab_size` counts the base model's and those that it adds.
    """
    path = folder / EFFECT_FILE
    if not path.exists():
        return
    effect = await anyio.to_thread.run_sync(lambda: TokenizerEffect.from_bytes(path.read_bytes()))
    beyond = [token for token in effect.added_tokens if token["id"] >= vocab_size]
    if beyond:
        text, number = beyond[0]["content"], beyond[0]["id"]
        message = (
            f"The tokenizer adds the token {text!a} as number {number}, but the adapter and its base model "
            f"have {vocab_size} tokens; save the adapter with the embedding that it was trained with, or "
            "leave the tokenizer's files out."
        )
        raise _refused(message, "tokenizer.json")


def _write_all(folder: Path, files: TokenizerFiles) -> None:
    for name in TOKENIZER_FILES:
        if name in files:
            (folder / name).write_bytes(files[name])


async def _judged(folder: Path, base_folder: Path) -> dict[str, Any]:
    """What the judging process says. Raises ApiError 400 when it says nothing in its time and memory."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.tokenizer_check", str(folder), str(base_folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},  # none of the gateway's secrets
        limit=_MAX_ANSWER_BYTES,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_JUDGE_TIMEOUT_S):
            answer = await process.stdout.read(_MAX_ANSWER_BYTES)
            while more := await process.stdout.read(_MAX_ANSWER_BYTES):
                answer += more
                if len(answer) > _MAX_ANSWER_BYTES:
                    break
            return json.loads(answer)
    except (TimeoutError, ValueError):
        raise _refused("The tokenizer's files cannot be read, or not in bounded time and memory.") from None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _refused(message: str, param: str | None = None) -> ApiError:
    return invalid_request(message, param=param, code="invalid_adapter")
