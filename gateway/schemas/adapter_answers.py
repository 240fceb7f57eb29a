"""What the adapters' routes answer, as the OpenAPI description has it. See gateway.schemas.answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from gateway.schemas.adapters import NAME_PATTERN
from gateway.schemas.answers import Created

Ref = Annotated[str, Field(description="A version, as `model` names it.", examples=["sql@3"])]
Name = Annotated[str, Field(examples=["sql"])]
Digest = Annotated[str, Field(description="SHA-256 over what the adapter does.")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, description="In bytes.")]


class AdapterVersion(TypedDict):
    """One upload. It never changes."""

    id: Ref
    object: Literal["adapter"]
    name: Name
    version: Annotated[int, Field(ge=1)]
    digest: Digest
    rank: Annotated[int, Field(description="The largest of its modules' ranks.")]
    bytes: Size
    target_modules: list[str]
    base_model: Annotated[str | None, Field(description="What the adapter's own files call its base.")]
    invocation_tokens: Annotated[list[int], Field(description="Of an activated adapter; else empty.")]
    tokenizer: Annotated[str, Field(description="Digest of a tokenizer of its own; else empty.")]
    vocab_size: Annotated[int | None, Field(description="Tokens that exist, where it adds some.")]
    created: Created


class Canary(TypedDict):
    """A version that gets a share of the requests for the bare name."""

    version: Annotated[int, Field(ge=1)]
    percent: float


class Adapter(AdapterVersion):
    """A name: its live version (the newest while none is live), and what goes for the name."""

    live: Annotated[int | None, Field(description="The live version's number.")]
    canary: Canary | None
    pinned: bool


class RequestsByTier(TypedDict):
    """Requests for an adapter, by the memory that it was in when they came; `none`: it had to be read."""

    device: int
    host: int
    none: int


class AdapterOnEngine(TypedDict):
    """Where an engine has the live version, and what it has been through since the engine started."""

    tier: Annotated[str, Field(examples=["device", "host"])]
    pinned: bool
    hits: Annotated[int, Field(description="Requests that found it in either memory.")]
    requests: RequestsByTier
    loads: int
    evictions: int
    load_seconds: float


class AdapterDetails(Adapter):
    """A name with its versions, grants and places."""

    grants: Annotated[list[str], Field(description="Tenants that may use it too.")]
    versions: list[AdapterVersion]
    residency: Annotated[dict[str, str], Field(description="By engine, where the live version is.")]
    engines: dict[str, AdapterOnEngine]


class AdapterList(TypedDict):
    """All names of the tenant."""

    object: Literal["list"]
    data: list[Adapter]
    bytes: Annotated[int, Field(description="What all versions take.")]


class AdapterDeleted(TypedDict):
    """A name, or a version, that is gone."""

    id: Ref
    object: Literal["adapter.deleted"]
    deleted: Literal[True]


class AdapterEvent(TypedDict):
    """A change of what a name means."""

    object: Literal["adapter.event"]
    at: float
    action: str
    version: int | None
    detail: str
    by: Annotated[str, Field(description="Id of the key that did it.")]


class AdapterHistory(TypedDict):
    """What happened to a name, the latest first."""

    object: Literal["list"]
    data: list[AdapterEvent]


class Grant(TypedDict):
    """Whether another tenant may use an adapter."""

    id: Annotated[str, Field(description="What the other tenant calls it.", examples=["acme/sql"])]
    object: Literal["adapter.grant"]
    name: Name
    tenant: Annotated[str, Field(examples=["globex"])]
    granted: bool


class AdapterFile(TypedDict):
    """A file as it was uploaded."""

    name: Annotated[str, Field(examples=["adapter_config.json"])]
    bytes: Size
    sha256: Sha256


class VersionWithFiles(AdapterVersion):
    """A version, and how its digest was taken."""

    digest_format: int


class AdapterFiles(TypedDict):
    """The files of a version."""

    object: Literal["list"]
    adapter: VersionWithFiles
    data: list[AdapterFile]


FromTo = TypedDict("FromTo", {"from": Any, "to": Any})
ModuleDifference = TypedDict(
    "ModuleDifference", {"module": str, "from": float, "to": float, "difference": float}
)
AdapterDiff = TypedDict(
    "AdapterDiff",
    {
        "object": Literal["adapter.diff"],
        "from": AdapterVersion,
        "to": AdapterVersion,
        "changed": dict[str, FromTo],
        "modules": list[ModuleDifference],
    },
)


class UploadFile(TypedDict):
    """How much of a file has arrived."""

    name: str
    bytes: Size
    offset: Annotated[int, Field(ge=0, description="Where it goes on.")]


class OpenUpload(TypedDict):
    """An upload that waits for bytes."""

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    object: Literal["adapter.upload"]
    status: Literal["open"]
    name: Name
    expires: Annotated[int, Field(description="Unix time at which what has arrived is removed.")]
    files: list[UploadFile]


class CompleteUpload(TypedDict):
    """An upload of what the tenant has already: nothing needs to be sent."""

    object: Literal["adapter.upload"]
    status: Literal["complete"]
    name: Name
    adapter: AdapterVersion


class UploadProgress(TypedDict):
    """Where a file is after what was sent."""

    id: str
    object: Literal["adapter.upload"]
    file: str
    offset: Annotated[int, Field(ge=0)]


class UploadDeleted(TypedDict):
    """An upload that was given up."""

    id: str
    object: Literal["adapter.upload.deleted"]
    deleted: Literal[True]


class AdapterBase(TypedDict):
    """What an adapter must fit."""

    object: Literal["adapter.base"]
    model: str
    num_layers: int
    modules: Annotated[
        dict[str, list[int]], Field(description="In and out features of each module of a layer.")
    ]
    max_lora_rank: int
    vocab_size: int
    tied_embeddings: bool


class AdapterForm(TypedDict):
    """The form of an upload at once."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, examples=["sql"])]
    files: Annotated[
        list[bytes],
        Field(
            min_length=2,
            description="`adapter_config.json` and `adapter_model.safetensors`, or its shards with their "
            "index; and a tokenizer's files if the adapter has its own. Each part has the file's name as its "
            "filename.",
        ),
    ]
    allow_zero: NotRequired[
        Annotated[Literal["true", "false"], Field(description="Take an adapter that changes nothing.")]
    ]
    promote: NotRequired[
        Annotated[Literal["true", "false"], Field(description="`false`: stage it, do not make it live.")]
    ]
