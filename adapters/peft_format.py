"""An adapter in PEFT's format, laid against a base model: which tensor is what, and with which scale.

A PEFT folder holds `adapter_config.json` and `adapter_model.safetensors`. Tensor names are

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight           [rank, in_features]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.default.weight   [out_features, rank]

where ``.default`` (the adapter's name in the training program) may be there or not. A name maps to one side
of one linear layer or is refused; a layer that the config targets has both sides or is refused; so what is
served is exactly what the files say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.base_model import BaseModelShape
from adapters.errors import InvalidAdapter, listed, shown
from adapters.patterns import Budget, Pattern, UnsafePattern
from adapters.peft_config import LoraConfig, parse_config
from adapters.safetensors_header import TensorInfo, read_header

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "BaseModelShape",
    "InvalidAdapter",
    "LoraConfig",
    "LoraTensor",
    "TensorInfo",
    "map_tensors",
    "parse_config",
    "read_header",
]

DTYPES = ("F32", "F16", "BF16")

_PREFIX = "base_model.model."
_BLOCKS = "model.layers"
_PARENTS = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip
_MAX_FLOAT32 = 3.4028235e38

_TENSOR_NAME = re.compile(r"(?P<path>\S+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>[^.\s]+))?\.weight")

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

Side = Literal["A", "B"]
_SIDES: tuple[Side, ...] = ("A", "B")


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One side of the low-rank update of one linear layer: ``y += scale * (x @ A.T) @ B.T``."""

    name: str
    """As in the file."""
    layer: int
    module: str
    side: Side
    rank: int
    dtype: str
    """F32, F16 or BF16."""
    shape: tuple[int, int]
    """A: (rank, in_features); B: (out_features, rank)."""
    scale: float
    """Of the module: alpha / rank, or alpha / sqrt(rank) for rsLoRA; the same on both sides."""
    offset: int
    """Of its bytes, from the start of the file."""
    nbytes: int

    @property
    def canonical_name(self) -> str:
        """The same for every way to write the name."""
        return f"layers.{self.layer}.{self.module}.{self.side}"


def map_tensors(config: LoraConfig, header: Sequence[TensorInfo], shape: BaseModelShape) -> list[LoraTensor]:
    """Maps every tensor of `header` to its place, in order of layer, then module as in `shape`, then A, B.

    Raises `InvalidAdapter` that names the tensor or field: for a tensor that has no place, a targeted layer
    without tensors, and a rank, shape or dtype that does not fit.
    """
    try:
        layout = _Layout(config, shape)
    except UnsafePattern as error:
        raise InvalidAdapter(f"A pattern in the config {error}.") from None
    found = _by_place(header, layout)
    mapped: list[LoraTensor] = []
    for (layer, module), path in layout.targets.items():
        for side in _SIDES:
            tensor = found.get((layer, module, side))
            if tensor is None:
                name = f"{_PREFIX}{path}.lora_{side}.weight"
                raise InvalidAdapter(
                    f"The config targets {shown(path)}, but the weights file has no {shown(name)}; save the "
                    "adapter anew, or leave the module out of target_modules.",
                    name,
                )
            mapped.append(_fit(tensor, layout, layer, module, side))
    return mapped


def is_pickle(file_name: str) -> bool:
    """Whether a file is what older training programs save weights as."""
    return file_name.endswith(_PICKLE_SUFFIXES)


def pickle_refused(file_name: str) -> InvalidAdapter:
    """The error for such a file."""
    return InvalidAdapter(
        f"{shown(file_name)} is a pickle, which can run code when it is read; save the adapter with "
        f"save_pretrained(..., safe_serialization=True) and upload {WEIGHTS_FILE}.",
        file_name,
    )


