"""From a client's message to a request that the engine can run, or a sentence that says why not."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence

from engine.beams import BeamOptions, EarlyStopping
from engine.block_pool import root_hash
from engine.constraints import Grammar
from engine.scheduler.background import account_name
from engine.sequence import Request
from engine.step import Pooling, SamplingParams
from protos import engine_pb2 as pb

DIGEST_BYTES = 32
MAX_LOGPROBS = 20
MAX_SCOPE_BYTES = 256
MAX_LENGTH_PENALTY = 10.0


class InvalidSubmit(ValueError):
    """A request that no engine with this model could run. The message is for the person who sent it."""


def parse_submit(
    message: pb.Submit,
    link: Hashable,
    model: pb.ModelInfo,
    grammar: Grammar | None = None,
    arrival: float | None = None,
) -> Request:
    """Checks a submission against the model's bounds, and makes the request of it.

    The prompt's blocks are hashed here, so that the loop does not have to.

    Args:
        grammar: what the message's text means.
        arrival: when the message came, by the monotonic clock, from when its deadline counts; None: now.

    Raises:
        InvalidSubmit: names the field that is out of range, and the range.
    """
    prompt, output = list(message.prompt_tokens), list(message.output_tokens)
    vocab_size = _check_tokens(message, prompt, output, model)
    _check_service(message, model)
    room = model.max_model_len - len(prompt)
    limit = 1 if message.prompt_only or message.pooling else min(message.max_tokens or room, room)
    _require(
        not output or len(output) < limit,
        f"{len(output)} tokens have been generated already, and {limit} are the most",
    )
    stop = set(message.stop_token_ids)
    if not message.ignore_eos:
        stop.update(model.eos_token_ids)
    rooted_in = b"" if message.adapter_start else message.adapter_digest
    arrival = time.monotonic() if arrival is None else arrival
    beams = _beams(message, model, limit, frozenset(stop)) if message.HasField("beams") else None
    request = Request(
        link=link,
        request_id=message.request_id,
        prompt=prompt,
        output=output,
        sampling=_sampling(message, model) if beams is None else _candidates(beams),
        max_len=len(prompt) + limit,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(stop),
        adapter_digest=message.adapter_digest,
        adapter_start=message.adapter_start,
        vocab_size=vocab_size,
        grammar=grammar,
        prompt_logprobs=_count_of_top(message, "prompt_logprobs", model),
        prompt_only=message.prompt_only or bool(message.pooling),
        pooling=Pooling(message.pooling) if message.pooling else None,
        beams=beams,
        block_root=root_hash(model.digest, model.dtype, rooted_in, message.cache_scope),
        tenant=account_name(message.tenant, background=message.background),
        weight=message.weight or 1.0,
        priority=message.priority,
        arrival=arrival,
        deadline=arrival + message.deadline_ms / 1000 if message.deadline_ms else None,
    )
    if beams is not None:
        _check_blocks(request, model)
    return request


def _check_tokens(
    message: pb.Submit, prompt: Sequence[int], output: Sequence[int], model: pb.ModelInfo
) -> int:
    """Returns the least vocabulary that has the request's tokens; 0: the model's has.

    An adapter may add some; whether it does is known when it is on the device.
    """
    _require(bool(prompt), "the prompt has no tokens")
    _require(
        len(prompt) < model.max_model_len,
        f"the prompt has {len(prompt)} tokens, and the model's length is {model.max_model_len}, of which the "
        "answer needs at least one; shorten the prompt",
    )
    known = len(prompt) + len(output)
    _require(known <= model.max_model_len, f"{known} tokens exceed the model's length {model.max_model_len}")
    _require(not output or len(message.seeds) == 1, "only a request with one choice can be continued")
    vocab_size = 0
    for name, tokens in (
        ("prompt_tokens", prompt),
        ("output_tokens", output),
        ("stop_token_ids", message.stop_token_ids),
        ("bias_tokens", message.sampling.bias_tokens),
    ):
        size = max(tokens, default=0) + 1
        if size > model.vocab_size:
            _require(
                bool(message.adapter_digest),
                f"{name} has a token beyond the model's vocabulary of {model.vocab_size}",
            )
            vocab_size = max(vocab_size, size)
    _require(
        not message.max_tokens or message.min_tokens <= message.max_tokens,
        f"min_tokens ({message.min_tokens}) is more than max_tokens ({message.max_tokens})",
    )
    return vocab_size


def _check_service(message: pb.Submit, model: pb.ModelInfo) -> None:
    count = len(message.seeds)
    _require(0 < count <= model.max_num_seqs, f"{count} choices: this engine takes 1 to {model.max_num_seqs}")
    _require(not message.pooling or count == 1, "a prompt has one vector: the request must have one choice")
    _require(not message.pooling or message.pooling in list(Pooling), f"unknown pooling {message.pooling}")
    size = len(message.adapter_digest)
    _require(size in (0, DIGEST_BYTES), f"adapter_digest has {size} bytes instead of {DIGEST_BYTES}")
    _require(
        not size or model.num_rank_pages > 0,
        "this engine has no memory for adapters; start it with a larger --lora-memory-bytes",
    )
    start, length = message.adapter_start, len(message.prompt_tokens)
    _require(not start or size > 0, "adapter_start is set, but there is no adapter")
    _require(start < length, f"adapter_start is {start}, beyond the last of the prompt's {length} tokens")
    _require(len(message.cache_scope) <= MAX_SCOPE_BYTES, f"cache_scope is over {MAX_SCOPE_BYTES} bytes")
    _require(
        message.weight == 0 or 1e-6 <= message.weight <= 1e6,
        f"weight is {message.weight}; it must be between 1e-6 and 1e6",
    )


def _sampling(message: pb.Submit, model: pb.ModelInfo) -> tuple[SamplingParams, ...]:
    wire = message.sampling
    _require(0 <= wire.temperature < math.inf, f"temperature is {wire.temperature}; it must be 0 or more")
    _require(0 <= wire.top_p <= 1, f"top_p is {wire.top_p}; it must be between 0 and 1")
    _require(0 <= wire.min_p <= 1, f"min_p is {wire.min_p}; it must be between 0 and 1")
    _require(
        0 <= wire.repetition_penalty < math.inf,
        f"repetition_penalty is {wire.repetition_penalty}; it must be more than 0",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _require(math.isfinite(getattr(wire, name)), f"{name} is not a finite number")
    _require(len(wire.bias_tokens) == len(wire.bias_values), "bias_tokens and bias_values differ in length")
    _require(all(map(math.isfinite, wire.bias_values)), "bias_values has a number that is not finite")
    logprobs = _count_of_top(wire, "logprobs", model)
    return tuple(
        SamplingParams(
            temperature=wire.temperature,
            top_p=wire.top_p or 1.0,
            # No more than there are tokens: the kernels count in 32 signed bits.
            top_k=min(wire.top_k, model.vocab_size),
            min_p=wire.min_p,
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            repetition_penalty=wire.repetition_penalty or 1.0,
            logit_bias=tuple(zip(wire.bias_tokens, wire.bias_values, strict=True)),
            logprobs=logprobs,
            seed=seed,
        )
        for seed in message.seeds
    )


def _beams(message: pb.Submit, model: pb.ModelInfo, max_tokens: int, ends: frozenset[int]) -> BeamOptions:
    penalty, early = message.beams.length_penalty, message.beams.early_stopping
    _require(
        abs(penalty) <= MAX_LENGTH_PENALTY,
        f"length_penalty is {penalty}; it must be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}",
    )
    _require(early in list(EarlyStopping), f"unknown early_stopping {early}")
    for name in ("grammar", "output_tokens", "prompt_only", "pooling", "min_tokens"):
        _require(not getattr(message, name), f"a search does not go with {name}")
    num_top = _count_of_top(message.sampling, "logprobs", model)
    beams = BeamOptions(len(message.seeds), max_tokens, ends, penalty, EarlyStopping(early), num_top)
    most = min(MAX_LOGPROBS, model.vocab_size)
    _require(
        beams.num_candidates <= most,
        f"{beams.width} beams with {len(ends)} end tokens have {beams.num_candidates} candidates in each "
        f"step; they can have at most {most}",
    )
    return beams


def _check_blocks(search: Request, model: pb.ModelInfo) -> None:
    _require(
        search.most_blocks <= model.num_blocks,
        f"the beams of this search may need {search.most_blocks} KV blocks, and the engine has "
        f"{model.num_blocks}; ask for fewer beams or tokens",
    )


def _candidates(beams: BeamOptions) -> tuple[SamplingParams, ...]:
    """What is asked of the rows of a search."""
    return (SamplingParams(logprobs=beams.num_candidates),) * beams.width


def _count_of_top(message: pb.Submit | pb.Sampling, field: str, model: pb.ModelInfo) -> int | None:
    """How many alternatives a field asks for; None if it is not set."""
    if not message.HasField(field):
        return None
    count, most = getattr(message, field), min(MAX_LOGPROBS, model.vocab_size)
    _require(count <= most, f"{field} is {count}; it can be at most {most}")
    return count


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvalidSubmit(sentence)
