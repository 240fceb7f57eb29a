"""Reads an adapter's folder into its layout: every tensor has a place, and every place its tensors.

What is served is then exactly what the files say. A name that PEFT does not write, a module that the config
does not target, a targeted module without tensors, and a tensor that PEFT would pass over are all refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from adapters.adapter_files import CONFIG_FILE
from adapters.base_model import EMBEDDING, ENDS, ROOTS, BaseModelShape, Spot
from adapters.ends import EndRules, Ends
from adapters.errors import InvalidAdapter, listed, shown
from adapters.layout import AdapterLayout, LayoutPart, LowRank, StoredTensor
from adapters.patterns import UnsafePattern
from adapters.peft_config import MAX_CONFIG_BYTES, LoraConfig, parse_config
from adapters.targets import Targets
from adapters.tensor_names import PREFIX, Slot, TensorName, parse_tensor_name, tensor_name
from adapters.weight_files import read_tensors

_Key = tuple[Spot, Slot]
"""What a tensor is to which module."""

_LORA_SLOTS = frozenset({Slot.A, Slot.B, Slot.BIAS, Slot.MAGNITUDE})


def read_layout(folder: Path, shape: BaseModelShape) -> AdapterLayout:
    """Lays the adapter in `folder` against a base model. Reads the config and headers, no weights.

    Raises `InvalidAdapter` that names the fault; OSError when a file cannot be read.
    """
    return lay_out(read_config(folder), read_tensors(folder), shape)


def read_config(folder: Path) -> LoraConfig:
    """The config in `folder`. Raises as `read_layout`."""
    return parse_config(read_raw_config(folder))


def read_raw_config(folder: Path) -> bytes:
    """The config's file, or as much of it as shows that it is too long. Raises as `read_layout`."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise InvalidAdapter(
            f"The adapter has no {CONFIG_FILE}; give the folder that PEFT wrote.", CONFIG_FILE
        )
    with path.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def lay_out(config: LoraConfig, tensors: Sequence[StoredTensor], shape: BaseModelShape) -> AdapterLayout:
    """Lays tensors against a base model as the config says. Raises `InvalidAdapter`."""
    names = {tensor.name: parse_tensor_name(tensor.name) for tensor in tensors}
    root = _root_of(names.values(), shape)
    try:
        targets = Targets(config, shape, root)
    except UnsafePattern as error:
        raise InvalidAdapter(f"A pattern in the config {error}.") from None
    found = _by_place(tensors, names, targets)
    return _Assembly(config, shape, targets, found).layout()


def _root_of(names: Iterable[TensorName | None], shape: BaseModelShape) -> str:
    """Where the decoder lies that the tensors are named for: that under which most of them have a place."""
    paths = [name.path for name in names if name is not None]
    return max(ROOTS, key=lambda root: sum(map(shape.paths(root).__contains__, paths)))


def _by_place(
    tensors: Sequence[StoredTensor], names: dict[str, TensorName | None], targets: Targets
) -> dict[_Key, StoredTensor]:
    found: dict[_Key, StoredTensor] = {}
    infixes: set[str | None] = set()
    lost: list[str] = []
    for tensor in tensors:
        name = names[tensor.name]
        spot = targets.paths.get(name.path) if name else None
        if name is None or spot is None or name.kind not in ("", _kind(spot)):
            lost.append(tensor.name)
            continue
        if name.has_infix_place:
            infixes.add(name.infix)
        if (spot, name.slot) in found:
            raise InvalidAdapter(
                f"The tensors {shown(found[spot, name.slot].name)} and {shown(tensor.name)} have one place; "
                "save one adapter per file.",
                tensor.name,
            )
        found[spot, name.slot] = tensor
    if lost:
        raise _no_place(lost, targets)
    if len(infixes) > 1:
        raise InvalidAdapter(
            "The weights file mixes the tensors of several adapters "
            f"({listed(sorted(str(infix) for infix in infixes))}); save one adapter per file."
        )
    return found


