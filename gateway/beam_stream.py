"""Beams on the engines: each step of a search is a request for one token after every beam.

The beams of a prompt share its blocks, and those of whatever they have in common, by the prefix cache. Like a
stream of tokens, a search goes on elsewhere when its engine is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.beams import Beam, BeamOptions, BeamSearch
from gateway.engine_stream import Delta, EngineStream
from gateway.errors import invalid_request
from gateway.schemas.generation import MAX_TOP_LOGPROBS, GenerationFields
from protos.engine_pb2 import FinishReason, ModelInfo, Sampling, Submit, TokenLogprobs

MOST_CANDIDATES = MAX_TOP_LOGPROBS
"""So many alternatives an engine tells of a token."""

OpenStream = Callable[[Sequence[Submit]], EngineStream]


def beam_options(fields: GenerationFields, submit: Submit, info: ModelInfo) -> BeamOptions:
    """Returns how to search after a prompt. Raises ApiError 400 for more beams than engines tell of."""
    ends = {*submit.stop_token_ids, *(() if fields.ignore_eos else info.eos_token_ids)}
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    options = BeamOptions(len(submit.seeds), submit.max_tokens, ends, penalty, fields.early_stopping or False)
    if options.num_candidates > MOST_CANDIDATES:
        most = MOST_CANDIDATES * options.width // options.num_candidates
        name = "n" if options.width == (fields.n or 1) else "best_of"
        raise invalid_request(
            f"'{name}' is {options.width}; with {len(ends)} end tokens a search has at most {most} beams.",
            param=name,
        )
    return options


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
        """How many tokens have been computed, until they are told: all beams have as many."""

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
                self._told, self.unread = True, 0
                return self._choices()
            if self._stream is not self._first or self.unread:
                self._stream = self._open([self._submit(each, beam) for each, beam in asked])
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
