"""What a client may ask for, and what it is told otherwise."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from engine.beams import BeamOptions, EarlyStopping
from engine.block_pool import block_hashes, root_hash
from engine.step import Pooling, SamplingParams
from engine.submission import InvalidSubmit, parse_submit
from protos import engine_pb2 as pb

MODEL = pb.ModelInfo(
    digest=b"m" * 32,
    vocab_size=1000,
    max_model_len=100,
    eos_token_ids=[2, 3],
    dtype="float32",
    num_rank_pages=4,
    max_num_seqs=8,
)


def submit(**fields: Any) -> pb.Submit:
    return pb.Submit(
        **{"request_id": 1, "prompt_tokens": [1, 2, 3], "seeds": [5], "max_tokens": 10, **fields}
    )


def test_a_plain_request() -> None:
    message = submit(adapter_digest=b"a" * 32, cache_scope=b"scope", tenant="t", weight=2.5, priority=-1)
    request = parse_submit(message, "link", MODEL)
    assert request.key == ("link", 1)
    assert (request.tenant, request.weight, request.priority) == ("t", 2.5, -1)
    assert request.max_len == 13 and request.deadline is None
    assert request.stop_token_ids == {2, 3}
    assert request.block_root == root_hash(b"m" * 32, "float32", b"a" * 32, b"scope")
    (params,) = request.sampling
    assert (params.temperature, params.top_p, params.repetition_penalty, params.seed) == (0.0, 1.0, 1.0, 5)
    assert params.logprobs is None
    plain = parse_submit(submit(), "link", MODEL)
    assert plain.weight == 1.0 and plain.pooling is None and plain.block_root != request.block_root


def test_a_prompt_alone() -> None:
    plain = parse_submit(submit(), "link", MODEL)
    assert plain.prompt_logprobs is None and not plain.prompt_only
    request = parse_submit(submit(prompt_only=True, max_tokens=0, prompt_logprobs=0), "link", MODEL)
    assert request.prompt_only and request.prompt_logprobs == 0
    assert request.max_len == 4, "a token is drawn, and told nobody"
    with pytest.raises(InvalidSubmit, match="prompt_logprobs is 21; it can be at most 20"):
        parse_submit(submit(prompt_logprobs=21), "link", MODEL)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_vector(pooling: Pooling) -> None:
    """It needs its prompt alone, however many tokens the message asks for."""
    message = submit(pooling=int(pooling))
    request = parse_submit(message, "link", MODEL)
    assert request.pooling is pooling and request.prompt_only and request.max_len == 4


def test_an_activated_adapter_is_rooted_in_the_base_model() -> None:
    message = submit(adapter_digest=b"a" * 32, cache_scope=b"scope", adapter_start=2)
    request = parse_submit(message, "link", MODEL)
    assert (request.adapter_digest, request.adapter_start) == (b"a" * 32, 2)
    assert request.block_root == root_hash(b"m" * 32, "float32", b"", b"scope")


def test_tokens_beyond_the_model_s_are_left_to_the_adapter() -> None:
    plain = parse_submit(submit(adapter_digest=b"a" * 32), "link", MODEL)
    assert plain.vocab_size == 0
    message = submit(adapter_digest=b"a" * 32, prompt_tokens=[1, 1003], stop_token_ids=[1001])
    assert parse_submit(message, "link", MODEL).vocab_size == 1004
    biased = submit(adapter_digest=b"a" * 32, sampling=pb.Sampling(bias_tokens=[1000], bias_values=[1]))
    assert parse_submit(biased, "link", MODEL).vocab_size == 1001


def test_all_sampling_fields_arrive() -> None:
    sampling = pb.Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        bias_tokens=[7, 8],
        bias_values=[-100, 2.5],
        logprobs=0,
    )
    request = parse_submit(submit(sampling=sampling, seeds=[1, 2**64 - 1]), "link", MODEL)
    one, other = request.sampling
    assert (one.temperature, one.top_p, one.top_k, one.min_p) == (0.5, 0.25, 40, 0.125)
    assert (one.presence_penalty, one.frequency_penalty, one.repetition_penalty) == (-1.5, 1.5, 1.25)
    assert one.logit_bias == ((7, -100.0), (8, 2.5)) and one.logprobs == 0
    assert (one.seed, other.seed) == (1, 2**64 - 1)


def test_a_top_k_beyond_the_vocabulary_fits_into_what_the_kernels_count_with() -> None:
    request = parse_submit(submit(sampling=pb.Sampling(temperature=1, top_k=2**32 - 1)), "link", MODEL)
    assert request.sampling[0].top_k == 1000


def test_lengths_end_and_deadline() -> None:
    assert parse_submit(submit(max_tokens=0), "link", MODEL).max_len == 100
    assert parse_submit(submit(max_tokens=5000), "link", MODEL).max_len == 100
    request = parse_submit(
        submit(ignore_eos=True, stop_token_ids=[9], output_tokens=[4, 5], deadline_ms=1500), "link", MODEL
    )
    assert request.max_len == 13, "max_tokens counts from the end of the prompt"
    assert request.stop_token_ids == {9}
    assert request.deadline is not None and 1.0 < request.deadline - time.monotonic() <= 1.5
    delayed = parse_submit(submit(deadline_ms=1500), "link", MODEL, None, 40.0)
    assert (delayed.arrival, delayed.deadline) == (40.0, 41.5)
    hashed = parse_submit(
        submit(prompt_tokens=range(20), output_tokens=range(20), max_tokens=30), "link", MODEL
    )
    assert hashed.prompt_hashes == block_hashes(hashed.block_root, [*range(20), *range(20)])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_tokens": []}, "no tokens"),
        ({"prompt_tokens": range(100)}, "has 100 tokens, and the model's length is 100"),
        ({"prompt_tokens": [1000]}, "prompt_tokens has a token beyond the model's vocabulary of 1000"),
        ({"output_tokens": [2**32 - 1]}, "output_tokens has a token beyond"),
        ({"output_tokens": [1], "seeds": [1, 2]}, "only a request with one choice"),
        (
            {"output_tokens": [1, 2], "max_tokens": 2},
            "2 tokens have been generated already, and 2 are the most",
        ),
        ({"prompt_tokens": range(60), "output_tokens": range(50)}, "110 tokens exceed"),
        ({"stop_token_ids": [1000]}, "stop_token_ids has a token beyond"),
        ({"seeds": []}, "0 choices: this engine takes 1 to 8"),
        ({"seeds": range(9)}, "9 choices"),
        ({"adapter_digest": b"short"}, "adapter_digest has 5 bytes instead of 32"),
        ({"adapter_start": 1}, "adapter_start is set, but there is no adapter"),
        (
            {"adapter_digest": b"a" * 32, "adapter_start": 3},
            "adapter_start is 3, beyond the last of the prompt's 3",
        ),
        ({"pooling": 3}, "unknown pooling 3"),
        ({"pooling": pb.POOLING_MEAN, "seeds": [1, 2]}, "a prompt has one vector"),
        ({"cache_scope": b"x" * 257}, "cache_scope is over 256 bytes"),
        ({"weight": -1.0}, "weight is -1.0"),
        ({"weight": 9e-7}, "weight is 9e-07"),
        ({"weight": 1e6 + 1}, "weight is 1000001.0"),
        ({"weight": math.nan}, "weight is nan"),
        ({"min_tokens": 11}, "min_tokens (11) is more than max_tokens (10)"),
        ({"sampling": pb.Sampling(temperature=-0.5)}, "temperature is -0.5"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "temperature is nan"),
        ({"sampling": pb.Sampling(temperature=math.inf)}, "temperature is inf"),
        ({"sampling": pb.Sampling(top_p=1.5)}, "top_p is 1.5"),
        ({"sampling": pb.Sampling(top_p=-0.5)}, "top_p is -0.5"),
        ({"sampling": pb.Sampling(min_p=-1)}, "min_p is -1.0"),
        ({"sampling": pb.Sampling(min_p=1.5)}, "min_p is 1.5"),
        ({"sampling": pb.Sampling(repetition_penalty=-1)}, "repetition_penalty is -1.0"),
        ({"sampling": pb.Sampling(repetition_penalty=math.inf)}, "repetition_penalty is inf"),
        ({"sampling": pb.Sampling(presence_penalty=math.nan)}, "presence_penalty is not a finite"),
        ({"sampling": pb.Sampling(frequency_penalty=math.inf)}, "frequency_penalty is not a finite"),
        ({"sampling": pb.Sampling(bias_tokens=[1])}, "differ in length"),
        ({"sampling": pb.Sampling(bias_tokens=[1000], bias_values=[1])}, "bias_tokens has a token beyond"),
        ({"sampling": pb.Sampling(bias_tokens=[1], bias_values=[math.nan])}, "not finite"),
        ({"sampling": pb.Sampling(logprobs=21)}, "logprobs is 21; it can be at most 20"),
    ],
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidSubmit) as caught:
        parse_submit(submit(**fields), "link", MODEL)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": [999], "stop_token_ids": [999]},
        {"prompt_tokens": [1] * 99, "max_tokens": 0},
        {"output_tokens": [1] * 9},
        {"min_tokens": 10},
        {"min_tokens": 50, "max_tokens": 0},
        {"seeds": [0] * 8},
        {"adapter_digest": b"a" * 32, "adapter_start": 2},
        {"cache_scope": b"x" * 256},
        {"weight": 1e-6},
        {"weight": 1e6},
        {"prompt_logprobs": 20},
        {"sampling": pb.Sampling(top_p=1, min_p=1, logprobs=20)},
    ],
)
def test_what_is_just_within_its_range_is_taken(fields: dict[str, Any]) -> None:
    request = parse_submit(submit(**fields), "link", MODEL)
    assert request.max_len <= MODEL.max_model_len and request.vocab_size == 0


def test_an_engine_without_pages_takes_no_adapters() -> None:
    model = pb.ModelInfo()
    model.CopyFrom(MODEL)
    model.num_rank_pages = 0
    with pytest.raises(InvalidSubmit, match="no memory for adapters"):
        parse_submit(submit(adapter_digest=b"a" * 32), "link", model)
    assert parse_submit(submit(), "link", model).adapter_digest == b"", "it serves the base model"
    model.num_rank_pages = 1
    assert parse_submit(submit(adapter_digest=b"a" * 32), "link", model).adapter_digest == b"a" * 32


SEARCHED = pb.ModelInfo()
SEARCHED.CopyFrom(MODEL)
SEARCHED.num_blocks = 20


def search(**fields: Any) -> pb.Submit:
    return submit(**{"seeds": [0] * 3, "beams": pb.Beams(length_penalty=1.0), **fields})


def test_a_search() -> None:
    beams = pb.Beams(length_penalty=-0.5, early_stopping=pb.EARLY_STOPPING_NEVER)
    message = search(beams=beams, stop_token_ids=[9], sampling=pb.Sampling(logprobs=1, temperature=1.0))
    request = parse_submit(message, "link", SEARCHED)
    assert request.beams == BeamOptions(3, 10, frozenset({2, 3, 9}), -0.5, EarlyStopping.NEVER, num_top=1)
    assert request.sampling == (SamplingParams(logprobs=4 * 3),) * 3, "as many as if all ends were among them"
    assert parse_submit(search(ignore_eos=True), "link", SEARCHED).sampling[0].logprobs == 2 * 3
    most = parse_submit(search(seeds=[0] * 5, stop_token_ids=[9]), "link", SEARCHED)
    assert most.sampling[0].logprobs == 20
    for penalty in (-10.0, 10.0):
        request = parse_submit(search(beams=pb.Beams(length_penalty=penalty)), "link", SEARCHED)
        assert request.beams is not None and request.beams.length_penalty == penalty
    assert parse_submit(submit(), "link", MODEL).beams is None


def test_a_search_that_could_never_end_is_refused_with_both_numbers() -> None:
    """Of 20 blocks the prompt's two are shared, and six are for each beam: 128 tokens in all."""
    model = pb.ModelInfo()
    model.CopyFrom(SEARCHED)
    model.max_model_len = 1000
    fits = parse_submit(search(prompt_tokens=[1] * 40, max_tokens=88), "link", model)
    assert fits.most_blocks == 20
    with pytest.raises(InvalidSubmit, match="may need 23 KV blocks, and the engine has 20"):
        parse_submit(search(prompt_tokens=[1] * 40, max_tokens=89), "link", model)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"beams": pb.Beams(length_penalty=10.5)}, "length_penalty is 10.5; it must be between -10 and 10"),
        ({"beams": pb.Beams(length_penalty=math.nan)}, "length_penalty is nan"),
        ({"beams": pb.Beams(early_stopping=7)}, "unknown early_stopping 7"),  # type: ignore[arg-type]
        ({"seeds": [0] * 7}, "7 beams with 2 end tokens have 21 candidates in each step; .* at most 20"),
        ({"seeds": [0] * 9}, "9 choices: this engine takes 1 to 8"),
        ({"grammar": "x"}, "does not go with grammar"),
        ({"seeds": [0], "output_tokens": [1]}, "does not go with output_tokens"),
        ({"prompt_only": True}, "does not go with prompt_only"),
        ({"pooling": pb.POOLING_LAST, "seeds": [0]}, "does not go with pooling"),
        ({"min_tokens": 1}, "does not go with min_tokens"),
        ({"sampling": pb.Sampling(logprobs=21)}, "logprobs is 21"),
    ],
)
def test_what_a_search_cannot_do(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSubmit, match=why):
        parse_submit(search(**fields), "link", SEARCHED)
