"""What an adapter changes outside the decoder layers: the embedding before them and ``lm_head`` after them.

Few adapters have any of it, so it lies outside the rank pages, in tensors of its own, and a step pays for it
only where such an adapter is in it. A weight that an adapter brings whole (``modules_to_save``, trained
tokens, a resized vocabulary) is kept as the rows in which it differs from the base's: none is computed twice,
and what an adapter with a few new tokens takes is a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch.nn.functional import embedding, linear

from engine.step import StepRow
from engine.transfer import to_device


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Rows that stand in the place of the base's, or beyond its last.

    Attributes:
        tokens: int64 [K], ascending.
        rows: [K, H], in the model's dtype.
    """

    tokens: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class End:
    """An update of the embedding or of ``lm_head``. Each part may be missing; ``a`` comes with ``b``.

    With ``W`` the base's rows, but for the replaced ones, a token's embedding is
    ``W[token] * (1 + gain) + a[token] b``, and the logits of a hidden state ``h`` are
    ``h Wᵀ * (1 + gain) + (h a) b + shift``.

    Attributes:
        a: [vocab_size, r] of the embedding, [H, r] of ``lm_head``; in the model's dtype, like all others.
        b: [r, H] of the embedding, [r, vocab_size] of ``lm_head``; the scale is in it, and DoRA's.
        gain: [H] of the embedding, [vocab_size] of ``lm_head``.
        shift: [vocab_size], of ``lm_head`` only.
    """

    replaced: ReplacedRows | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdapterEnds:
    """Both ends of one adapter, all on one device. ``vocab_size``: of the adapter; at least the base's."""

    embedding: End | None
    lm_head: End | None
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """Of all tensors; one that both ends have counts once."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self._tensors()}.values())

    def to(self, device: torch.device) -> AdapterEnds:
        """The same on another device; what the ends share stays shared. The host does not wait."""
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device, non_blocking=True)
            return moved[id(tensor)]

        def move_end(end: End | None) -> End | None:
            if end is None:
                return None
            rows = end.replaced
            if rows is not None:
                tokens, values = move(rows.tokens), move(rows.rows)
                assert tokens is not None and values is not None
                rows = ReplacedRows(tokens, values)
            return End(rows, move(end.a), move(end.b), move(end.gain), move(end.shift))

        return AdapterEnds(move_end(self.embedding), move_end(self.lm_head), self.vocab_size)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for end in (self.embedding, self.lm_head):
            for name in fields(end) if end is not None else ():
                value = getattr(end, name.name)
                if isinstance(value, ReplacedRows):
                    yield value.tokens
                    yield value.rows
                elif value is not None:
                    yield value


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter's rows in a step: int64 indices into its tokens, on the device, and into its output rows,
    on the host, where what `StepEnds.part` takes of them is found without waiting.
    """

    ends: AdapterEnds
    tokens: torch.Tensor
    outputs: np.ndarray


class StepEnds:
    """The adapters of one step that have ends, and the rows to which they apply. No other row is touched."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    @property
    def vocab_size(self) -> int:
        """Tokens of the largest vocabulary among them."""
        return max(part.ends.vocab_size for part in self._parts)

    def part(self, start: int, stop: int) -> StepEnds:
        """The same for the output rows from ``start`` to ``stop`` alone, as if there were no others."""
        parts = []
        for part in self._parts:
            inside = (part.outputs >= start) & (part.outputs < stop)
            parts.append(_Part(part.ends, part.tokens, part.outputs[inside] - start))
        return StepEnds(parts)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[T, H]: the embeddings of ``tokens`` [T], some of which ``table`` [vocab_size, H] may lack."""
        x = embedding(tokens.clamp(max=len(table) - 1), table)
        for part in self._parts:
            end = part.ends.embedding
            if end is not None:
                x[part.tokens] = _embed(end, tokens[part.tokens], x[part.tokens])
        return x

    def change_logits(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """[S, V]: the logits under each row's adapter, from the base's ``logits`` [S, vocab_size].

        V is the largest vocabulary of the step, the base's included; beyond its own a row has -inf.
        """
        base_size = logits.shape[1]
        width = max(base_size, self.vocab_size)
        if width > base_size:
            wider = logits.new_full((len(logits), width), float("-inf"))
            wider[:, :base_size] = logits
            logits = wider
        for part in self._parts:
            end, size = part.ends.lm_head, part.ends.vocab_size
            if end is not None and len(part.outputs):
                outputs = to_device(part.outputs, logits.device)
                rows = logits[outputs]
                rows[:, :size] = _project(end, hidden[outputs], rows[:, :size])
                logits[outputs] = rows
        return logits


class ResidentEnds:
    """The ends of the adapters on the device, each by the first of its adapter's pages.

    Not thread-safe: the loop's thread calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_page: dict[int, AdapterEnds] = {}

    def write(self, pages: Sequence[int], ends: AdapterEnds | None) -> None:
        """Take in an adapter that has been given ``pages``, and forget those that had any of them."""
        self.drop(pages)
        if ends is not None:
            self._by_page[pages[0]] = ends.to(self._device)

    def drop(self, pages: Sequence[int]) -> None:
        """Give back the memory of an adapter whose pages nobody references."""
        for page in pages:
            self._by_page.pop(page, None)

    def of(self, rows: Sequence[StepRow]) -> StepEnds | None:
        """What of it a step needs; None, at no cost, where nothing has ends."""
        if not self._by_page:
            return None
        found: dict[int, tuple[list[int], list[int]]] = {}
        flat, output = 0, 0
        scored = sum(row.sampling is not None for row in rows)  # where the outputs of prompts begin
        for row in rows:
            page = row.adapter.pages[0] if row.adapter is not None else -1
            end = flat + len(row.tokens)
            if page in self._by_page:
                tokens, outputs = found.setdefault(page, ([], []))
                tokens.extend(range(flat + max(0, row.adapter_start - row.start), end))
                if row.sampling is not None and row.start + len(row.tokens) > row.adapter_start:
                    outputs.append(output)
                if row.scoring is not None:
                    first, count = row.start + row.scoring.first, len(row.scoring.tokens)
                    own = range(scored + min(count, max(0, row.adapter_start - first)), scored + count)
                    outputs.extend(own)
            scored += len(row.scoring.tokens) if row.scoring is not None else 0
            flat = end
            output += row.sampling is not None
        if not found:
            return None
        return StepEnds(
            [
                _Part(
                    self._by_page[page],
                    to_device(np.array(tokens, np.int64), self._device),
                    np.array(outputs, np.int64),
                )
                for page, (tokens, outputs) in found.items()
            ]
        )


def _embed(end: End, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[n, H]: from the base's embeddings ``x`` of ``tokens`` [n]."""
    if end.replaced is not None:
        known = end.replaced.tokens
        place = torch.searchsorted(known, tokens).clamp(max=len(known) - 1)
        x = torch.where((known[place] == tokens)[:, None], end.replaced.rows[place], x)
    if end.gain is not None:
        x = x + x * end.gain
    if end.a is not None and end.b is not None:
        x = x + end.a[tokens] @ end.b
    return x


def _project(end: End, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[n, V]: from the base's ``logits`` of ``hidden`` [n, H]; those of tokens that it lacks do not count."""
    if end.replaced is not None:
        logits = logits.index_copy(1, end.replaced.tokens, linear(hidden, end.replaced.rows))
    if end.gain is not None:
        logits = logits + logits * end.gain
    if end.a is not None and end.b is not None:
        logits = logits + (hidden @ end.a) @ end.b
    if end.shift is not None:
        logits = logits + end.shift
    return logits