class _Assembly:
    """One adapter's tensors, by place, and what its config says of the places."""

    def __init__(
        self,
        config: LoraConfig,
        shape: BaseModelShape,
        targets: Targets,
        found: dict[_Key, StoredTensor],
    ) -> None:
        self._config = config
        self._shape = shape
        self._targets = targets
        self._found = found
        adapted = frozenset(name for layer, name in targets.spots if layer is None)
        self._rules = EndRules(config, shape, adapted, frozenset(targets.saved))

    def layout(self) -> AdapterLayout:
        self._check_complete()
        self._check_wanted()
        updates = {spot: self._update(spot) for spot in self._targets.spots}
        ends = self._ends()
        embedding, head = (updates.get((None, end)) for end in ENDS)
        layout = AdapterLayout(
            linear={(layer, name): update for (layer, name), update in updates.items() if layer is not None},
            vocab_size=ends.vocab_size,
            embedding=embedding,
            lm_head=head,
            saved_embedding=ends.saved.get(ENDS[0]),
            saved_lm_head=ends.saved.get(ENDS[1]),
            embedding_tokens=ends.tokens.get(ENDS[0]),
            lm_head_tokens=ends.tokens.get(ENDS[1]),
            invocation_tokens=self._config.invocation_tokens,
            trains_whole_ends=bool(self._targets.saved),
            parts=self._parts(),
            settings=self._settings(),
        )
        self._check_activated(layout)
        return layout

    def _check_complete(self) -> None:
        for spot, path in self._targets.spots.items():
            for slot in self._update_slots(spot):
                if (spot, slot) not in self._found:
                    raise _missing(path, slot, spot, "target_modules")
        for end, slot in self._rules.required():
            if ((None, end), slot) not in self._found:
                path = next(path for path, spot in self._targets.paths.items() if spot == (None, end))
                field = "modules_to_save" if slot is Slot.WEIGHT else "trainable_token_indices"
                raise _missing(path, slot, (None, end), field)
        if self._config.lora_bias and (None, EMBEDDING) in self._targets.spots:
            raise InvalidAdapter(
                "lora_bias is set with LoRA on embed_tokens, which PEFT does not combine.", "lora_bias"
            )

    def _check_wanted(self) -> None:
        """Refuses tensors that have a place in the base model but none in the adapter as configured."""
        for (spot, slot), tensor in self._found.items():
            allowed = frozenset(self._update_slots(spot)) if spot in self._targets.spots else frozenset()
            if spot[0] is None:
                allowed |= self._rules.allowed(spot[1])
            if slot in allowed:
                continue
            if slot in (Slot.BIAS, Slot.MAGNITUDE) and spot in self._targets.spots:
                mend = f"set {'lora_bias' if slot is Slot.BIAS else 'use_dora'}=true if it was trained so"
            elif slot in _LORA_SLOTS:
                mend = "add the module to target_modules"
            else:
                mend = "see modules_to_save and trainable_token_indices"
            raise InvalidAdapter(
                f"The tensor {shown(tensor.name)} is not among those of the config's target modules, so PEFT "
                f"would ignore it; {mend}, or save the adapter anew.",
                tensor.name,
            )

    def _update_slots(self, spot: Spot) -> tuple[Slot, ...]:
        """The tensors of a targeted module's low-rank update."""
        return (
            Slot.A,
            Slot.B,
            *((Slot.BIAS,) if self._config.lora_bias else ()),
            *((Slot.MAGNITUDE,) if self._config.use_dora else ()),
        )

    def _update(self, spot: Spot) -> LowRank:
        rank, scale = self._targets.rank_and_scale(spot)
        a, b = self._found[spot, Slot.A], self._found[spot, Slot.B]
        bias, magnitude = self._found.get((spot, Slot.BIAS)), self._found.get((spot, Slot.MAGNITUDE))
        if spot[0] is not None:
            in_features, out_features = self._shape.modules[spot[1]]
        else:  # the vocabulary's size is checked once all tensors have told theirs
            vocab = a.shape[-1] if spot[1] == EMBEDDING else b.shape[0] if b.shape else 0
            hidden = self._shape.hidden_size
            in_features, out_features = (vocab, hidden) if spot[1] == EMBEDDING else (hidden, vocab)
        for tensor, expected in (
            (a, (rank, in_features)),
            (b, (out_features, rank)),
            (bias, (out_features,)),
            (magnitude, (out_features,)),
        ):
            if tensor is not None and tensor.shape != expected:
                raise InvalidAdapter(
                    f"The tensor {shown(tensor.name)} has shape {list(tensor.shape)}, but rank {rank} in the "
                    f"config and the base model's {spot[1]} make it {list(expected)}; check r and "
                    "rank_pattern, and that the adapter was trained on this base model.",
                    tensor.name,
                )
        return LowRank(rank, scale, a, b, bias, magnitude)

    def _ends(self) -> Ends:
        found = {(spot[1], slot): tensor for (spot, slot), tensor in self._found.items() if spot[0] is None}
        return self._rules.resolve(found)

    def _check_activated(self, layout: AdapterLayout) -> None:
        if not layout.invocation_tokens:
            return
        name = "alora_invocation_tokens"
        vocab_size = self._shape.vocab_size
        beyond = [token for token in layout.invocation_tokens if 0 < vocab_size <= token]
        if beyond:
            raise InvalidAdapter(
                f"{name} names token {beyond[0]}, but the base model has {vocab_size}.", name
            )
        if layout.embedding or layout.saved_embedding or layout.saved_lm_head:
            raise InvalidAdapter(
                f"{name} is set, but the adapter also changes the embedding or lm_head as a whole, which "
                "PEFT does before the invocation too; save it with save_embedding_layers=False.",
                name,
            )

    def _parts(self) -> tuple[LayoutPart, ...]:
        parts = []
        for (spot, slot), tensor in self._found.items():
            layer, module = spot
            place = module if layer is None else f"layers.{layer}.{module}"
            lora = slot in _LORA_SLOTS
            scale = self._targets.rank_and_scale(spot)[1] if lora else 1.0
            parts.append(LayoutPart(f"{place}.{slot}", scale, tensor))
        return tuple(sorted(parts, key=lambda part: part.name))

    def _settings(self) -> dict[str, object]:
        """What of the config decides the result and no tensor shows; nothing for a plain LoRA."""
        config = self._config
        settings: dict[str, object] = {}
        if config.invocation_tokens:
            settings["invocation_tokens"] = list(config.invocation_tokens)
        if config.token_indices:
            settings["token_indices"] = {end: list(tokens) for end, tokens in config.token_indices.items()}
        if config.ensure_weight_tying and any(spot[0] is None for spot, _ in self._found):
            settings["tie"] = True
        return settings


