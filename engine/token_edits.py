"""Bias, bans and penalties of a step's rows, as the sparse list of edits that sampling applies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.drawn_tokens import DrawnTokens
from engine.step import UNSEEN, SamplingParams, StepRow
from engine.transfer import pack_to_device, to_device
from kernels.sampling_batch import TokenEdits


def build_token_edits(
    rows: Sequence[StepRow], edited: Sequence[int], device: torch.device, drawn: DrawnTokens | None
) -> TokenEdits | None:
    """The edits of all rows, each pair of row and token once; None if there are none.

    A token that no host has seen is part of its row's output all the same: it is counted on the device.

    Args:
        rows: of which all have ``sampling``.
        edited: which of them have a bias, a ban or penalties.
    """
    entries = [entry for i in edited if (entry := _row_edits(i, rows[i])) is not None]
    if not entries:
        return None
    merged = np.concatenate(entries, axis=1)
    params = [row.sampling or SamplingParams() for row in rows]
    owner, tokens, biases, counts, seen = merged
    columns = pack_to_device(
        {
            "rows": owner.astype(np.int32),
            "tokens": tokens.astype(np.int32),
            "biases": biases.astype(np.float32),
            "counts": counts.astype(np.int32),
            "seen": seen.astype(np.bool_),
            "presence": np.array([p.presence_penalty for p in params], np.float32),
            "frequency": np.array([p.frequency_penalty for p in params], np.float32),
            "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        },
        device,
    )
    unseen = np.flatnonzero(tokens == UNSEEN)
    if len(unseen):
        assert drawn is not None, "an unseen token comes from the step before"
        owners = [rows[int(owner[entry])] for entry in unseen]
        _count_unseen(columns, unseen, drawn.tokens, drawn.places(owners), len(rows))
    return TokenEdits(**columns)


def _row_edits(index: int, row: StepRow) -> np.ndarray | None:
    """float64 [5, E]: row, token, bias, count in the output, seen. An unseen token is an entry, the last."""
    params = row.sampling or SamplingParams()
    biases: dict[int, float] = dict(params.logit_bias)
    biases.update(dict.fromkeys(row.banned_tokens, float("-inf")))
    output = np.zeros(0, np.int64)
    known = np.zeros(0, np.int64)
    has_unseen = params.has_penalties and row.tokens[0] == UNSEEN
    if params.has_penalties:
        output = np.asarray(row.output_tokens, np.int64)
        prompt = row.prompt_tokens if params.repetition_penalty != 1.0 else ()
        known = np.concatenate([output, np.asarray(prompt, np.int64)])
    if not biases and not len(known) and not has_unseen:
        return None
    biased = np.fromiter(biases, np.int64, len(biases))
    tokens = np.unique(np.concatenate([known, biased]))
    entry = np.zeros((5, len(tokens) + has_unseen))
    entry[0], entry[1, : len(tokens)] = index, tokens
    entry[2, np.searchsorted(tokens, biased)] = list(biases.values())
    np.add.at(entry[3], np.searchsorted(tokens, output), 1)
    entry[4, np.searchsorted(tokens, known)] = 1
    if has_unseen:
        entry[1:, -1] = UNSEEN, 0.0, 1, 1
    return entry


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
