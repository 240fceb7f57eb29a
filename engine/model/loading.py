"""From what ``--model`` says to a model ready to compute."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.chat_templates import stated_template
from engine.model.config import ModelConfig, parse_hf_config
from engine.model.errors import ModelNotAvailable, UnsupportedModel
from engine.model.llama import LlamaModel
from engine.model.pooling_config import read_pooling
from engine.model.weights import SafetensorsFolder
from engine.step import Pooling

__all__ = ["LoadedModel", "ModelNotAvailable", "UnsupportedModel", "load_model", "resolve_dtype"]

_log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, with what else its files say.

    Attributes:
        digest: SHA-256 over the files of its config and weights; 32 bytes.
        tokenizer_files: ``tokenizer.json``, ``tokenizer_config.json`` and, if the model has one,
            ``chat_template.jinja``. Empty for a folder without a ``tokenizer.json``.
        pooling: how its embeddings are made.
    """

    config: ModelConfig
    network: LlamaModel
    digest: bytes
    tokenizer_files: dict[str, bytes]
    dtype: torch.dtype
    device: torch.device
    pooling: Pooling = Pooling.LAST


def load_model(source: str, *, dtype: str, device: str, max_model_len: int | None) -> LoadedModel:
    """Load a ``.gguf`` file, a Hugging Face folder, or a hub name that is cached or can be fetched.

    Args:
        dtype: ``auto``, ``float32`` or ``bfloat16``.
        device: a torch device; weights are converted one tensor at a time, so that no second copy of the
            model is held.
        max_model_len: tokens of context to serve; None: as many as the model supports.

    Raises:
        ModelNotAvailable: with one sentence that says what is missing (or, as its subclass
            ``UnsupportedModel``, what the engine cannot compute).
    """
    target = torch.device(device)
    path = _resolve(source)
    if path.is_file():
        return _load_gguf(path, resolve_dtype(dtype, target), target, max_model_len)
    return _load_folder(path, resolve_dtype(dtype, target), target, max_model_len)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a ``--dtype`` means here. ``auto`` is bfloat16 where the device multiplies it fast."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu" and not _FAST_BF16_FLAGS & _cpu_flags():
        return torch.float32
    return torch.bfloat16


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(match.group(1).split()) if match else set()


def _resolve(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotAvailable(f"{source} is neither a .gguf file nor a model folder.")
    if not _HUB_NAME.fullmatch(source) or source.endswith(".gguf"):
        raise ModelNotAvailable(
            f"There is no model at {source}: name a .gguf file, a model folder or a hub name."
        )
    return _fetch(source)


def _fetch(name: str) -> Path:
    """The folder of a hub model: from the cache, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        _log.info("%s is not in the local cache; fetching it from the hub", name)
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    # The hub client fails in its own, its HTTP library's and the system's exceptions; all mean the same here.
    except Exception as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ModelNotAvailable(
            f"Model {name} is not on disk and could not be fetched from the hub ({reason}); set HF_TOKEN if "
            "it is gated there, or download it first and pass its folder, or a .gguf file."
        ) from error


def _load_gguf(
    path: Path, dtype: torch.dtype, device: torch.device, max_model_len: int | None
) -> LoadedModel:
    from engine.model.gguf import GgufFile, parse_gguf_config
    from engine.model.gguf_tokenizer import tokenizer_files

    with ThreadPoolExecutor(1) as background:
        digest = background.submit(_digest, [path])
        file = GgufFile(path)
        with _understanding(path):
            config = parse_gguf_config(file, max_model_len=max_model_len)
        tokenizer = tokenizer_files(file.metadata)
        network = LlamaModel(config, file, dtype, device)
        return LoadedModel(config, network, digest.result(), tokenizer, dtype, device)


def _load_folder(
    folder: Path, dtype: torch.dtype, device: torch.device, max_model_len: int | None
) -> LoadedModel:
    raw = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    with _understanding(folder / "config.json"):
        config = parse_hf_config(raw, generation, max_model_len=max_model_len)
    source = SafetensorsFolder(folder)
    with ThreadPoolExecutor(1) as background:
        digest = background.submit(_digest, [folder / "config.json", *source.files])
        network = LlamaModel(config, source, dtype, device)
        tokenizer, pooling = _folder_tokenizer(folder), read_pooling(folder)
        return LoadedModel(config, network, digest.result(), tokenizer, dtype, device, pooling)


@contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """A value that is missing or of another type than its name promises becomes one sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{path} says something that cannot be understood: {error!r}.") from error


def _digest(paths: Sequence[Path]) -> bytes:
    """SHA-256 over the SHA-256 of each file, in order. The files' bytes count, not their names."""

    def of_file(path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    # hashlib lets go of the interpreter lock, so shards are hashed side by side.
    with ThreadPoolExecutor(max_workers=4) as workers:
        return hashlib.sha256(b"".join(workers.map(of_file, paths))).digest()


def _folder_tokenizer(folder: Path) -> dict[str, bytes]:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        _log.warning("%s has no tokenizer.json: only prompts of token ids can be served", folder)
        return {}
    config = _read_json(folder / "tokenizer_config.json", required=False)
    # Older exports name the special tokens only here.
    config = {**_read_json(folder / "special_tokens_map.json", required=False), **config}
    files = {"tokenizer.json": tokenizer.read_bytes()}
    template_file = folder / "chat_template.jinja"
    stated = stated_template(config.pop("chat_template", None))
    template = template_file.read_text() if template_file.exists() else stated
    if template:
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2).encode()
    return files


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.exists():
        if required:
            raise ModelNotAvailable(f"{path.parent} has no {path.name}, so it is not a model folder.")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotAvailable(f"{path} is not valid JSON: {error}.") from error
