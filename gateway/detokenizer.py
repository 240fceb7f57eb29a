"""From tokens to text, piece by piece: never half a character, never a part of a stop string.

The pieces of a choice, joined, are the text that decoding all of its tokens at once gives, up to the first
stop string. Where the pieces are cut does not matter: the same tokens give the same text, streamed or not.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

from gateway.reasoning_text import ReasoningSplitter

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenDecoder(Protocol):
    """Decodes one choice's tokens."""

    def step(self, token: int) -> str:
        """Returns the text that is certain with this token; empty while a character is incomplete."""
        ...

    def run(self, tokens: Sequence[int]) -> str:
        """Returns the text of some steps, joined."""
        ...

    def finish(self) -> str:
        """Returns what was held back, with U+FFFD for an incomplete character."""
        ...


class ByteDecoder:
    """For byte-level tokenizers, where each token is a string of bytes: linear, and never decodes twice."""

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table` holds each token's bytes by id, empty for tokens that are not text; it is not modified."""
        self._table = table
        self._utf8 = _Utf8Decoder("replace")

    def step(self, token: int) -> str:
        """See TokenDecoder. A token beyond the vocabulary (padding rows of the output layer) is no text."""
        return self._utf8.decode(self._table[token]) if token < len(self._table) else ""

    def run(self, tokens: Sequence[int]) -> str:
        """See TokenDecoder."""
        table = self._table
        return self._utf8.decode(b"".join([table[token] for token in tokens if token < len(table)]))

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other tokenizer: decodes the last few tokens
    with and without the new one, and takes the difference.

        tokens   … | prefix      | pending        |
                   ^ left context ^ not yet emitted ^ new token is appended here

    The left context is there because decoders treat the
    start of a text specially (a leading space is stripped).
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        """`special` are the tokens that are not text."""
        self._tokenizer = tokenizer
        self._special = special
        self._window: list[int] = []
        self._prefix_len = 0
        self._prefix_text = ""

    def step(self, token: int) -> str:
        """See TokenDecoder. After eight tokens without a whole character, what there is counts."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        pending = len(self._window) - self._prefix_len
        if len(text) <= len(self._prefix_text) or (text.endswith(_REPLACEMENT) and pending < _MAX_PENDING):
            return ""
        piece = text[len(self._prefix_text) :]
        del self._window[: self._prefix_len]
        self._prefix_len = len(self._window)
        self._prefix_text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return piece

    def run(self, tokens: Sequence[int]) -> str:
        """See TokenDecoder."""
        return "".join(map(self.step, tokens))

    def finish(self) -> str:
        """See TokenDecoder."""
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(self._prefix_text) :]


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces; of several, the one that is complete first.

    Holds back only the longest end of the text that may still become a stop
    string. A character costs the same whatever came before it (Knuth,
    Morris and Pratt 1977), since clients choose both stop strings and text.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        """`stops` are non-empty strings. `keep_stop`: the one that is found is a part of the text."""
        self._stops = stops
        self._keep_stop = keep_stop
        self._begun = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Returns the text that is now certain not to be part of a stop string.

        Once a stop string is complete, `matched` holds it and the text before it has been returned, or up to
        its end where it is kept; nothing may be fed after that.
        """
        text = self._held + piece
        found: list[tuple[int, int, str]] = []
        for index, stop in enumerate(self._stops):
            self._begun[index], read = _advance(stop, self._begun[index], piece)
            if self._begun[index] == len(stop):
                end = len(self._held) + read
                found.append((end, end - len(stop), stop))
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return text[: end if self._keep_stop else at]
        keep = max(self._begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, begun: int, piece: str) -> tuple[int, int]:
    """Reads on until `stop` is complete or `piece` ends. Returns how much of `stop` the text then ends with,
    and how much was read.
    """
    if not begun and stop[0] not in piece:
        return 0, len(piece)
    borders = _borders(stop)
    for read, char in enumerate(piece, 1):
        while begun and stop[begun] != char:
            begun = borders[begun - 1]
        begun += stop[begun] == char
        if begun == len(stop):
            return begun, read
    return begun, len(piece)


@lru_cache(maxsize=256)
def _borders(stop: str) -> Sequence[int]:
    """Returns for each beginning of `stop` how long its longest proper beginning is that is its end, too."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders


class TextStream:
    """One choice's text: decoder and stop matcher in one. What is thought goes apart, before stop strings are
    looked for.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str],
        splitter: ReasoningSplitter | None = None,
        *,
        keep_stop: bool = False,
    ) -> None:
        """`splitter` None: nothing is thought. `keep_stop`: see StopMatcher."""
        self._decoder = decoder
        self._matcher = StopMatcher(stops, keep_stop=keep_stop) if stops else None
        self._splitter = splitter
        self._reasoning = ""
        self.reasoning_tokens = 0
        """Tokens that were thought so far, with those of the marks."""
        self.decoded_len = 0
        """Characters decoded so far, those held back and those from a stop string on included."""
        self.emitted_len = 0
        """Characters returned so far; those that were thought, and their marks, included."""

    @property
    def is_plain(self) -> bool:
        """Whether all of the text is returned as it comes: nothing ends it, and nothing is thought."""
        return self._matcher is None and self._splitter is None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher is not None and self._matcher.matched is not None

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched if self._matcher is not None else None

    def feed(self, token: int) -> str:
        """Returns the text that became certain with this token. Nothing may be fed once `stopped`."""
        piece = self._decoder.step(token)
        self.decoded_len += len(piece)
        if self._splitter is not None:
            was_inside = self._splitter.inside
            piece = self._without_reasoning(piece, self._splitter)
            self.reasoning_tokens += was_inside or self._splitter.inside
        return self._emit(piece)

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Returns the text that became certain with these tokens. For a text that `is_plain`."""
        piece = self._decoder.run(tokens)
        self.decoded_len += len(piece)
        return self._emit(piece)

    def finish(self) -> str:
        """Returns the rest of the text when the tokens have ended; it may still complete a stop string."""
        piece = self._decoder.finish()
        self.decoded_len += len(piece)
        if self._splitter is not None:
            piece = self._without_reasoning(piece, self._splitter, last=True)
        rest = self._emit(piece)
        if self._matcher is not None and not self.stopped:
            held = self._matcher.finish()
            self.emitted_len += len(held)
            rest += held
        return rest

    def take_reasoning(self) -> str:
        """Returns what was thought since it was last asked for."""
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning

    def _without_reasoning(self, piece: str, splitter: ReasoningSplitter, *, last: bool = False) -> str:
        before = splitter.consumed
        reasoning, rest = splitter.feed(piece)
        if last:
            last_reasoning, last_rest = splitter.finish()
            reasoning, rest = reasoning + last_reasoning, rest + last_rest
        self._reasoning += reasoning
        self.emitted_len += splitter.consumed - before - len(rest)
        return rest

    def _emit(self, piece: str) -> str:
        if self._matcher is not None:
            piece = self._matcher.feed(piece) if piece else ""
        self.emitted_len += len(piece)
        return piece
