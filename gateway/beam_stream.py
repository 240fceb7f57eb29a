"""Beam searches: what one may ask for, and the answers of those that an engine runs.

What a search costs is a token for each beam in each step, whether or not it is in an answer at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gateway.engine_sizes import blocks_of_search
from gateway.engine_stream import Delta, EngineStream
from gateway.errors import invalid_request
from gateway.schemas.generation import MAX_TOP_LOGPROBS, GenerationFields
from protos.engine_pb2 import Beams, EarlyStopping, Finished, FinishReason, ModelInfo, Submit

MOST_CANDIDATES = MAX_TOP_LOGPROBS
"""So many alternatives an engine tells of a token."""

_EARLY_STOPPING = {
    False: EarlyStopping.EARLY_STOPPING_OFF,
    True: EarlyStopping.EARLY_STOPPING_ON,
    "never": EarlyStopping.EARLY_STOPPING_NEVER,
}
_GOOD_ENDS = (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH)


def ask_for_beams(fields: GenerationFields, submits: Sequence[Submit], info: ModelInfo) -> None:
    """Has the choices of submits be searched for.

    Where the client has not said how long answers may be, lowers `max_tokens` to what the engine's blocks
    hold. Raises ApiError 400 where they would not do, and for more beams than engines tell candidates of.
    """
    ends = {*submits[0].stop_token_ids, *(() if fields.ignore_eos else info.eos_token_ids)}
    width = len(submits[0].seeds)
    name = "n" if width == (fields.n or 1) else "best_of"
    most = MOST_CANDIDATES // max(2, 1 + len(ends))
    if width > most:
        raise invalid_request(
            f"'{name}' is {width}; with {len(ends)} end tokens a search has at most {most} beams.", param=name
        )
    beams = Beams(
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=_EARLY_STOPPING[fields.early_stopping or False],
    )
    for submit in submits:
        _bound_blocks(submit, width, info, name, open_ended=fields.open_ended)
        submit.beams.CopyFrom(beams)


def _bound_blocks(submit: Submit, width: int, info: ModelInfo, name: str, *, open_ended: bool) -> None:
    prompt, size = len(submit.prompt_tokens), info.block_size
    shared = prompt // size
    room = (shared + (info.num_blocks - shared) // width) * size - prompt
    if open_ended:
        submit.max_tokens = min(submit.max_tokens, max(1, room))
    if submit.max_tokens > room:
        needed = blocks_of_search(submit, size)
        raise invalid_request(
            f"The beams of this search may need {needed:,} KV blocks of {size} tokens, and the engine has "
            f"{info.num_blocks:,}. Lower '{name}' or 'max_tokens', or shorten the prompt.",
            param=name,
        )


class BeamStream(EngineStream):
    """The answers of beam searches, as an EngineStream has those that were drawn.

    Choices are told when all searches have ended, of each prompt the best first. A search whose engine is
    lost begins anew on another, and finds the same, so only what goes beyond is booked.
    """

    def __init__(self, submits: Sequence[Submit], **options: Any) -> None:
        """See EngineStream; all submits have `beams`."""
        super().__init__(submits, **options)
        self._told = False
        self._failed: Delta | None = None  # the end of the first choice that has
        self._spent = Counter[int]()  # by prompt: tokens, on the engine that has it now
        self._booked: dict[int, int] = {}  # the most that this was on any engine

    @property
    def unread(self) -> int:
        """How many tokens the searches have cost, until their choices are told."""
        return 0 if self._told else sum(self._booked.values())

    async def next(self) -> list[Delta]:
        """Returns all choices, whole; then an empty list, as after `close`. Raises as EngineStream's."""
        while not (self._closed or self._failed is not None or all(each.ended for each in self._choices)):
            await self._advance()
        if self._failed is not None and not self._closed:
            return [self._failed]
        choices = await super().next()
        if choices:
            choices[0].dropped = self.unread - sum(len(choice.tokens) for choice in choices)
            self._told = True
        return choices

    def on_searched(self, choice: int, tokens: int) -> None:
        """See Receiver."""
        prompt = self._choices[choice].prompt
        self._spent[prompt] += tokens
        self._booked[prompt] = max(self._booked.get(prompt, 0), self._spent[prompt])

    def on_finished(self, choice: int, finished: Finished) -> None:
        """See Receiver."""
        super().on_finished(choice, finished)
        if finished.reason not in (*_GOOD_ENDS, FinishReason.FINISH_REASON_REFUSED):
            self._failed = self._failed or self._deltas[choice]
        self._wake()

    def on_lost(self, choices: Sequence[int]) -> None:
        """See Receiver. Of a search that is lost all choices are, whichever have come."""
        prompts = {self._choices[choice].prompt for choice in choices}
        lost = [number for number, each in enumerate(self._choices) if each.prompt in prompts]
        for number in lost:
            self._choices[number].tokens.clear()
            self._choices[number].ended = False
            self._deltas.pop(number, None)
        for prompt in prompts:
            del self._spent[prompt]
        super().on_lost(lost)
