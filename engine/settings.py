"""Everything an engine process can be told, in one frozen object, and the command line that tells it.

A flag wins over the environment, the environment over the default. Both are read here and nowhere else.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from adapters.blob_store import check_location
from adapters.service_links import check_port

_GIB = 1 << 30
_ENV_PREFIX = "LORAPLEX_ENGINE_"
_SHARED_VARIABLES = {"redis_url": "LORAPLEX_REDIS_URL", "store": "LORAPLEX_STORE"}
"""What a gateway beside this engine must agree on has one variable for both."""
_EPILOG = """\
examples:
  python -m engine --model SmolLM2-135M-Instruct.Q4_1.gguf
  python -m engine --model ./Llama-3.1-8B-Instruct --max-num-seqs 256 --lora-memory-bytes 6GiB
  python -m engine --model meta-llama/Llama-3.1-8B-Instruct --port 0 --advertise 10.0.0.7:50051

Sizes take a unit: 512MiB, 4GB. Every flag can also be given as an environment variable: LORAPLEX_ENGINE_ and
the flag's name, as in LORAPLEX_ENGINE_MAX_NUM_SEQS=128; but LORAPLEX_REDIS_URL and LORAPLEX_STORE, which a
gateway reads too. SIGTERM drains, SIGINT (Ctrl-C) stops at once.

