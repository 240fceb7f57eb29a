"""The normal form of an adapter: everything in its files that decides a result, and where its bytes lie.

Torch-free. `adapters.reader.read_layout` makes it from a folder; the digest is taken over it, and an engine
loads by it. Shapes are PEFT's. With `W` a base weight [out, in], an adapted layer computes

    lora:      y += scale * (x Aᵀ) Bᵀ  (+ scale * bias)
    DoRA:      y  = gain ∘ (x Wᵀ + scale * (x Aᵀ) Bᵀ) + the base's bias,  gain = magnitude / ‖W + scale * B A‖

where the norm is over each output's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Place = tuple[int, str]
"""A linear layer: the decoder layer's index, and the module's name, as in ``(3, "q_proj")``."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes in one of the adapter's files, row-major, little-endian."""

    name: str
    """As in the file."""
    file: str
    """The file's name in the adapter's folder."""
    dtype: str
    """F32, F16 or BF16."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of one layer.

    A linear layer: ``a`` [rank, in], ``b`` [out, rank]. The embedding, which reads columns of A by token:
    ``a`` [rank, vocabulary], ``b`` [hidden, rank].
    """

    rank: int
    scale: float
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
    a: StoredTensor
    b: StoredTensor
    bias: StoredTensor | None = None
    """[out], not yet scaled: of `lora_bias`. Linear layers only, and never with a magnitude."""
    magnitude: StoredTensor | None = None
    """[out] (of the embedding: [hidden]): of DoRA."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Rows of the embedding, or of lm_head, that replace the base's."""

    indices: tuple[int, ...]
    """Of tokens, without repetition, in the order of the rows."""
    rows: StoredTensor
    """[len(indices), hidden]."""


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """A tensor as the digest sees it."""

    name: str
    """The same for every way to write the files."""
    scale: float
    """Of the low-rank update that the tensor belongs to; 1 for any other."""
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """An adapter laid against a base model.

    The embedding and lm_head apply in this order: the saved weight takes the base's place, trained rows
    replace rows of it, and the low-rank update (with its DoRA norm) is on top of the result. Where PEFT ties
    lm_head to the embedding, both fields hold the same tensor.
    """

    linear: Mapping[Place, LowRank]
    """In order of layer, then module as the base model lists them."""
    vocab_size: int
    """Rows of the embedding and of lm_head under this adapter: more than the base's where it adds tokens."""
    embedding: LowRank | None = None
    lm_head: LowRank | None = None
    saved_embedding: StoredTensor | None = None
    """[vocab_size, hidden]."""
    saved_lm_head: StoredTensor | None = None
    """[vocab_size, hidden]."""
    embedding_tokens: TrainedTokens | None = None
    lm_head_tokens: TrainedTokens | None = None
    invocation_tokens: tuple[int, ...] = ()
    """Activated LoRA: the adapter applies from the last occurrence of these on. Empty: everywhere."""
    trains_whole_ends: bool = False
    """Whether a saved weight was trained (`modules_to_save`), and is not only the base's, saved along."""
    parts: tuple[LayoutPart, ...] = ()
    """Every tensor of the files once, by name: those above, and what PEFT writes and does not read."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What of the config decides the result and no tensor shows, as JSON can hold it."""

    @property
    def rank(self) -> int:
        """The largest of the linear layers'; 0 where the adapter has none."""
        return max((update.rank for update in self.linear.values()), default=0)

    @property
    def has_vectors(self) -> bool:
        """Whether a linear layer has a bias or a magnitude."""
        return any(update.bias or update.magnitude for update in self.linear.values())

    @property
    def has_ends(self) -> bool:
        """Whether anything is changed outside the decoder layers."""
        return any(
            (
                self.embedding,
                self.lm_head,
                self.saved_embedding,
                self.saved_lm_head,
                self.embedding_tokens,
                self.lm_head_tokens,
            )
        )

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of what is adapted: linear layers in the base model's order, then the two ends."""
        names = dict.fromkeys(module for _, module in self.linear)
        if self.embedding or self.saved_embedding or self.embedding_tokens:
            names["embed_tokens"] = None
        if self.lm_head or self.saved_lm_head or self.lm_head_tokens:
            names["lm_head"] = None
        return tuple(names)
