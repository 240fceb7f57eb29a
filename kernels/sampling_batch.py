"""What sampling one token for each of ``S`` rows takes and gives: parallel tensors, on the logits' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: the highest logit, and of equal ones the lowest token id."""


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Changes of single logits: bias, bans and penalties of all rows in one sparse list.

    For entry ``e`` the model's logit ``l`` of token ``tokens[e]`` in row ``rows[e]`` becomes::

        l += biases[e]                                            a ban is a bias of -inf
        if seen[e]:  l = l / repetition[row] if l > 0 else l * repetition[row]
        if counts[e] > 0:  l -= frequency[row] * counts[e] + presence[row]

    A pair of row and token appears at most once (the builder merges), so the order of entries is no matter.

    Attributes:
        rows: int32 [E], ascending; -1 marks an entry that is none: at the end, or on a GPU anywhere.
        tokens: int32 [E].
        biases: float32 [E]. 0: none.
        counts: int32 [E]. How often the token is in the row's *output* so far.
        seen: bool [E]. Whether the token is in the row's prompt or output.
        presence, frequency: float32 [S]. 0: off.
        repetition: float32 [S]. Above 0; 1: off.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    biases: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """For rows that may draw some tokens only: which, a bit for each.

    Attributes:
        lists: int32 [S]. Which row of ``bits`` is about this row; -1: it may draw any token.
        bits: int32 [K, W]. Bit ``t % 32`` of word ``t // 32`` is set where token ``t`` may be drawn. A token
            beyond the last word may not.
    """

    lists: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row's token is drawn. Rows do not see each other.

    The order is: edits, what is allowed, temperature, then min-p, top-k and top-p together as one threshold,
    then Gumbel-max (``reference.gumbel_noise``) over what is left. All three filters keep or drop equal
    logits together, so the outcome does not depend on an order among them:

    - top-k keeps what is at least the k-th highest logit;
    - min-p keeps tokens at least ``min_p`` times as probable as the most probable one;
    - top-p, over what top-k and min-p left, keeps a token while the tokens *more* probable than it hold
      less than ``top_p`` of the mass.

    Attributes:
        temperature: float32 [S]. Below ``GREEDY_BELOW``: greedy; the filters and the seed are then ignored.
        top_k: int32 [S]. 0: off.
        top_p: float32 [S]. 1: off.
        min_p: float32 [S]. 0: off.
        seeds: int64 [S].
        positions: int64 [S]. Index in its sequence of the token being drawn.
        edits: None where no row has any.
        allowed: None where every row may draw any token.
        num_logprobs: None: no log-probabilities. ``N``: those of the drawn token and of the ``N`` most
            probable ones, for every row, under the model's own distribution (before edits and temperature).
        all_greedy: promise, on the host, that every temperature is below ``GREEDY_BELOW``.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    edits: TokenEdits | None = None
    allowed: AllowedTokens | None = None
    num_logprobs: int | None = None
    all_greedy: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn.

    Attributes:
        tokens: int64 [S]. 0 where ``finite`` is false.
        finite: bool [S]. False where the model's logits held NaN or +inf, or nothing above -inf, or where
            edits and what is allowed left nothing to draw. Such a row's request must end with an error.
        logprobs: float32 [S], of the drawn token; None unless asked for, like the next two. Undefined
            where ``finite`` is false.
        top_tokens: int64 [S, N], most probable first, equal ones by token id.
        top_logprobs: float32 [S, N].
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
