"""What an adapter does to the embedding and lm_head: PEFT's rules for their many kinds of tensors.

On a base model that ties the two, they are one parameter: whatever a file holds as the base's own weight of
either is loaded into both, and lm_head's comes last. A trained copy (`modules_to_save`) is of one end only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from adapters.base_model import EMBEDDING, ENDS, HEAD, MAX_ADDED_TOKENS, BaseModelShape
from adapters.errors import InvalidAdapter, shown
from adapters.layout import StoredTensor, TrainedTokens
from adapters.peft_config import LoraConfig
from adapters.tensor_names import Slot

_VOCABULARY_AXIS = {
    (EMBEDDING, Slot.A): 1,
    (HEAD, Slot.B): 0,
    (HEAD, Slot.BIAS): 0,
    (HEAD, Slot.MAGNITUDE): 0,
    **{
        (end, slot): 0
        for end in ENDS
        for slot in (Slot.WEIGHT, Slot.BASE, Slot.TOKENS_BASE, Slot.COPY, Slot.ORIGINAL)
    },
}
"""Where a tensor's shape tells the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The part of a layout that concerns the ends, but for their low-rank updates."""

    vocab_size: int
    saved: Mapping[str, StoredTensor]
    tokens: Mapping[str, TrainedTokens]


class EndRules:
    """Which tensors the ends have under a config, and what they come to.

    Args:
        adapted: the ends that LoRA is on.
        saved: the ends of `modules_to_save`, or both where PEFT ties them.
    """

    def __init__(
        self, config: LoraConfig, shape: BaseModelShape, adapted: frozenset[str], saved: frozenset[str]
    ) -> None:
        self._shape = shape
        self._adapted = adapted
        self._saved = saved
        self._tokens = dict(config.token_indices)
        indices = list(self._tokens.values())
        # PEFT stores one set of rows for both where the base ties them, unless told of different tokens.
        self._tied_tokens = (
            shape.tied_embeddings
            and EMBEDDING in self._tokens
            and all(each == indices[0] for each in indices)
        )
        if (
            shape.tied_embeddings
            and config.ensure_weight_tying
            and len(indices) == 2
            and not self._tied_tokens
        ):
            raise InvalidAdapter(
                "trainable_token_indices names different tokens for embed_tokens and lm_head, which "
                "ensure_weight_tying forbids.",
                "trainable_token_indices",
            )
        self._with_tokens = frozenset(ENDS) if self._tied_tokens else frozenset(self._tokens)
        both = sorted(self._with_tokens & adapted)
        if both:
            raise InvalidAdapter(
                f"trainable_token_indices and target_modules are both set for {both[0]}, which PEFT does not "
                "combine; use one of them.",
                "trainable_token_indices",
            )

    def required(self) -> Iterator[tuple[str, Slot]]:
        """The tensors, beside LoRA's own, without which the adapter is incomplete."""
        yield from ((end, Slot.WEIGHT) for end in ENDS if end in self._saved)
        yield from (
            (end, Slot.TOKENS)
            for end in ENDS
            if end in self._tokens and not (self._tied_tokens and end == HEAD)
        )

    def allowed(self, end: str) -> frozenset[Slot]:
        """The tensors, beside LoRA's own, that PEFT reads or writes for an end."""
        if end in self._saved:
            return frozenset({Slot.WEIGHT, Slot.COPY, Slot.ORIGINAL})
        if end in self._with_tokens:
            return frozenset({Slot.TOKENS, Slot.TOKENS_BASE})
        return frozenset({Slot.BASE} if end in self._adapted else {Slot.WEIGHT})

    def resolve(self, found: Mapping[tuple[str, Slot], StoredTensor]) -> Ends:
        """Lays out tensors that are complete and allowed. Raises `InvalidAdapter` for a wrong shape."""
        vocab_size = self._vocab_size(found)
        hidden = self._shape.hidden_size
        for (end, slot), tensor in found.items():
            if slot is Slot.TOKENS:
                _check_shape(tensor, (len(self._indices(end)), hidden))
            elif slot in (Slot.WEIGHT, Slot.BASE, Slot.TOKENS_BASE, Slot.COPY, Slot.ORIGINAL):
                _check_shape(tensor, (vocab_size, hidden))
        saved: dict[str, StoredTensor]
        saved = {end: tensor for end in ENDS if (tensor := self._base_weight(end, found)) is not None}
        if self._shape.tied_embeddings and saved:
            shared = saved.get(HEAD) or saved[EMBEDDING]
            saved = {end: shared for end in ENDS}
        saved.update({end: found[end, Slot.WEIGHT] for end in self._saved})
        tokens = {
            end: TrainedTokens(
                self._indices(end), found[EMBEDDING if self._tied_tokens else end, Slot.TOKENS]
            )
            for end in sorted(self._with_tokens)
        }
        self._check_added(vocab_size, saved, tokens)
        return Ends(vocab_size, saved, tokens)

    def _indices(self, end: str) -> tuple[int, ...]:
        return self._tokens[EMBEDDING if self._tied_tokens else end]

    def _base_weight(self, end: str, found: Mapping[tuple[str, Slot], StoredTensor]) -> StoredTensor | None:
        """What the file holds of the base's own weight of an end."""
        slots = [Slot.BASE, Slot.TOKENS_BASE, Slot.ORIGINAL]
        if end not in self._saved:
            slots.append(Slot.WEIGHT)
        return next((found[end, slot] for slot in slots if (end, slot) in found), None)

    def _vocab_size(self, found: Mapping[tuple[str, Slot], StoredTensor]) -> int:
        """The one size that all tensors tell; where none does, that which the trained tokens need."""
        sizes: dict[int, StoredTensor] = {}
        for key, tensor in found.items():
            axis = _VOCABULARY_AXIS.get(key)
            if axis is not None and axis < len(tensor.shape):
                sizes.setdefault(tensor.shape[axis], tensor)
        if len(sizes) > 1:
            (size, first), (other, second) = list(sizes.items())[:2]
            raise InvalidAdapter(
                f"The tensors {shown(first.name)} and {shown(second.name)} are of vocabularies of {size} and "
                f"{other} tokens; save the adapter anew.",
                second.name,
            )
        base = self._shape.vocab_size
        top = 1 + max((max(tokens) for tokens in self._tokens.values()), default=-1)
        size, told_by = next(iter(sizes.items()), (max(base, top), None))
        if not base <= size <= base + MAX_ADDED_TOKENS:
            fault = "which cannot be made smaller" if size < base else f"and {MAX_ADDED_TOKENS} more at most"
            raise InvalidAdapter(
                f"The adapter has a vocabulary of {size} tokens; the base model has {base}, {fault}. Check "
                "that it was trained on this base model, and to what size its embeddings were resized.",
                told_by.name if told_by else "trainable_token_indices",
            )
        if top > size:
            raise InvalidAdapter(
                f"trainable_token_indices names token {top - 1}, but the vocabulary has {size}.",
                "trainable_token_indices",
            )
        return size

    def _check_added(
        self, vocab_size: int, saved: Mapping[str, StoredTensor], tokens: Mapping[str, TrainedTokens]
    ) -> None:
        """Every added token needs its row in both ends, or its result would be anybody's guess."""
        added = set(range(self._shape.vocab_size, vocab_size))
        for end in ENDS:
            rows = set(tokens[end].indices) if end in tokens else set()
            if end not in saved and not added <= rows:
                raise InvalidAdapter(
                    f"The adapter adds {len(added)} tokens to the vocabulary but does not hold their rows of "
                    f"{end}, which would be random; save it with save_embedding_layers=True, or train {end} "
                    "too, by modules_to_save."
                )


def _check_shape(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise InvalidAdapter(
            f"The tensor {shown(tensor.name)} has shape {list(tensor.shape)}, but the base model and the "
            f"config make it {list(expected)}; check that the adapter was trained on this base model.",
            tensor.name,
        )