class _Layout:
    """The modules of a base model by PEFT's names, and what a config says of each.

    Raises `UnsafePattern` when a pattern of the config cannot be matched in bounded time.
    """

    def __init__(self, config: LoraConfig, shape: BaseModelShape) -> None:
        self._config = config
        self.shape = shape
        unplaced = sorted(shape.modules.keys() - _PARENTS.keys())
        if unplaced:
            raise InvalidAdapter(
                f"The base model has linear layers ({listed(unplaced)}) that adapters cannot be laid against "
                "here; only models of the Llama family can have them."
            )
        budget = Budget()
        self._ranks = [(Pattern(text, budget), rank) for text, rank in config.rank_pattern]
        self._alphas = [(Pattern(text, budget), alpha) for text, alpha in config.alpha_pattern]
        self.paths = {
            f"{_BLOCKS}.{layer}.{_PARENTS[module]}.{module}": (layer, module)
            for layer in range(shape.num_layers)
            for module in shape.modules
        }
        self._check_names()
        selected = _Selection(config, budget)
        self.targets = {place: path for path, place in self.paths.items() if selected(path, place[0])}
        if not self.targets:
            raise InvalidAdapter(
                "target_modules, with exclude_modules and layers_to_transform, selects no linear layer of "
                f"the base model; it has {', '.join(shape.modules)} in layers 0 to {shape.num_layers - 1}.",
                "target_modules",
            )
        self._resolved = {path: self._resolve(path) for path in self.targets.values()}

    def _check_names(self) -> None:
        config = self._config
        if isinstance(config.target_modules, tuple):
            known = {suffix for path in self.paths for suffix in _suffixes(path)}
            unknown = [name for name in config.target_modules if name not in known]
            if unknown:
                raise InvalidAdapter(
                    f"target_modules names {listed(unknown)}, which the base model does not have; LoRA is "
                    f"served on {', '.join(self.shape.modules)} in layers 0 to {self.shape.num_layers - 1}.",
                    "target_modules",
                )
        beyond = [layer for layer in config.layers_to_transform or () if layer >= self.shape.num_layers]
        if beyond:
            raise InvalidAdapter(
                f"layers_to_transform names layer {beyond[0]}, but the base model has layers 0 to "
                f"{self.shape.num_layers - 1}.",
                "layers_to_transform",
            )

    def _resolve(self, path: str) -> tuple[int, float]:
        config = self._config
        rank = next((rank for pattern, rank in self._ranks if pattern.matches_suffix(path)), config.r)
        alpha = next(
            (alpha for pattern, alpha in self._alphas if pattern.matches_suffix(path)), config.lora_alpha
        )
        return rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank

    def rank_and_scale(self, path: str) -> tuple[int, float]:
        """Of a targeted module. Raises `InvalidAdapter` when it is more than is served."""
        rank, scale = self._resolved[path]
        if rank > self.shape.max_lora_rank:
            raise InvalidAdapter(
                f"The config gives {shown(path)} rank {rank}; the largest rank served is "
                f"{self.shape.max_lora_rank}.",
                "r" if rank == self._config.r else "rank_pattern",
            )
        if abs(scale) > _MAX_FLOAT32:
            raise InvalidAdapter(
                f"The scale {scale} of {shown(path)} overflows float32; lower lora_alpha.", "lora_alpha"
            )
        return rank, scale


class _Selection:
    """PEFT's rule for which modules an adapter is on (its `check_target_module_exists`)."""

    def __init__(self, config: LoraConfig, budget: Budget) -> None:
        self._targets = _Matcher(config.target_modules, budget, all_linear=True)
        self._excludes = _Matcher(config.exclude_modules, budget)
        patterns = [Pattern(text, budget) for text in config.layers_pattern]
        self._layers = None if config.layers_to_transform is None else frozenset(config.layers_to_transform)
        self._full_names = frozenset(config.target_modules) if self._layers is not None else frozenset()
        self._layers_named = not patterns or any(pattern.matches_suffix(_BLOCKS) for pattern in patterns)

    def __call__(self, path: str, layer: int) -> bool:
        if self._excludes(path) or not self._targets(path):
            return False
        if self._layers is None or path in self._full_names:  # a full name is taken whatever its layer
            return True
        return self._layers_named and layer in self._layers


