"""Bias, bans and penalties of a step's rows, as the sparse list of edits that sampling applies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.drawn_tokens import DrawnTokens
from engine.step import UNSEEN, SamplingParams, StepRow
from engine.transfer import pack_to_device, to_device
from kernels.sampling_batch import TokenEdits


class EditLists:
    """Makes the edits of each step; what it knows of a sequence it keeps from one step to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lists: dict[int, _EditList] = {}

    def build(
        self, rows: Sequence[StepRow], edited: Sequence[int], drawn: DrawnTokens | None
    ) -> TokenEdits | None:
        """The edits of all rows, each pair of row and token once; None if there are none.

        A token that no host has seen is part of its row's output all the same: it is counted on the device.

        Args:
            rows: of which all have ``sampling``.
            edited: which of them have a bias, a ban or penalties.
        """
        known, self._lists = self._lists, {}
        entries: list[tuple[np.ndarray, ...]] = []
        for i in edited:
            row = rows[i]
            edits = known.get(row.seq_id)
            if edits is None or edits.params is not row.sampling:
                edits = _EditList(row)
            self._lists[row.seq_id] = edits
            entries.append(edits.entries(row))
        if not any(len(tokens) for tokens, *_ in entries):
            return None
        tokens, biases, counts, seen = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        owner = np.repeat(np.array(edited, np.int32), [len(parts[0]) for parts in entries])
        params = [row.sampling or SamplingParams() for row in rows]
        columns = pack_to_device(
            {
                "rows": owner,
                "tokens": tokens,
                "biases": biases,
                "counts": counts,
                "seen": seen,
                "presence": np.array([p.presence_penalty for p in params], np.float32),
                "frequency": np.array([p.frequency_penalty for p in params], np.float32),
                "repetition": np.array([p.repetition_penalty for p in params], np.float32),
            },
            self._device,
        )
        unseen = np.flatnonzero(tokens == UNSEEN)
        if len(unseen):
            assert drawn is not None, "an unseen token comes from the step before"
            places = drawn.places([rows[i] for i in owner[unseen]])
            _count_unseen(columns, unseen, drawn.tokens, places, len(rows))
        return TokenEdits(**columns)


class _EditList:
    """The edits of one sequence, in arrays with room to grow: a step adds a token or two to hundreds.

    Behind the last is always an entry for a token that no host has seen, counted once.
    """

    def __init__(self, row: StepRow) -> None:
        params = row.sampling or SamplingParams()
        self.params = row.sampling
        self._is_penalized = params.has_penalties
        self._num_counted = 0
        prompt = row.prompt_tokens if params.repetition_penalty != 1.0 else ()
        bias = dict(params.logit_bias)
        found = np.unique(np.array([*prompt, *bias], np.int32))
        self._slots = {token: slot for slot, token in enumerate(found.tolist())}
        self._tokens = np.full(0, UNSEEN, np.int32)
        self._biases = np.zeros(0, np.float32)
        self._counts = np.ones(0, np.int32)
        self._seen = np.ones(0, np.bool_)
        self._make_room(len(found) + 64)
        self._tokens[: len(found)] = found
        self._counts[: len(found)] = 0
        self._seen[: len(found)] = np.isin(found, np.array(prompt, np.int32))
        self._biases[[self._slots[token] for token in bias]] = list(bias.values())

    def entries(self, row: StepRow) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, biases, counts in the output, and whether seen, as of a row of the sequence."""
        if self._is_penalized:
            for token in row.output_tokens[self._num_counted :]:
                slot = self._slot_of(token)
                self._counts[slot] += 1
                self._seen[slot] = True
            self._num_counted = len(row.output_tokens)
        banned = [self._slot_of(token) for token in row.banned_tokens]
        size = len(self._slots) + (self._is_penalized and row.tokens[0] == UNSEEN)
        biases = self._biases[:size]
        if banned:
            biases = biases.copy()
            biases[banned] = -np.inf
        return self._tokens[:size], biases, self._counts[:size], self._seen[:size]

    def _slot_of(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot + 1 == len(self._tokens):
                self._make_room(len(self._tokens))
            self._tokens[slot], self._counts[slot], self._seen[slot] = token, 0, False
        return slot

    def _make_room(self, count: int) -> None:
        """For so many more entries, each of them what an unseen token has."""
        self._tokens = np.append(self._tokens, np.full(count, UNSEEN, np.int32))
        self._biases = np.append(self._biases, np.zeros(count, np.float32))
        self._counts = np.append(self._counts, np.ones(count, np.int32))
        self._seen = np.append(self._seen, np.ones(count, np.bool_))


def _count_unseen(
    columns: dict[str, torch.Tensor],
    entries: np.ndarray,
    drawn: torch.Tensor,
    places: np.ndarray,
    num_rows: int,
) -> None:
    """Puts the tokens that rows have just drawn into their entries, in place, on the device.

    Where the row has an entry for that token already, the count is added there, and its own is none.

    Args:
        entries: where ``columns`` has an unseen token, the last entry of its row.
        places: where ``drawn`` has it.
    """
    rows, tokens = columns["rows"], columns["tokens"]
    where = to_device(np.stack([entries, places]), rows.device)
    owners = rows.index_select(0, where[0]).long()
    newest = drawn.index_select(0, where[1]).int()
    # A row without an unseen token looks for one that no entry has.
    wanted = torch.full((num_rows,), UNSEEN - 1, dtype=torch.int32, device=rows.device)
    wanted.index_copy_(0, owners, newest)
    hits = (tokens == wanted.index_select(0, rows.long())).int()
    columns["counts"].add_(hits)
    columns["seen"].logical_or_(hits.bool())
    hits_of_row = torch.zeros_like(wanted).index_add_(0, rows.long(), hits)
    tokens.index_copy_(0, where[0], newest)
    kept = torch.where(hits_of_row.index_select(0, owners) > 0, -1, owners.int())
    rows.index_copy_(0, where[0], kept)
    if rows.device.type != "cuda":
        # The CPU's kernel searches the rows in their order, so an entry that is none goes.
        live = rows >= 0
        for name in ("rows", "tokens", "biases", "counts", "seen"):
            columns[name] = columns[name][live]
