"""Beams on the engines: each step of a search is a request for one token after every beam.

The beams of a prompt share its blocks, and those of whatever they have in common, by the prefix cache. Like a
stream of tokens, a search goes on elsewhere when its engine is lost or refuses a step, and waits if all do.

What a search costs is a token for each beam in each step, whether or not it is in an answer at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.beams import Beam, BeamOptions, BeamSearch
from gateway.engine_stream import Delta, EngineStream
from gateway.errors import invalid_request
from gateway.schemas.generation import MAX_TOP_LOGPROBS, GenerationFields
from protos.engine_pb2 import FinishReason, ModelInfo, Sampling, Submit, TokenLogprobs

MOST_CANDIDATES = MAX_TOP_LOGPROBS
"""So many alternatives an engine tells of a token."""

MOST_TOKENS = 2**17
"""Of all beams of a request, prompts included: each step sends them whole, and the event loop needs 3 ms for
so many."""


class OpenStream(Protocol):
    """Opens what runs one step; see EngineStream."""

    def __call__(self, submits: Sequence[Submit], *, continues: bool = False) -> EngineStream:
        """Returns its stream. `continues`: it is not the first step."""
        ...


def beam_options(fields: GenerationFields, submits: Sequence[Submit], info: ModelInfo) -> list[BeamOptions]:
    """Returns how to search after each prompt.

    Where the client has not said how long answers may be, lowers `max_tokens` of the submits to what
    `MOST_TOKENS` leaves. Raises ApiError 400 where that is exceeded, and for more beams than engines tell of.
    """
    ends = {*submits[0].stop_token_ids, *(() if fields.ignore_eos else info.eos_token_ids)}
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    width = len(submits[0].seeds)
    name = "n" if width == (fields.n or 1) else "best_of"
    _bound_tokens(submits, width, name, open_ended=fields.open_ended)
    early = fields.early_stopping or False
    found = [BeamOptions(width, submit.max_tokens, ends, penalty, early) for submit in submits]
    candidates = found[0].num_candidates
    if candidates > MOST_CANDIDATES:
        most = MOST_CANDIDATES * width // candidates
        raise invalid_request(
            f"'{name}' is {width}; with {len(ends)} end tokens a search has at most {most} beams.", param=name
        )
    return found


def _bound_tokens(submits: Sequence[Submit], width: int, name: str, *, open_ended: bool) -> None:
    prompts = sum(len(submit.prompt_tokens) for submit in submits)
    if open_ended:
        room = (MOST_TOKENS // width - prompts) // len(submits)
        for submit in submits:
            submit.max_tokens = min(submit.max_tokens, max(room, 1))
    tokens = width * (prompts + sum(submit.max_tokens for submit in submits))
    if tokens > MOST_TOKENS:
        raise invalid_request(
            f"The beams of this search may have {tokens:,} tokens in all, prompts included, more than "
            f"{MOST_TOKENS:,}. Lower '{name}' or 'max_tokens', or shorten the prompt.",
            param=name,
        )


@dataclass(slots=True)
class _Prompt:
    submit: Submit
    options: BeamOptions
    search: BeamSearch


class BeamStream:
    """The answers of a beam search, as `EngineStream` has those that were drawn. For one consumer.

    Choices are told when all searches have ended: of each prompt as many as it has beams, the best first.
    """

    def __init__(
        self, submits: Sequence[Submit], options: Sequence[BeamOptions], open_stream: OpenStream
    ) -> None:
        """`submits`, one per prompt, are as for an EngineStream, and not modified; `options` are of each.

        How long answers may become is what the submits say now: limits may have lowered it.
        """
        self._prompts = []
        for submit, option in zip(submits, options, strict=True):
            option = replace(option, max_tokens=submit.max_tokens)
            self._prompts.append(_Prompt(submit, option, BeamSearch(option)))
        self._open = open_stream
        self._first = self._stream = open_stream([self._submit(each, Beam()) for each in self._prompts])
        self._told = False
        self._closed = False
        self.unread = 0
        """How many tokens the search has cost, until its choices are told: a step, one for each beam."""

    @property
    def cached_tokens(self) -> int:
        """Of the prompts; what the steps after the first find is their own."""
        return self._first.cached_tokens

    @property
    def queue_s(self) -> float | None:
        """See EngineStream."""
        return self._first.queue_s

    @property
    def engine_id(self) -> str:
        """See EngineStream."""
        return self._stream.engine_id

    @property
    def vectors(self) -> Sequence[bytes]:
        """See EngineStream: a search makes none."""
        return ()

    def prompt_logprobs(self, prompt: int) -> Sequence[TokenLogprobs]:
        """See EngineStream."""
        return self._first.prompt_logprobs(prompt)

    async def wait_started(self) -> None:
        """See EngineStream."""
        await self._first.wait_started()

    async def next(self) -> list[Delta]:
        """Returns all choices, whole; then an empty list, as after `close`. Raises as EngineStream's."""
        if self._told:
            return []
        while not self._closed:
            asked = [(each, beam) for each in self._prompts for beam in each.search.beams]
            if not asked:
                self._told = True
                choices = self._choices()
                choices[0].dropped = self.unread - sum(len(choice.tokens) for choice in choices)
                self.unread = 0
                return choices
            if self._stream is not self._first or self.unread:
                submits = [self._submit(each, beam) for each, beam in asked]
                self._stream = self._open(submits, continues=True)
            tops = await self._tops(len(asked))
            if isinstance(tops, Delta):
                return [tops]
            if not self._closed:
                self._advance(tops)
        return []

    def end_choice(self, index: int) -> None:
        """Nothing runs any more for a choice that has been told."""

    def close(self) -> None:
        """See EngineStream."""
        self._closed = True
        self._stream.close()

    def _advance(self, tops: Sequence[TokenLogprobs]) -> None:
        at = 0
        for each in self._prompts:
            count = len(each.search.beams)
            if count:
                each.search.advance(tops[at : at + count])
                at += count
                self.unread += each.options.width

    async def _tops(self, count: int) -> list[TokenLogprobs] | Delta:
        """Returns the most likely tokens after each beam, or how a step has failed; nothing once closed."""
        found: dict[int, TokenLogprobs] = {}
        while deltas := await self._stream.next():
            for delta in deltas:
                if delta.logprobs:
                    found[delta.choice] = delta.logprobs[0]
                if delta.finish not in (
                    FinishReason.FINISH_REASON_UNSPECIFIED,
                    FinishReason.FINISH_REASON_LENGTH,
                ):
                    return delta
        self._stream.close()
        return [] if self._closed else [found[index] for index in range(count)]

    def _submit(self, prompt: _Prompt, beam: Beam) -> Submit:
        """Returns what asks for the tokens after a beam."""
        submit = Submit()
        submit.CopyFrom(prompt.submit)
        del submit.seeds[:], submit.stop_token_ids[:]
        submit.seeds.append(0)
        submit.prompt_tokens.extend(beam.tokens)
        submit.sampling.CopyFrom(Sampling(logprobs=prompt.options.num_candidates))
        submit.max_tokens, submit.min_tokens, submit.ignore_eos = 1, 0, True
        if beam.tokens:
            submit.ClearField("prompt_logprobs")
        return submit

    def _choices(self) -> list[Delta]:
        deltas: list[Delta] = []
        for each in self._prompts:
            wanted = each.submit.sampling.logprobs if each.submit.sampling.HasField("logprobs") else None
            for beam in each.search.answers:
                is_end = beam.tokens[-1] in each.options.end_tokens
                finish = FinishReason.FINISH_REASON_STOP if is_end else FinishReason.FINISH_REASON_LENGTH
                logprobs = [] if wanted is None else [_cut(entry, wanted) for entry in beam.logprobs]
                deltas.append(Delta(len(deltas), list(beam.tokens), logprobs, finish))
        return deltas


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """Returns as many alternatives as were asked for."""
    return TokenLogprobs(
        chosen=entry.chosen, top_tokens=entry.top_tokens[:count], top_logprobs=entry.top_logprobs[:count]
    )