class _Matcher:
    """Modules by a list of names and suffixes, or by a regular expression over whole names."""

    def __init__(self, modules: tuple[str, ...] | str, budget: Budget, *, all_linear: bool = False) -> None:
        self._all = all_linear and isinstance(modules, str) and modules.lower() == "all-linear"
        self._pattern = Pattern(modules, budget) if isinstance(modules, str) else None
        self._names = frozenset(modules) if isinstance(modules, tuple) else frozenset()

    def __call__(self, path: str) -> bool:
        if self._all:
            return True
        if self._pattern is not None:
            return self._pattern.matches_whole(path)
        return any(suffix in self._names for suffix in _suffixes(path))


def _suffixes(path: str) -> Iterator[str]:
    """A dotted name, and what follows each of its dots."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def _by_place(header: Sequence[TensorInfo], layout: _Layout) -> dict[tuple[int, str, str], TensorInfo]:
    found: dict[tuple[int, str, str], TensorInfo] = {}
    adapters: set[str | None] = set()
    for tensor in header:
        match = _TENSOR_NAME.fullmatch(tensor.name)
        path = match["path"].removeprefix(_PREFIX) if match and match["path"].startswith(_PREFIX) else None
        if match is None or path not in layout.paths:
            raise _no_place(tensor.name)
        place = layout.paths[path]
        if place not in layout.targets:
            raise InvalidAdapter(
                f"The tensor {shown(tensor.name)} belongs to a module that the config does not target, so "
                "PEFT would ignore it; add the module to target_modules or save the adapter anew.",
                tensor.name,
            )
        adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise InvalidAdapter(
                "The weights file mixes the tensors of several adapters "
                f"({listed([str(a) for a in adapters])}); save one adapter per file.",
                tensor.name,
            )
        found[*place, match["side"]] = tensor
    return found


def _no_place(name: str) -> InvalidAdapter:
    kinds = {
        "lora_magnitude_vector": "it belongs to DoRA, which is not supported",
        "lora_embedding_": "LoRA on embeddings is not supported",
        "modules_to_save": "fully trained modules are not supported",
        "trainable_tokens": "trained token embeddings are not supported",
        ".bias": "trained biases are not supported",
        "lm_head": "LoRA on lm_head is not supported",
        "embed_tokens": "trained embeddings are not supported",
    }
    reason = next((reason for part, reason in kinds.items() if part in name), None) or (
        "no linear layer of the base model has this name; expected names like "
        "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"
    )
    return InvalidAdapter(f"The tensor {shown(name)} cannot be served: {reason}.", name)


def _fit(tensor: TensorInfo, layout: _Layout, layer: int, module: str, side: Side) -> LoraTensor:
    """Checks a tensor of a targeted module against the rank in the config and the base model's sizes."""
    if tensor.dtype not in DTYPES:
        raise InvalidAdapter(
            f"The tensor {shown(tensor.name)} has dtype {tensor.dtype}; save it as one of "
            f"{', '.join(DTYPES)}.",
            tensor.name,
        )
    rank, scale = layout.rank_and_scale(layout.targets[layer, module])
    in_features, out_features = layout.shape.modules[module]
    expected = (rank, in_features) if side == "A" else (out_features, rank)
    if tensor.shape != expected:
        raise InvalidAdapter(
            f"The tensor {shown(tensor.name)} has shape {list(tensor.shape)}, but rank {rank} in the config "
            f"and the base model's {module} make it {list(expected)}; check r and rank_pattern, and that the "
            "adapter was trained on this base model.",
            tensor.name,
        )
    return LoraTensor(
        tensor.name, layer, module, side, rank, tensor.dtype, expected, scale, tensor.offset, tensor.nbytes
    )
