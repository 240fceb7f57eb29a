"""The tokens of the step before, which the next step reads on the device before the host has seen them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.step import UNSEEN, StepRow
from engine.transfer import to_device


class DrawnTokens:
    """What one step has drawn.

    Args:
        tokens: int64 [S], on the device.
        rows: the S rows that drew them, in order.
    """

    def __init__(self, tokens: torch.Tensor, rows: Sequence[StepRow]) -> None:
        self.tokens = tokens
        self._places = {row.seq_id: place for place, row in enumerate(rows)}

    def places(self, rows: Sequence[StepRow]) -> np.ndarray:
        """int64 [len(rows)]: where in ``tokens`` each row's unseen token is; -1 for one that is known.

        Raises:
            KeyError: a row's unseen token was not drawn here.
        """
        places = self._places
        return np.array([places[row.seq_id] if row.tokens[0] == UNSEEN else -1 for row in rows], np.int64)


def fill_unseen(
    tokens: torch.Tensor, first: np.ndarray, rows: Sequence[StepRow], drawn: DrawnTokens | None
) -> torch.Tensor:
    """A flat batch with its unseen tokens filled in, on the device.

    Args:
        tokens: int64 [T]; `UNSEEN` where a token is not known.
        first: the index of each row's first token in ``tokens``.
    """
    if all(row.tokens[0] != UNSEEN for row in rows):
        return tokens
    assert drawn is not None, "an unseen token comes from the step before"
    places = drawn.places(rows)
    unseen = places >= 0
    where = to_device(np.stack([first[unseen], places[unseen]]), tokens.device)
    return tokens.index_copy(0, where[0], drawn.tokens.index_select(0, where[1]))
