"""Which modules of a base model a config puts LoRA on, and with which rank and scale: PEFT's own rules."""

from __future__ import annotations

import math

from adapters.base_model import ENDS, HEAD, BaseModelShape, Spot, suffixes
from adapters.errors import InvalidAdapter, listed, shown
from adapters.patterns import Budget, Pattern
from adapters.peft_config import LoraConfig

_MAX_FLOAT32 = 3.4028235e38


class Targets:
    """What a config says of each module of a base model.

    `paths` are all modules by full name; `spots` the targeted ones, each with its full name, in the base
    model's order; `saved` the ends that are trained in full. Raises `UnsafePattern` when a pattern of the
    config cannot be matched in bounded time, `InvalidAdapter` when the config does not fit the base model.
    """

    def __init__(self, config: LoraConfig, shape: BaseModelShape, root: str) -> None:
        self._config = config
        self._shape = shape
        budget = Budget()
        self._ranks = [(Pattern(text, budget), rank) for text, rank in config.rank_pattern]
        self._alphas = [(Pattern(text, budget), alpha) for text, alpha in config.alpha_pattern]
        self.paths = shape.paths(root)
        self._check_names()
        selected = _Selection(config, budget, root)
        tied = self._tied_ends(selected)
        self.saved = tied or config.modules_to_save if config.modules_to_save else ()
        self.spots = {
            spot: path
            for path, spot in self.paths.items()
            if spot[1] not in self.saved and (selected(path, spot) or spot[1] in tied)
        }
        if not self.spots:
            raise InvalidAdapter(
                "target_modules, with exclude_modules and layers_to_transform, selects no module of the base "
                f"model; it has {', '.join(shape.modules)} in layers 0 to {shape.num_layers - 1}.",
                "target_modules",
            )
        self._resolved = {spot: self._resolve(path) for spot, path in self.spots.items()}

    def rank_and_scale(self, spot: Spot) -> tuple[int, float]:
        """Of a targeted module. Raises `InvalidAdapter` when it is more than is served."""
        rank, scale = self._resolved[spot]
        if rank > self._shape.max_lora_rank:
            raise InvalidAdapter(
                f"The config gives {shown(self.spots[spot])} rank {rank}; the largest rank served is "
                f"{self._shape.max_lora_rank}.",
                "r" if rank == self._config.r else "rank_pattern",
            )
        if abs(scale) > _MAX_FLOAT32:
            raise InvalidAdapter(
                f"The scale {scale} of {shown(self.spots[spot])} overflows float32; lower lora_alpha.",
                "lora_alpha",
            )
        return rank, scale

    def _tied_ends(self, selected: _Selection) -> tuple[str, ...]:
        """Both ends, where PEFT trains them as one: `ensure_weight_tying` on a model that ties them."""
        config = self._config
        if not (config.ensure_weight_tying and self._shape.tied_embeddings and self._shape.vocab_size):
            return ()
        # PEFT asks the bare names here, not the full ones: a pattern for 'model.embed_tokens' does not tie.
        return ENDS if config.modules_to_save or any(selected.names(end) for end in ENDS) else ()

    def _check_names(self) -> None:
        config = self._config
        if isinstance(config.target_modules, tuple):
            known = {suffix for path in self.paths for suffix in suffixes(path)}
            unknown = [name for name in config.target_modules if name not in known]
            if unknown:
                ends = ", embed_tokens, lm_head" if (None, HEAD) in self.paths.values() else ""
                raise InvalidAdapter(
                    f"target_modules names {listed(unknown)}, which the base model does not have; LoRA is "
                    f"served on {', '.join(self._shape.modules)}{ends} in layers 0 to "
                    f"{self._shape.num_layers - 1}.",
                    "target_modules",
                )
        beyond = [layer for layer in config.layers_to_transform or () if layer >= self._shape.num_layers]
        if beyond:
            raise InvalidAdapter(
                f"layers_to_transform names layer {beyond[0]}, but the base model has layers 0 to "
                f"{self._shape.num_layers - 1}.",
                "layers_to_transform",
            )

    def _resolve(self, path: str) -> tuple[int, float]:
        config = self._config
        rank = next((rank for pattern, rank in self._ranks if pattern.matches_suffix(path)), config.r)
        alpha = next(
            (alpha for pattern, alpha in self._alphas if pattern.matches_suffix(path)), config.lora_alpha
        )
        return rank, alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


class _Selection:
    """PEFT's rule for which modules an adapter is on (its `check_target_module_exists`)."""

    def __init__(self, config: LoraConfig, budget: Budget, root: str) -> None:
        self._targets = _Matcher(config.target_modules, budget, all_linear=True)
        self._excludes = _Matcher(config.exclude_modules, budget)
        patterns = [Pattern(text, budget) for text in config.layers_pattern]
        self._layers = None if config.layers_to_transform is None else frozenset(config.layers_to_transform)
        self._full_names = frozenset(config.target_modules) if self._layers is not None else frozenset()
        blocks = f"{root}.layers"
        self._layers_named = not patterns or any(pattern.matches_suffix(blocks) for pattern in patterns)

    def __call__(self, path: str, spot: Spot) -> bool:
        if self._excludes(path, spot) or not self._targets(path, spot):
            return False
        if self._layers is None or path in self._full_names:  # a full name is taken whatever its layer
            return True
        return self._layers_named and spot[0] in self._layers

    def names(self, end: str) -> bool:
        """Whether target_modules names an end, as PEFT asks where it ties."""
        return self._targets.names(end)


class _Matcher:
    """Modules by a list of names and suffixes, or by a regular expression over whole names."""

    def __init__(self, modules: tuple[str, ...] | str, budget: Budget, *, all_linear: bool = False) -> None:
        self._all = all_linear and isinstance(modules, str) and modules.lower() == "all-linear"
        self._pattern = Pattern(modules, budget) if isinstance(modules, str) else None
        self._names = frozenset(modules) if isinstance(modules, tuple) else frozenset()

    def __call__(self, path: str, spot: Spot) -> bool:
        if self._all:
            return spot[0] is not None  # PEFT leaves lm_head out
        if self._pattern is not None:
            return self._pattern.matches_whole(path)
        return any(suffix in self._names for suffix in suffixes(path))

    def names(self, end: str) -> bool:
        if self._pattern is not None:
            return self._pattern.matches_whole(end)
        return any(name.rpartition(".")[2] == end for name in self._names)
