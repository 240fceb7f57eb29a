"""Prompts that are shown before what comes after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.generation import Piece, TokenInfo
from gateway.tokenizer import ModelTokenizer
from protos.engine_pb2 import TokenLogprobs


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as text, and for each of its tokens where its own text begins there, in characters."""

    text: str
    tokens: Sequence[int]
    offsets: Sequence[int]


def echoed_prompt(
    given: str | Sequence[int], tokens: Sequence[int], tokenizer: ModelTokenizer
) -> EchoedPrompt:
    """Returns the prompt that a client has given, which `tokens` were made of.

    A text is shown as it was given; of token ids all are shown, special ones by their names.
    """
    shown = frozenset() if isinstance(given, str) else frozenset(tokens)
    decoder, offsets, text = tokenizer.decoder(shown), [], ""
    for token in tokens:
        offsets.append(len(text))
        text += decoder.step(token)
    text += decoder.finish()
    if isinstance(given, str):
        text = given
    return EchoedPrompt(text, tokens, [min(offset, len(text)) for offset in offsets])


class Echo:
    """Puts each prompt before the answers to it, as the first piece of each choice."""

    def __init__(self, prompts: Sequence[EchoedPrompt], choices: int, *, with_logprobs: bool) -> None:
        """`choices` are those of each prompt."""
        self._prompts = prompts
        self._choices = choices
        self._with_logprobs = with_logprobs
        self._shown: set[int] = set()

    def put_before(
        self, pieces: Sequence[Piece], logprobs_of: Callable[[int], Sequence[TokenLogprobs]]
    ) -> list[Piece]:
        """Returns the pieces, before a choice's first the prompt, and with offsets in the whole.

        `logprobs_of` returns what the engine has told of a prompt's tokens: all but the first's.
        """
        found: list[Piece] = []
        for piece in pieces:
            number = piece.choice // self._choices
            prompt = self._prompts[number]
            if piece.choice not in self._shown:
                self._shown.add(piece.choice)
                tokens = _infos(prompt, logprobs_of(number)) if self._with_logprobs else ()
                found.append(Piece(piece.choice, prompt.text, tokens))
            moved = [replace(token, offset=token.offset + len(prompt.text)) for token in piece.tokens]
            found.append(replace(piece, tokens=moved))
        return found


def _infos(prompt: EchoedPrompt, logprobs: Sequence[TokenLogprobs]) -> list[TokenInfo]:
    """Returns a prompt's tokens. Nothing comes before the first, so it has no logprob."""
    known = [None, *logprobs]
    return [TokenInfo(*parts) for parts in zip(prompt.tokens, prompt.offsets, known, strict=True)]