def _kind(spot: Spot) -> str:
    return "embedding" if spot == (None, EMBEDDING) else "linear"


def _missing(path: str, slot: Slot, spot: Spot, field: str) -> InvalidAdapter:
    name = tensor_name(path, slot, embedding=_kind(spot) == "embedding")
    return InvalidAdapter(
        f"The config targets {shown(path)}, but the weights file has no {shown(name)}; save the adapter "
        f"anew, or leave the module out of {field}.",
        name,
    )


_REASONS = (
    (".base_layer.bias", "trained biases (bias='all' or 'lora_only') are not supported"),
    (".bias", "trained biases are not supported"),
    ("embed_tokens", "the base model is not known to have such an embedding"),
    ("lm_head", "the base model is not known to have such an lm_head"),
    ("modules_to_save", "of fully trained modules, embed_tokens and lm_head are served"),
)


def _no_place(names: list[str], targets: Targets) -> InvalidAdapter:
    name = names[0]
    reason = next((reason for part, reason in _REASONS if part in name), None)
    if reason is None:
        known = next(iter(targets.spots.values()))
        reason = (
            f"nothing of the base model has this name; expected names like '{PREFIX}{known}.lora_A.weight'"
        )
    if len(names) == 1:
        return InvalidAdapter(f"The tensor {shown(name)} cannot be served: {reason}.", name)
    return InvalidAdapter(f"The tensors {listed(names, 3)} cannot be served: {reason}.", name)
