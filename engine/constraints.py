"""Answers that must fit a grammar: after each token, which ones may come next.

The work is llguidance's, which derives the tokens that may follow from the grammar's state when they are
asked for, some ten microseconds in the median, and needs nothing compiled for a vocabulary before. A grammar
is what llguidance calls one: a list of grammars in JSON, or a grammar in its dialect of Lark.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 64
"""A grammar keeps what answers needed of it: some MiB, and for long texts that must come some hundred."""
_MOST_ITEMS, _MOST_ITEMS_IN_ROW = 5_000, 500
"""Parser items of one token, and of one byte. An ambiguous grammar would hold up everybody's step for a
second: with these it fails before a token takes ten milliseconds, and a JSON schema needs far fewer."""
_MOST_LEXER_FUEL = 100_000
"""Four for each byte of a text that must come, all of which is copied at each byte: 25,000 bytes of it take
some milliseconds a token, 200,000 thirty. Schemas with 90 KB of names and values need less than half."""
_WORD_BITS = 32


class InvalidGrammar(ValueError):
    """A grammar that cannot be used. The message is for the person who sent it."""


class Constraint:
    """Where one sequence stands in its grammar. Belongs to the loop's thread."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self.num_words = num_words
        """32-bit words of a list of allowed tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing more may follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def fault(self) -> str:
        """Why it cannot go on; "" when it can."""
        return self._matcher.get_error().partition("\n")[0]

    def take(self, token: int) -> None:
        """Moves on by a token that was drawn."""
        self._matcher.consume_token(token)

    def write_allowed(self, words: np.ndarray) -> None:
        """Says which tokens may come next, as `kernels.sampling_batch.AllowedTokens` has it.

        Args:
            words: int32 [num_words], contiguous; overwritten.
        """
        if self._matcher.is_error():
            words[:] = 0  # an error's own answer would be to allow the end
        else:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


class Grammar:
    """A grammar that has been understood, for any number of sequences."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def start(self, output: Iterable[int] = ()) -> Constraint:
        """Returns the state after what has been generated already."""
        matcher = self._matcher.deep_copy()
        for token in output:
            matcher.consume_token(token)
        return Constraint(matcher, self._num_words)


class Grammars:
    """Understands grammars for one model's tokens. May be used from any thread.

    Args:
        tokenizer: the text of ``tokenizer.json``.
        vocab_size: tokens that the model has logits for.
        end_tokens: the model's own end tokens; they may come where the text can be whole.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self._tokenizer: LLTokenizer = LLTokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(end_tokens) or None
        )
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def understand(self, text: str) -> Grammar:
        """Returns the grammar. May take a while, without the interpreter's lock; those used last are kept.

        Raises:
            InvalidGrammar: says what is wrong with it.
        """
        with self._lock:
            grammar = self._known.get(text)
            if grammar is not None:
                self._known.move_to_end(text)
                return grammar
        grammar = self._compile(text)
        with self._lock:
            self._known[text] = grammar
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return grammar

    def _compile(self, text: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            step_max_items=_MOST_ITEMS,
            max_items_in_row=_MOST_ITEMS_IN_ROW,
            initial_lexer_fuel=_MOST_LEXER_FUEL,
        )
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidGrammar(matcher.get_error())
        return Grammar(matcher, self._num_words)


def make_grammars(
    tokenizer_files: Mapping[str, bytes], vocab_size: int, end_tokens: Sequence[int]
) -> Grammars | None:
    """Returns what understands grammars for a model; None without a tokenizer, or without llguidance.

    Takes a second for a large vocabulary.
    """
    tokenizer = tokenizer_files.get("tokenizer.json")
    if tokenizer is None or find_spec("llguidance") is None:
        return None
    return Grammars(tokenizer.decode(), vocab_size, end_tokens)
