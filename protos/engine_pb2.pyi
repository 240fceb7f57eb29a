from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_OFF: _ClassVar[EarlyStopping]
    EARLY_STOPPING_ON: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class Failure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_UNSPECIFIED: _ClassVar[Failure]
    FAILURE_STORE_UNAVAILABLE: _ClassVar[Failure]

class Refusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[Refusal]
    REFUSAL_DRAINING: _ClassVar[Refusal]
    REFUSAL_QUEUE_FULL: _ClassVar[Refusal]
    REFUSAL_TENANT_QUEUE_FULL: _ClassVar[Refusal]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_REFUSED: _ClassVar[FinishReason]

class Residency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_NONE: _ClassVar[Residency]
    RESIDENCY_DISK: _ClassVar[Residency]
    RESIDENCY_HOST: _ClassVar[Residency]
    RESIDENCY_DEVICE: _ClassVar[Residency]
EARLY_STOPPING_OFF: EarlyStopping
EARLY_STOPPING_ON: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
FAILURE_UNSPECIFIED: Failure
FAILURE_STORE_UNAVAILABLE: Failure
REFUSAL_UNSPECIFIED: Refusal
REFUSAL_DRAINING: Refusal
REFUSAL_QUEUE_FULL: Refusal
REFUSAL_TENANT_QUEUE_FULL: Refusal
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_REFUSED: FinishReason
RESIDENCY_NONE: Residency
RESIDENCY_DISK: Residency
RESIDENCY_HOST: Residency
RESIDENCY_DEVICE: Residency

class LinkRequest(_message.Message):
    __slots__ = ("submit", "abort", "announce")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    announce: Announce
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("adapter_digest",)
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    adapter_digest: bytes
    def __init__(self, adapter_digest: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "output_tokens", "adapter_digest", "cache_scope", "tenant", "weight", "priority", "seeds", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "deadline_ms", "adapter_start", "grammar", "prompt_logprobs", "prompt_only", "background", "pooling", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_START_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    adapter_digest: bytes
    cache_scope: bytes
    tenant: str
    weight: float
    priority: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    deadline_ms: int
    adapter_start: int
    grammar: str
    prompt_logprobs: int
    prompt_only: bool
    background: bool
    pooling: Pooling
    beams: Beams
    def __init__(self, request_id: _Optional[int] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., adapter_digest: _Optional[bytes] = ..., cache_scope: _Optional[bytes] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., priority: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., adapter_start: _Optional[int] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., prompt_only: _Optional[bool] = ..., background: _Optional[bool] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., beams: _Optional[_Union[Beams, _Mapping]] = ...) -> None: ...

class Beams(_message.Message):
    __slots__ = ("length_penalty", "early_stopping")
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_tokens", "bias_values", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    choice: int
    def __init__(self, request_id: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class LinkResponse(_message.Message):
    __slots__ = ("request_ids", "choices", "tokens", "logprobs", "started", "finished", "prompt_logprobs", "embeddings", "searched")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    started: _containers.RepeatedCompositeFieldContainer[Started]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    searched: _containers.RepeatedCompositeFieldContainer[Searched]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., searched: _Optional[_Iterable[_Union[Searched, _Mapping]]] = ...) -> None: ...

class Searched(_message.Message):
    __slots__ = ("request_id", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tokens: int
    def __init__(self, request_id: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("request_id", "values")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    values: bytes
    def __init__(self, request_id: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top_tokens", "top_logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "start", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    start: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "cached_tokens", "queue_us")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    cached_tokens: int
    queue_us: int
    def __init__(self, request_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_us: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "choice", "reason", "error", "refusal", "retry_after_ms", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    choice: int
    reason: FinishReason
    error: str
    refusal: Refusal
    retry_after_ms: int
    failure: Failure
    def __init__(self, request_id: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[str] = ..., refusal: _Optional[_Union[Refusal, str]] = ..., retry_after_ms: _Optional[int] = ..., failure: _Optional[_Union[Failure, str]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "digest", "architecture", "vocab_size", "max_model_len", "num_layers", "modules", "eos_token_ids", "dtype", "block_size", "num_blocks", "num_rank_pages", "max_lora_rank", "max_num_seqs", "engine_version", "tied_embeddings", "pooling", "hidden_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANK_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    modules: _containers.RepeatedCompositeFieldContainer[LinearModule]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    block_size: int
    num_blocks: int
    num_rank_pages: int
    max_lora_rank: int
    max_num_seqs: int
    engine_version: str
    tied_embeddings: bool
    pooling: Pooling
    hidden_size: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., modules: _Optional[_Iterable[_Union[LinearModule, _Mapping]]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_rank_pages: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., engine_version: _Optional[str] = ..., tied_embeddings: _Optional[bool] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class LinearModule(_message.Message):
    __slots__ = ("name", "in_features", "out_features")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    in_features: int
    out_features: int
    def __init__(self, name: _Optional[str] = ..., in_features: _Optional[int] = ..., out_features: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterState]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterState, _Mapping]]] = ...) -> None: ...

class AdapterState(_message.Message):
    __slots__ = ("digest", "residency", "rank", "pages", "references", "pinned", "hits", "loads", "load_seconds", "evictions", "hits_device", "misses")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    HITS_DEVICE_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    residency: Residency
    rank: int
    pages: int
    references: int
    pinned: bool
    hits: int
    loads: int
    load_seconds: float
    evictions: int
    hits_device: int
    misses: int
    def __init__(self, digest: _Optional[bytes] = ..., residency: _Optional[_Union[Residency, str]] = ..., rank: _Optional[int] = ..., pages: _Optional[int] = ..., references: _Optional[int] = ..., pinned: _Optional[bool] = ..., hits: _Optional[int] = ..., loads: _Optional[int] = ..., load_seconds: _Optional[float] = ..., evictions: _Optional[int] = ..., hits_device: _Optional[int] = ..., misses: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...