Exit codes: 0 stopped by a signal; 1 could not start, or not go on; 2 wrong usage.
"""


def _field(default: Any, group: str, help: str, **more: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group}, **more)


class EngineSettings(BaseSettings):
    """Settings of ``python -m engine``; the flags carry vLLM's names where it has the same thing."""

    model_config = SettingsConfigDict(
        env_prefix=_ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="ignore", populate_by_name=True
    )

    model: str = _field(..., "model", "A .gguf file, a Hugging Face folder, or a hub name.")
    served_model_name: str | None = _field(
        None, "model", "Name of the model for clients; default: the file's, the folder's or the hub name."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _field(
        "auto", "model", "Of weights, KV and adapters; auto is bfloat16 where the device is fast at it."
    )
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "model", "auto takes a GPU if there is one.")
    max_model_len: int | None = _field(
        None, "model", "Most tokens of a sequence, prompt and output together; default: the model's.", ge=2
    )

    host: str = _field("127.0.0.1", "serving", "Address to listen on.")
    port: Annotated[int, BeforeValidator(check_port)] = _field(
        50051, "serving", "Port to listen on; 0 takes a free one.", ge=0, le=65535
    )
    advertise: str | None = _field(
        None, "serving", "HOST:PORT under which gateways reach this engine; default: where it listens."
    )
    redis_url: str | None = _field(
        None,
        "serving",
        "Redis or Valkey to announce this engine in; without it, gateways cannot find it.",
        validation_alias=_SHARED_VARIABLES["redis_url"],
    )
    store: Annotated[str, BeforeValidator(str), AfterValidator(check_location)] = _field(
        "var/store",
        "serving",
        "Where adapters' files are kept, the same for gateways: a folder, or s3://bucket/prefix.",
        validation_alias=_SHARED_VARIABLES["store"],
    )
    store_cache: Path = _field(
        Path("var/cache"), "serving", "Local folder for copies from an s3:// store; one per engine."
    )
    store_cache_bytes: ByteSize = _field(ByteSize(16 * _GIB), "serving", "Size of these copies.", gt=0)
    drain_seconds: float = _field(
        30.0, "serving", "After SIGTERM, how long running requests may take to end.", ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _field(
        "info", "serving", "Least severe line logged, to stderr."
    )

    max_num_seqs: int = _field(256, "scheduling", "Most sequences that run at once.", ge=1)
    max_num_batched_tokens: int | None = _field(
        None,
        "scheduling",
        "Most tokens in a step; longer prompts are computed in chunks; default: 8192 on a GPU, 512 on a CPU.",
        ge=1,
    )
    max_num_waiting: int = _field(
        4096, "scheduling", "Most sequences that wait; one tenant, half as many. More are refused.", ge=1
    )
    enable_prefix_caching: bool = _field(True, "scheduling", "Reuse the KV of prompts that begin alike.")
    enforce_eager: bool = _field(False, "scheduling", "Do not capture CUDA graphs.")

    block_size: Literal[16] = _field(16, "memory", "Tokens in a KV block; the kernels are made for 16.")
    gpu_memory_utilization: float = _field(
        0.9, "memory", "Share of the device's memory to use, unless the sizes below say.", gt=0, le=1
    )
    kv_cache_memory_bytes: ByteSize | None = _field(None, "memory", "Size of the KV cache.")
    num_gpu_blocks_override: int | None = _field(None, "memory", "Number of KV blocks, whatever fits.", ge=1)
    lora_memory_bytes: ByteSize | None = _field(
        None,
        "memory",
        "Size of the adapter pages on the device; default: 4 GiB on a GPU, 512 MiB on a CPU. A quarter as "
        "much is kept for adapters' embeddings and lm_heads.",
    )
    lora_host_memory_bytes: ByteSize | None = _field(
        None,
        "memory",
        "Size of the adapter copies in host memory, behind the pages; default: 8 GiB beside a GPU, 1 GiB on "
        "a CPU, or a quarter of the free memory.",
    )
    max_lora_rank: int = _field(
        64, "memory", "Largest rank that uploads may have; the pages hold at least one such adapter.", ge=1
    )

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model)
        return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else self.model

    def step_tokens(self, device_type: str) -> int:
        """`max_num_batched_tokens`, or the default for this type of device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(8192 if device_type == "cuda" else 512, self.max_num_seqs)

    def lora_bytes(self, device_type: str) -> int:
        """`lora_memory_bytes`, or the default for this type of device."""
        if self.lora_memory_bytes is not None:
            return int(self.lora_memory_bytes)
        return 4 * _GIB if device_type == "cuda" else _GIB // 2

    def lora_host_bytes(self, device_type: str, available: int) -> int:
        """`lora_host_memory_bytes`, or the default for this type of device and these bytes of free memory.

        More than the pages hold, or it would have nothing that they do not have.
        """
        if self.lora_host_memory_bytes is not None:
            return int(self.lora_host_memory_bytes)
        return min(8 * _GIB if device_type == "cuda" else _GIB, available // 4)

    def advertised(self, port: int) -> str:
        """``host:port`` for gateways, given the port that the server has got."""
        if self.advertise:
            return self.advertise
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "[::]") else self.host
        return f"{host}:{port}"

    @property
    def is_local_only(self) -> bool:
        """Whether Redis is on another machine, whose gateways cannot reach the address that is advertised."""
        redis_host = urlsplit(self.redis_url or "").hostname
        own_host = self.advertised(0).rpartition(":")[0]
        return redis_host is not None and not _is_loopback(redis_host) and _is_loopback(own_host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_args(argv: Sequence[str] | None = None) -> EngineSettings:
    """Settings from the command line (``sys.argv`` if None) and the environment.

    Exits with status 2 and a message that names the flag when a value is missing or wrong, and with 0
    after ``--help``.
    """
    parser = _parser()
    given = vars(parser.parse_args(argv))
    try:
        return EngineSettings(**given)
    except ValidationError as error:
        faults = [_sentence(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        parser.error("; ".join(faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        usage="python -m engine --model MODEL [flags]",
        description="Serve one base model and any number of its LoRA adapters to gateways, over gRPC.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {}
    for name, field in EngineSettings.model_fields.items():
        title = _group_of(field)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(groups[title], name, field)
    return parser


def _group_of(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["group"])


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    """Adds one field's flag. Values stay text; the settings class converts and checks them."""
    help = (field.description or "").replace("%", "%%")
    if not field.is_required() and field.default is not None:
        shown = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
        help += f" [{str(shown).lower() if isinstance(shown, bool) else shown}]"
    flag = _flag(name)
    if isinstance(field.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
    else:
        choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
        metavar = "{" + ",".join(choices) + "}" if choices else name.split("_")[-1].upper()
        group.add_argument(flag, metavar=metavar, help=help)


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return _SHARED_VARIABLES.get(name, _ENV_PREFIX + name.upper())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _sentence(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    name = str(loc[0]) if loc else ""
    where = f"{_flag(name)} (or {variable_of(name)})"
    return f"{where} is required" if kind == "missing" else f"{where}: {message}"
