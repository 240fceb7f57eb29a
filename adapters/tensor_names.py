"""The names that PEFT gives to an adapter's tensors, taken apart.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight
    └─── prefix ───┘ └───────────── path ──────────┘ └ slot, infix ┘

The infix is the adapter's name in the training program; most files leave it out. Which names there are was
taken from files that PEFT wrote, from its first versions on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "base_model.model."
MAX_NAME_CHARS = 512


class Slot(StrEnum):
    """What a tensor is to its module. The values are the last parts of canonical names."""

    A = "A"
    B = "B"
    BIAS = "bias"
    MAGNITUDE = "magnitude"
    WEIGHT = "weight"
    """A full weight: the trained copy of `modules_to_save`, else the base's own as PEFT saved it."""
    BASE = "base_layer"
    """The base's own weight, beneath LoRA."""
    TOKENS = "tokens"
    TOKENS_BASE = "tokens_base"
    """The base's own weight, beneath trained tokens."""
    COPY = "copy"
    """A repetition of WEIGHT that PEFT writes for a resized vocabulary and does not read."""
    ORIGINAL = "original"
    """The base's own weight, beside the trained copy."""


_SLOTS: dict[tuple[str, ...], Slot] = {
    ("lora_A", "weight"): Slot.A,
    ("lora_B", "weight"): Slot.B,
    ("lora_B", "bias"): Slot.BIAS,
    ("lora_embedding_A",): Slot.A,
    ("lora_embedding_B",): Slot.B,
    ("lora_magnitude_vector",): Slot.MAGNITUDE,
    ("lora_magnitude_vector", "weight"): Slot.MAGNITUDE,
    ("weight",): Slot.WEIGHT,
    ("base_layer", "weight"): Slot.BASE,
    ("token_adapter", "trainable_tokens_delta"): Slot.TOKENS,
    ("token_adapter", "base_layer", "weight"): Slot.TOKENS_BASE,
    ("modules_to_save", "weight"): Slot.COPY,
    ("original_module", "weight"): Slot.ORIGINAL,
}
_FIRST = frozenset(tail[0] for tail in _SLOTS)
# Where the adapter's name may stand, by the first part of a tail.
_INFIX_AT = {
    "lora_A": 1, "lora_B": 1, "lora_embedding_A": 1, "lora_embedding_B": 1, "lora_magnitude_vector": 1,
    "modules_to_save": 1, "token_adapter": 2,
}  # fmt: skip
_PARAMETERS = ("weight", "bias")

_EMBEDDING_ONLY = ("lora_embedding_A", "lora_embedding_B")
_LINEAR_ONLY = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name taken apart. `path` is the module's full name in the base model."""

    path: str
    slot: Slot
    infix: str | None
    """None where the name has none; a slot that cannot have one has None."""
    has_infix_place: bool
    """Whether a name of this slot may have an infix."""
    kind: str
    """``embedding`` or ``linear`` where only a module of this kind has such a tensor, else empty."""


def parse_tensor_name(name: str) -> TensorName | None:
    """Takes a name apart; None for one that PEFT does not write."""
    if len(name) > MAX_NAME_CHARS or not name.startswith(PREFIX) or name.split() != [name]:
        return None
    parts = name.removeprefix(PREFIX).split(".")
    start = next((i for i, part in enumerate(parts) if part in _FIRST), None)
    if not start or not all(parts):  # no slot, or no path before it
        return None
    tail = tuple(parts[start:])
    place = _INFIX_AT.get(tail[0])
    slot, infix = _SLOTS.get(tail), None
    if slot is None and place is not None and len(tail) > place and tail[place] not in _PARAMETERS:
        slot, infix = _SLOTS.get(tail[:place] + tail[place + 1 :]), tail[place]
    if slot is None:
        return None
    kind = "embedding" if tail[0] in _EMBEDDING_ONLY else "linear" if tail[0] in _LINEAR_ONLY else ""
    return TensorName(".".join(parts[:start]), slot, infix, place is not None, kind)


def tensor_name(path: str, slot: Slot, *, embedding: bool) -> str:
    """The name that PEFT writes today for a tensor, without infix."""
    tails = [tail for tail, other in _SLOTS.items() if other is slot]
    wrong = _LINEAR_ONLY if embedding else _EMBEDDING_ONLY
    tail = next(tail for tail in tails if tail[0] not in wrong)
    return f"{PREFIX}{path}.{'.'.join(tail)}"
