"""From a validated body to what goes on the wire: one Submit per prompt."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

from gateway.activation import activation_start
from gateway.auth import Principal
from gateway.errors import ApiError, invalid_request
from gateway.resolve import ResolvedModel, cache_scope
from gateway.schemas.generation import GenerationFields
from protos.engine_pb2 import Sampling, Submit

# On the wire, a top_p of 0 means off; to a client it means the most likely token only.
_LEAST_TOP_P = 1e-6
_BAN = -100.0
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def build_submits(
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    model: ResolvedModel,
    caller: Principal,
    max_tokens: int | None,
    logprobs: int | None,
    end_tokens: Sequence[int] = (),
    grammar: str = "",
    banned: Collection[int] = (),
    prompt_logprobs: int | None = None,
) -> list[Submit]:
    """Returns a Submit per prompt, complete but for the request id.

    `max_tokens` None: as many as the model's length leaves. `end_tokens` end an answer beside the model's
    own; `grammar` is what each choice must fit; `banned` tokens do not come; `prompt_logprobs` are the
    alternatives for each token of the prompts, if those are to be told. Raises ApiError 400 for a
    prompt that does not fit, a token that does not exist, or more choices than an engine runs.
    """
    count = fields.drawn_choices
    _check_choices(fields, model.info.max_num_seqs)
    if count > (fields.n or 1) and logprobs is None:
        logprobs = 0  # to tell the best by
    sampling = _sampling(fields, model.vocab_size, logprobs, banned)
    stop_tokens = list(dict.fromkeys(fields.stop_token_ids or ()))
    check_tokens(stop_tokens, model.vocab_size, "stop_token_ids")
    if not fields.ignore_eos:
        stop_tokens += [token for token in end_tokens if token not in stop_tokens]
    scope = cache_scope(caller, fields.cache_salt)
    seed = secrets.randbits(63) if fields.seed is None else fields.seed & _MASK_64
    submits = []
    for index, prompt in enumerate(prompts):
        limit = _limit(len(prompt), model.info.max_model_len, max_tokens)
        _check_min_tokens(fields.min_tokens or 0, limit)
        choices = range(index * count, (index + 1) * count)
        digest, start = adapter_for(prompt, model)
        submits.append(
            Submit(
                prompt_tokens=prompt,
                adapter_digest=digest,
                adapter_start=start,
                cache_scope=scope,
                tenant=caller.tenant_id,
                weight=caller.weight,
                priority=fields.priority or 0,
                seeds=[_choice_seed(seed, choice) for choice in choices],
                sampling=sampling,
                max_tokens=limit,
                min_tokens=fields.min_tokens or 0,
                stop_token_ids=stop_tokens,
                ignore_eos=bool(fields.ignore_eos),
                grammar=grammar,
                prompt_logprobs=prompt_logprobs,
                prompt_only=limit == 0,
            )
        )
    return submits


def _check_choices(fields: GenerationFields, most: int) -> None:
    """Raises ApiError 400 for more choices than an engine runs, if that is known."""
    count = fields.drawn_choices
    if 0 < most < count:
        name = "n" if count == (fields.n or 1) else "best_of"
        message = f"'{name}' is {count}, but the engine runs at most {most} choices at once."
        raise invalid_request(message, param=name)


def _check_min_tokens(least: int, limit: int) -> None:
    if least > limit:
        raise invalid_request(
            f"'min_tokens' is {least}, but at most {limit} tokens can be generated.", param="min_tokens"
        )


def too_long(prompt_tokens: int | str, max_model_len: int) -> ApiError:
    """Returns the 400 for a prompt that leaves no room for an answer."""
    return invalid_request(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
        f"{prompt_tokens} tokens, and at least one more must fit. Please reduce the length of the prompt.",
        code="context_length_exceeded",
        param="prompt",
    )


def _limit(prompt_tokens: int, max_model_len: int, max_tokens: int | None) -> int:
    """Returns how many tokens to generate at most: at least one, unless none are wanted."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise too_long(prompt_tokens, max_model_len)
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise invalid_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the "
            "completion). Please reduce the length of the prompt or of the completion.",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return max_tokens


def adapter_for(prompt: Sequence[int], model: ResolvedModel) -> tuple[bytes, int]:
    """Returns the digest of the adapter that runs this prompt, empty for none, and the first position that it
    applies to. An activated adapter whose invocation does not occur leaves the prompt to the base model.
    """
    adapter = model.adapter
    if adapter is None or not adapter.invocation_tokens:
        return model.adapter_digest, 0
    start = activation_start(prompt, adapter.invocation_tokens)
    return (b"", 0) if start is None else (adapter.digest, start)


def _sampling(
    fields: GenerationFields, vocab_size: int, logprobs: int | None, banned: Collection[int]
) -> Sampling:
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    check_tokens(list(bias), vocab_size, "logit_bias")
    bias.update(dict.fromkeys(banned, _BAN))
    top_p = 1.0 if fields.top_p is None else max(fields.top_p, _LEAST_TOP_P)
    return Sampling(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=top_p,
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 0.0,
        bias_tokens=list(bias),
        bias_values=list(bias.values()),
        logprobs=logprobs,
    )


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 that names `param` when one of a client's token ids does not exist."""
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        raise invalid_request(
            f"The token id {largest} in '{param}' is not in the vocabulary of {vocab_size} tokens.",
            param=param,
        )


def _choice_seed(seed: int, choice: int) -> int:
    """Returns a choice's own seed: the first one's is the
    request's, the others are spread over all 64-bit numbers.
    """
    return (seed + choice * _GOLDEN) & _MASK_64
