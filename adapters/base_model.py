"""What of a base model an adapter must fit, and how PEFT names its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from adapters.errors import InvalidAdapter, listed

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
ENDS = (EMBEDDING, HEAD)
"""The two modules outside the decoder layers that an adapter may change."""

MAX_ADDED_TOKENS = 65_536

Spot = tuple[int | None, str]
"""A module: (layer, name) of a linear layer, or (None, name) of an end."""

ROOTS = ("model", "model.language_model", "language_model.model")
"""Where the decoder lies in the program that trained: a text model, and the text half of models that also see
images, as transformers names it now and as it did before version 4.52."""

_PARENTS = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip
_BACK_TO_HIDDEN = ("o_proj", "down_proj")


def llama_modules(*, hidden: int, inner: int, q_out: int, kv_out: int) -> dict[str, tuple[int, int]]:
    """(in, out) features of each linear layer of a decoder layer of the Llama family, by PEFT's name."""
    return {
        "q_proj": (hidden, q_out),
        "k_proj": (hidden, kv_out),
        "v_proj": (hidden, kv_out),
        "o_proj": (q_out, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


@dataclass(frozen=True, slots=True)
class BaseModelShape:
    """What of a base model an adapter must fit."""

    num_layers: int
    modules: Mapping[str, tuple[int, int]] = field(hash=False)
    """The linear layers of each decoder layer: ``q_proj`` → (in_features, out_features)."""
    max_lora_rank: int
    vocab_size: int = 0
    """Rows of the embedding; 0 where it is not known: adapters of the embedding or lm_head are refused."""
    tied_embeddings: bool = False
    """Whether lm_head is the embedding."""

    @property
    def hidden_size(self) -> int:
        """Columns of the embedding."""
        for name, (in_features, out_features) in self.modules.items():
            return out_features if name in _BACK_TO_HIDDEN else in_features
        return 0

    def paths(self, root: str) -> dict[str, Spot]:
        """Every module that can be adapted, by its full name under `root`: layer by layer, then the ends.

        Raises `InvalidAdapter` for a base model whose layers have other names than Llama's.
        """
        unplaced = sorted(self.modules.keys() - _PARENTS.keys())
        if unplaced:
            raise InvalidAdapter(
                f"The base model has linear layers ({listed(unplaced)}) that adapters cannot be laid against "
                "here; only models of the Llama family can have them."
            )
        paths: dict[str, Spot] = {
            f"{root}.layers.{layer}.{_PARENTS[module]}.{module}": (layer, module)
            for layer in range(self.num_layers)
            for module in self.modules
        }
        if self.vocab_size and self.hidden_size:
            paths[f"{root}.{EMBEDDING}"] = (None, EMBEDDING)
            paths[head_path(root)] = (None, HEAD)
        return paths


def head_path(root: str) -> str:
    """The full name of lm_head."""
    return f"language_model.{HEAD}" if root == "language_model.model" else HEAD


def suffixes(path: str) -> Iterator[str]:
    """A dotted name, and what follows each of its dots."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def end_of(name: str) -> str | None:
    """The end that PEFT finds by a full or shortened module name; None for any other module's."""
    return _END_OF.get(name)


_END_OF = {
    suffix: end
    for root in ROOTS
    for end, path in ((EMBEDDING, f"{root}.{EMBEDDING}"), (HEAD, head_path(root)))
    for suffix in suffixes(path)
}
