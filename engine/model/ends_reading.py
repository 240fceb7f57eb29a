"""From an adapter's files to its ends, in the model's dtype and reduced to what differs from the base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from adapters.layout import AdapterLayout, StoredTensor, TrainedTokens
from engine.model.adapter_ends import AdapterEnds, End, ReplacedRows
from engine.model.adapter_tensors import AdapterTensors
from engine.model.dora import CHUNK_ROWS, column_gains, row_gains


@dataclass(frozen=True, slots=True)
class _Table:
    """A table [size, H] as an adapter has it: the base's rows, with some replaced and some added."""

    base: torch.Tensor
    replaced: ReplacedRows | None
    size: int

    def chunks(self) -> Iterator[torch.Tensor]:
        """The rows in order, float32, on the base's device."""
        for start in range(0, self.size, CHUNK_ROWS):
            end = min(start + CHUNK_ROWS, self.size)
            rows = torch.zeros(end - start, self.base.shape[1], device=self.base.device)
            known = self.base[start:end]
            rows[: len(known)] = known
            if self.replaced is not None:
                tokens = self.replaced.tokens
                first, last = torch.searchsorted(tokens, torch.tensor([start, end])).tolist()
                rows[(tokens[first:last] - start).to(rows.device)] = self.replaced.rows[first:last].to(rows)
            yield rows


class EndsReader:
    """Reads the ends of adapters of one base model.

    Args:
        embedding, lm_head: the base's tables [vocab_size, H]; one tensor if they are tied.
        pin: in page-locked memory.
    """

    def __init__(self, embedding: torch.Tensor, lm_head: torch.Tensor, *, pin: bool) -> None:
        self._embedding = embedding
        self._lm_head = lm_head
        self._pin = pin

    def read(self, layout: AdapterLayout, tensors: AdapterTensors) -> AdapterEnds:
        """The ends of one adapter, on the CPU. What the adapter brings whole is compared with the base."""
        tied = (
            self._lm_head is self._embedding
            and layout.saved_lm_head == layout.saved_embedding
            and layout.lm_head_tokens == layout.embedding_tokens
        )
        before = self._replaced(self._embedding, layout.saved_embedding, layout.embedding_tokens, tensors)
        after = before
        if not tied:
            after = self._replaced(self._lm_head, layout.saved_lm_head, layout.lm_head_tokens, tensors)
        return AdapterEnds(
            self._embedding_end(layout, _Table(self._embedding, before, layout.vocab_size), tensors),
            self._lm_head_end(layout, _Table(self._lm_head, after, layout.vocab_size), tensors),
            layout.vocab_size,
        )

    def _replaced(
        self,
        base: torch.Tensor,
        saved: StoredTensor | None,
        trained: TrainedTokens | None,
        tensors: AdapterTensors,
    ) -> ReplacedRows | None:
        """The rows of a saved table that the base does not have, and trained rows in place of any."""
        tokens, rows = [torch.zeros(0, dtype=torch.int64)], [base[:0].cpu()]
        if saved is not None:
            for start in range(0, saved.shape[0], CHUNK_ROWS):
                part = tensors.rows(saved, start, start + CHUNK_ROWS).to(base.dtype)
                known = base[start : start + len(part)].to(part.device)
                new = torch.ones(len(part), dtype=torch.bool)
                new[: len(known)] = (part[: len(known)] != known).any(dim=1)
                if trained is not None:
                    inside = [token - start for token in trained.indices if 0 <= token - start < len(part)]
                    new[inside] = False
                tokens.append(new.nonzero().flatten() + start)
                rows.append(part[new])
        if trained is not None:
            tokens.append(torch.tensor(trained.indices, dtype=torch.int64))
            rows.append(tensors.get(trained.rows).to(base.dtype))
        ordered, order = torch.cat(tokens).sort()
        if not len(ordered):
            return None
        return ReplacedRows(self._pinned(ordered), self._pinned(torch.cat(rows)[order]))

    def _embedding_end(self, layout: AdapterLayout, table: _Table, tensors: AdapterTensors) -> End | None:
        update = layout.embedding
        if update is None:
            return None if table.replaced is None else End(table.replaced)
        a, b = tensors.get(update.a).float(), tensors.get(update.b).float()
        gain = None
        if update.magnitude is not None:
            gain = column_gains(tensors.get(update.magnitude), table.chunks(), a, b, update.scale)
        return self._end(table, a.T, b.T * update.scale, gain, None)

    def _lm_head_end(self, layout: AdapterLayout, table: _Table, tensors: AdapterTensors) -> End | None:
        update = layout.lm_head
        if update is None:
            return None if table.replaced is None else End(table.replaced)
        a, b = tensors.get(update.a).float(), tensors.get(update.b).float()
        gain, shift = None, None
        if update.magnitude is not None:
            magnitude = tensors.get(update.magnitude).flatten()
            gains, start = [], 0
            for rows in table.chunks():
                span = slice(start, start + len(rows))
                gains.append(row_gains(magnitude[span], rows, a, b[span], update.scale))
                start += len(rows)
            gain = torch.cat(gains)
        if update.bias is not None:
            shift = tensors.get(update.bias).float() * update.scale
        return self._end(table, a.T, b.T * update.scale, gain, shift)

    def _end(
        self,
        table: _Table,
        a: torch.Tensor,
        b: torch.Tensor,
        gain: torch.Tensor | None,
        shift: torch.Tensor | None,
    ) -> End:
        """With everything in the base's dtype, and DoRA's factor in ``b``."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return self._pinned(tensor.to(table.base.dtype).contiguous())

        return End(
            table.replaced,
            kept(a),
            kept(b if gain is None else b * (1 + gain)),
            None if gain is None else kept(gain),
            None if shift is None else kept(shift),
        )

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pin else tensor
