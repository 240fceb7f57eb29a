"""An adapter laid out without its base model: against the smallest one that its own tensors tell of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adapters.base_model import EMBEDDING, ENDS, BaseModelShape
from adapters.errors import InvalidAdapter
from adapters.layout import AdapterLayout, StoredTensor
from adapters.peft_config import MAX_RANK, LoraConfig
from adapters.reader import lay_out, read_config
from adapters.tensor_names import Slot, TensorName, parse_tensor_name
from adapters.validation import digest_of_layout
from adapters.weight_files import read_tensors
from adapters.weights_scan import scan_weights
from adapters.words import words_of

_MAX_LAYERS = 10_000


def digest_of_folder(folder: Path, tokenizer: str = "") -> bytes:
    """The digest of a valid adapter. Reads all weights. Raises `InvalidAdapter`."""
    layout = lay_out_alone(read_config(folder), read_tensors(folder))
    scans = scan_weights(folder, [part.tensor for part in layout.parts])
    return digest_of_layout(layout, scans, words_of(folder, own_tokenizer=bool(tokenizer)), tokenizer)


def lay_out_alone(config: LoraConfig, tensors: Sequence[StoredTensor]) -> AdapterLayout:
    """Lays tensors out as the config says. Parts, scales and settings are those against any base model that
    the adapter fits; what a tied base model adds, and whether tokens are new, is not known here.

    Raises `InvalidAdapter`.
    """
    told = _Told(config)
    for tensor in tensors:
        name = parse_tensor_name(tensor.name)
        if name is not None and len(tensor.shape) == 2:
            told.note(name, tensor.shape[0], tensor.shape[1])
    try:
        return lay_out(config, tensors, told.shape(tied=config.ensure_weight_tying))
    except InvalidAdapter as error:
        try:  # some sets of tensors are only written where the ends are tied, or only where they are not
            return lay_out(config, tensors, told.shape(tied=not config.ensure_weight_tying))
        except InvalidAdapter:
            raise error from None


class _Told:
    """What an adapter's tensors tell of its base model."""

    def __init__(self, config: LoraConfig) -> None:
        self._layers = 1
        self._features: dict[str, list[int]] = {}
        self._hidden = 0
        tokens = [token for indices in config.token_indices.values() for token in indices]
        self._vocab_size = max(tokens, default=0) + 1

    def note(self, name: TensorName, rows: int, columns: int) -> None:
        module = name.path.rpartition(".")[2]
        lora = name.slot in (Slot.A, Slot.B)
        if module not in ENDS:
            if lora:
                self._note_linear(name, module, rows, columns)
        elif name.slot is Slot.TOKENS:
            self._hidden = columns
        elif not lora:
            self._vocab_size, self._hidden = rows, columns
        elif (name.slot is Slot.A) == (module == EMBEDDING):
            self._vocab_size = max(columns if name.slot is Slot.A else rows, 1)
        else:
            self._hidden = columns if name.slot is Slot.A else rows

    def _note_linear(self, name: TensorName, module: str, rows: int, columns: int) -> None:
        features = self._features.setdefault(module, [1, 1])
        if name.slot is Slot.A:
            features[0] = columns
        else:
            features[1] = rows
        layer = name.path.rpartition(".layers.")[2].partition(".")[0]
        if layer.isdecimal() and len(layer) <= len(str(_MAX_LAYERS)):
            self._layers = min(max(self._layers, int(layer) + 1), _MAX_LAYERS)

    def shape(self, *, tied: bool) -> BaseModelShape:
        modules = {module: (wide_in, wide_out) for module, (wide_in, wide_out) in self._features.items()}
        if self._hidden and not modules:
            modules = {"q_proj": (self._hidden, self._hidden)}
        return BaseModelShape(self._layers, modules, MAX_RANK, self._vocab_size if self._hidden else 0, tied)
