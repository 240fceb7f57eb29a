"""`adapter_config.json` as PEFT writes it, read into what a LoRA computes.

Every field of PEFT's `LoraConfig` is in exactly one of three tables here: handled, harmless (with the
reason), or refused when set. A field that none of them knows is refused too, unless it is off: an adapter is
never served without something that its training relied on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapters.base_model import EMBEDDING, end_of
from adapters.errors import InvalidAdapter, listed, shown
from adapters.patterns import Budget, Pattern, UnsafePattern
from adapters.strict_json import NotStrictJson, load_object

MAX_CONFIG_BYTES = 1024 * 1024
MAX_BASE_MODEL_CHARS = 1024
MAX_PATTERNS = 10_000
MAX_INVOCATION_TOKENS = 1024
MAX_RANK = 65_536
"""A bound for arithmetic; what a base model serves is `BaseModelShape.max_lora_rank`."""

HANDLED = frozenset(
    {
        "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern",
        "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias",
        "init_lora_weights", "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices",
        "ensure_weight_tying", "alora_invocation_tokens",
    }
)  # fmt: skip

HARMLESS: Mapping[str, str] = {
    "auto_mapping": "finds the Python class of the base model; ours is already loaded",
    "peft_version": "says who wrote the file",
    "revision": "of the base model; which one runs is the engine's, and the shapes must fit",
    "inference_mode": "freezes parameters in training",
    "lora_dropout": "acts in training only",
    "megatron_core": "names a Python module that is only used with megatron_config",
    "eva_config": "chooses initial weights, which the file's weights replace",
    "corda_config": "only used by init_lora_weights='corda', which is refused",
    "lora_ga_config": "only used by init_lora_weights='lora_ga', which is refused",
    "loftq_config": "only used by init_lora_weights='loftq', which is refused",
    "qalora_group_size": "only used with use_qalora, which is refused",
    "runtime_config": "says where PEFT keeps weights; PEFT does not save it",
    "fan_in_fan_out": "PEFT ignores it on linear layers and embeddings, and there are no others here",
}

REFUSED: Mapping[str, str] = {
    "target_parameters": "LoRA on bare parameters is not supported; use target_modules",
    "layer_replication": "replicated layers are another base model; serve the expanded model instead",
    "megatron_config": "Megatron's parallel layers are not supported; convert the adapter to plain LoRA",
    "use_qalora": "QA-LoRA pools its inputs, which is not supported; train with use_qalora=false",
    "velora_config": "VeLoRA is not supported; train a plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported; train a plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported; train a plain LoRA",
    "arrow_config": "Arrow routing is not supported; upload the routed adapters one by one",
    "kasa_config": "KaSA changes the base weights, which is not supported; train a plain LoRA",
}

_ENDS = "embed_tokens and lm_head"

_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_INITS = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What of a PEFT config decides the result. Names and meanings are PEFT's."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    """In the file's order: the first pattern that matches a module decides."""
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: tuple[str, ...] | str
    """Names or suffixes of modules; as text: a regular expression over full names, or ``all-linear``."""
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    use_dora: bool
    lora_bias: bool
    modules_to_save: tuple[str, ...]
    """Which ends are trained in full, by their bare names: ``embed_tokens``, ``lm_head``."""
    token_indices: Mapping[str, tuple[int, ...]] = field(hash=False)
    """Which rows of an end are trained, by its bare name (of `trainable_token_indices`)."""
    ensure_weight_tying: bool
    invocation_tokens: tuple[int, ...]
    """Of activated LoRA; empty for any other."""
    base_model: str | None


