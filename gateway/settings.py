"""Everything a gateway process can be told, in one frozen
object. The environment is read here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from adapters.blob_store import check_location
from adapters.service_links import check_port
from gateway.prices import load_prices

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_LEAST_KEY_LETTERS = 16
_GOOD_KEY = "take what `openssl rand -hex 32` prints"


def _check_redis_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("it begins with redis://, rediss:// or unix://, as in redis://127.0.0.1:6379/0")
    return url


def _check_operator_key(key: SecretStr) -> SecretStr:
    """The key as clients send it: without the line's end that a file of secrets leaves at it."""
    letters = key.get_secret_value().strip()
    if len(letters) < _LEAST_KEY_LETTERS:
        raise ValueError(f"it has fewer than {_LEAST_KEY_LETTERS} characters; {_GOOD_KEY}")
    if not all("!" <= letter <= "~" for letter in letters):
        raise ValueError(f"only printable ASCII without spaces may be in it; {_GOOD_KEY}")
    return SecretStr(letters)


def _check_prices(path: Path) -> Path:
    load_prices(path)
    return path


class GatewaySettings(BaseSettings):
    """Settings of `loraplex gateway`: a flag wins over the environment, the environment over the default."""

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,  # a refused key is a secret, too
    )

    host: str = Field(default="127.0.0.1", description="Address that the HTTP server binds.")
    port: Annotated[int, BeforeValidator(check_port)] = Field(
        default=8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes a free one."
    )
    grpc_port: Annotated[int | None, BeforeValidator(check_port)] = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the gRPC service for clients, on the same address; without it, there is none.",
    )
    redis_url: Annotated[str, AfterValidator(_check_redis_url)] = Field(
        default="redis://127.0.0.1:6380/0",
        description="Redis or Valkey that holds tenants, keys, adapters and engines.",
    )
    store: Annotated[str, BeforeValidator(str), AfterValidator(check_location)] = Field(
        default="var/store",
        description="Where adapters' files are kept, the same for engines: a folder, or `s3://bucket/prefix`.",
    )
    store_cache: Path = Field(
        default=Path("var/cache"),
        description="Local folder for uploads on their way to an `s3://` store; one per gateway.",
    )
    operator_key: Annotated[SecretStr, AfterValidator(_check_operator_key)] | None = Field(
        default=None,
        description=f"Key of the operator, for `/admin`, of {_LEAST_KEY_LETTERS} characters or more; without "
        "it one is made at first start and printed.",
    )
    max_adapter_bytes: int = Field(
        default=4 * _GIB,
        ge=_MIB,
        description="Largest upload of one adapter, in bytes; a larger one is refused with 413.",
    )
    store_grace_s: int = Field(
        default=3600,
        ge=0,
        description="How long the store keeps an adapter's files after the last name that used them is gone.",
    )
    allow_hub_pull: bool = Field(
        default=False,
        description="Whether tenants may have adapters fetched from huggingface.co by name.",
    )
    uploads_per_tenant: int = Field(
        default=4,
        ge=1,
        description="Most uploads of a tenant at once, resumable ones that pause included, until they have "
        "rested for an hour; more get 429.",
    )
    auth_cache_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a key is answered from memory while Redis pushes changes.",
    )
    auth_grace_s: float = Field(
        default=300.0, ge=0, description="How long a known key keeps working while Redis cannot be reached."
    )
    resume_timeout_s: float = Field(
        default=30.0, ge=0, description="How long a request whose engine is lost waits for one to go on with."
    )
    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="How long a request may wait and generate that sends no `X-Request-Timeout`.",
    )
    journal: Path = Field(
        default=Path("var/journal"),
        description="Local folder for what the ledger cannot tell Redis; gateways of one Redis may share it.",
    )
    ledger_days: int = Field(default=400, ge=1, description="How many days the ledger keeps its entries.")
    audit_days: int | None = Field(
        default=None,
        ge=1,
        description="How many days the audit keeps its entries; without it, the last million.",
    )
    lease_s: float = Field(
        default=10.0,
        ge=1,
        description="How long the requests of a gateway that died still count as running.",
    )
    prices: Annotated[Path, AfterValidator(_check_prices)] | None = Field(
        default=None, description="TOML or JSON file of prices; usage is then shown with what it costs."
    )
    metrics_labels: int = Field(
        default=50,
        ge=1,
        le=1000,
        description="How many tenants, and how many of their adapters, `/metrics` names; more are `other`.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe line logged."
    )


def environment_table() -> str:
    """Returns the Markdown table of all settings, one row each; the documentation holds exactly this text."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in GatewaySettings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(f"| `LORAPLEX_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"