def parse_config(raw: bytes) -> LoraConfig:
    """Reads the bytes of `adapter_config.json`. Raises `InvalidAdapter` that names the field at fault."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(
            f"adapter_config.json has {len(raw)} bytes; the limit is {MAX_CONFIG_BYTES}.",
            "adapter_config.json",
        )
    try:
        fields = load_object(raw)
    except NotStrictJson as error:
        raise InvalidAdapter(
            f"adapter_config.json {error}; upload the file as PEFT's save_pretrained writes it.",
            "adapter_config.json",
        ) from None
    _refuse_unsupported(fields)
    _check_kind(fields)
    config = LoraConfig(
        r=_read(fields, "r", _is_rank, f"a whole number from 1 to {MAX_RANK}", 8, nullable=False),
        lora_alpha=float(_read(fields, "lora_alpha", _is_number, "a finite number", 8, nullable=False)),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_pattern_map(fields, "rank_pattern", _is_rank, int),
        alpha_pattern=_pattern_map(fields, "alpha_pattern", _is_number, float),
        target_modules=_names(fields, "target_modules"),
        exclude_modules=_names(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        layers_pattern=_as_tuple(_names(fields, "layers_pattern")),
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        modules_to_save=_saved_ends(fields),
        token_indices=_token_indices(fields),
        ensure_weight_tying=_flag(fields, "ensure_weight_tying"),
        invocation_tokens=tuple(
            _read(
                fields,
                "alora_invocation_tokens",
                lambda value: _are_tokens(value) and len(value) <= MAX_INVOCATION_TOKENS,
                f"a list of at most {MAX_INVOCATION_TOKENS} token ids",
                (),
            )
        ),
        base_model=_read(
            fields,
            "base_model_name_or_path",
            lambda value: isinstance(value, str) and len(value) <= MAX_BASE_MODEL_CHARS,
            f"text of at most {MAX_BASE_MODEL_CHARS} characters",
            None,
        ),
    )
    _check_targets(config)
    _check_combination(config, fields)
    return config


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in HANDLED or name in HARMLESS or _is_off(value):
            continue
        if name in REFUSED:
            raise InvalidAdapter(f"The config sets {name}: {REFUSED[name]}.", name)
        raise InvalidAdapter(
            f"The config sets the field {shown(name)}, which is not known here and may change the result; "
            "remove it if PEFT does not need it to load the adapter.",
            name,
        )


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _check_kind(fields: Mapping[str, Any]) -> None:
    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        raise InvalidAdapter(f"peft_type is {shown(peft_type)}; only 'LORA' is served.", "peft_type")
    task_type = fields.get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        raise InvalidAdapter(f"task_type is {shown(task_type)}; only 'CAUSAL_LM' is served.", "task_type")
    # Trained biases themselves are refused by their tensors: on most models there are none to train.
    bias = fields.get("bias", "none")
    if bias not in (None, "none", "all", "lora_only"):
        raise InvalidAdapter(f"bias is {shown(bias)}, which is not known here.", "bias")
    init = fields.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise InvalidAdapter(
            f"init_lora_weights is {shown(init)}, which changes the base model's weights; save the adapter "
            "with path_initial_model_for_weight_conversion, which makes it a plain LoRA.",
            "init_lora_weights",
        )
    if not (init is None or isinstance(init, bool) or init in _PLAIN_INITS):
        raise InvalidAdapter(
            f"init_lora_weights is {shown(init)}, which is not known here.", "init_lora_weights"
        )


def _read(
    fields: Mapping[str, Any],
    name: str,
    accepts: Callable[[Any], bool],
    what: str,
    default: Any,
    *,
    nullable: bool = True,
) -> Any:
    """A field's value; PEFT's default where it is absent, or null and `nullable`."""
    value = fields.get(name)
    if name not in fields or (value is None and nullable):
        return default
    if not accepts(value):
        raise InvalidAdapter(f"{name} is {shown(value)}; it must be {what}.", name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return _read(fields, name, lambda value: isinstance(value, bool), "true or false", False)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(float(value))
    except OverflowError:
        return False


def _pattern_map(
    fields: Mapping[str, Any], name: str, accepts: Callable[[Any], bool], kind: Callable[[Any], Any]
) -> tuple[tuple[str, Any], ...]:
    patterns = _read(
        fields, name, lambda value: isinstance(value, dict), "an object of patterns and numbers", {}
    )
    if len(patterns) > MAX_PATTERNS:
        raise InvalidAdapter(f"{name} holds {len(patterns)} patterns; the limit is {MAX_PATTERNS}.", name)
    for pattern, value in patterns.items():
        if not accepts(value):
            raise InvalidAdapter(
                f"{name} gives {shown(pattern)} the value {shown(value)}; it must be a number.", name
            )
        _check_pattern(name, pattern)
    return tuple((pattern, kind(value)) for pattern, value in patterns.items())


def _check_pattern(name: str, pattern: str) -> None:
    try:
        Pattern(pattern, Budget())
    except UnsafePattern as error:
        raise InvalidAdapter(f"{name} has the pattern {shown(pattern)}, which {error}.", name) from None


def _names(fields: Mapping[str, Any], name: str) -> tuple[str, ...] | str:
    def accepts(value: Any) -> bool:
        return isinstance(value, str) or (
            isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        )

    value = _read(fields, name, accepts, "text or a list of texts", ())
    return value if isinstance(value, str) and value else tuple(value)


def _as_tuple(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    def is_layer(value: Any) -> bool:
        return type(value) is int and value >= 0

    def accepts(value: Any) -> bool:
        return is_layer(value) or (isinstance(value, list) and all(is_layer(item) for item in value))

    value = _read(fields, "layers_to_transform", accepts, "a layer's index or a list of them", None)
    if value is None or value == []:
        return None
    return tuple(value) if isinstance(value, list) else (value,)


def _check_targets(config: LoraConfig) -> None:
    if not config.target_modules:
        raise InvalidAdapter(
            "The config has no target_modules; save the adapter with the PEFT version that trained it, "
            "which fills them in.",
            "target_modules",
        )
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name)
        if isinstance(value, str) and value.lower() != "all-linear":
            _check_pattern(name, value)
    for pattern in config.layers_pattern:
        _check_pattern("layers_pattern", pattern)
    if config.layers_pattern and config.layers_to_transform is None:
        raise InvalidAdapter(
            "layers_pattern is set without layers_to_transform; set both or none.", "layers_pattern"
        )
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        raise InvalidAdapter(
            "layers_to_transform cannot be used when target_modules is text; list the modules instead.",
            "layers_to_transform",
        )


def _saved_ends(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = _as_tuple(_names(fields, "modules_to_save"))
    ends = [end_of(name) for name in names]
    unknown = [name for name, end in zip(names, ends, strict=True) if end is None]
    if unknown:
        raise InvalidAdapter(
            f"modules_to_save names {listed(unknown)}; of fully trained modules, {_ENDS} are served.",
            "modules_to_save",
        )
    return tuple(sorted({end for end in ends if end}))


def _token_indices(fields: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    def accepts(value: Any) -> bool:
        lists = value.values() if isinstance(value, dict) else (value,)
        return all(_are_tokens(tokens) and tokens and len(set(tokens)) == len(tokens) for tokens in lists)

    name = "trainable_token_indices"
    value = _read(fields, name, accepts, "a list of different token ids, or an object of such lists", {})
    by_name = value if isinstance(value, dict) else {EMBEDDING: value}
    indices: dict[str, tuple[int, ...]] = {}
    for module, tokens in by_name.items():
        end = end_of(module)
        if end is None or end in indices:
            raise InvalidAdapter(
                f"{name} names {shown(module)}; of trained tokens, those of {_ENDS} are served, each once.",
                name,
            )
        indices[end] = tuple(tokens)
    return indices


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _check_combination(config: LoraConfig, fields: Mapping[str, Any]) -> None:
    """Refuses what PEFT itself refuses to combine, or combines into something else than either."""
    if config.lora_bias and config.use_dora:
        raise InvalidAdapter(
            "lora_bias is set with use_dora, which PEFT does not combine; set one.", "lora_bias"
        )
    if config.token_indices and config.modules_to_save:
        raise InvalidAdapter(
            "trainable_token_indices is set with modules_to_save; use one of them for the embedding and "
            "lm_head.",
            "trainable_token_indices",
        )
    if not config.invocation_tokens:
        return
    name = "alora_invocation_tokens"
    if fields.get("task_type") != "CAUSAL_LM":
        raise InvalidAdapter(f"{name} needs task_type 'CAUSAL_LM': without it PEFT applies nothing.", name)
    for other in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if not _is_off(fields.get(other)):
            raise InvalidAdapter(
                f"{name} is set with {other}, which PEFT does not activate by tokens; use one of them.", name
            )
