"""The inference API through the official client, over real HTTP, real gRPC and a fake engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import ValidationError

from gateway.bodies import MAX_BODY_BYTES, MAX_UNKNOWN_BYTES
from gateway.errors import validation_error
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.tenants import PrefixSharing
from tests.gateway.fake_engine import (
    EOS,
    FAILING_DIGEST,
    MODEL,
    UNREADABLE_DIGEST,
    FakeEngine,
    expected_text,
    make_tokenizer,
)
from tests.gateway.local_stack import LocalStack, wait_until

MESSAGES: Any = [{"role": "user", "content": "Say something 🙂"}]
SQL_A, SQL_B = b"\xa1" * 32, b"\xb2" * 32


@pytest.fixture
def key(local_stack: LocalStack) -> str:
    return local_stack.add_tenant("acme")


@pytest.fixture
def client(local_stack: LocalStack, key: str) -> OpenAI:
    return local_stack.client(key)


@pytest.fixture
def engine(local_stack: LocalStack) -> FakeEngine:
    return local_stack.engines[0]


def streamed(client: OpenAI, **arguments: Any) -> dict[int, dict[str, Any]]:
    """Runs a streamed chat and returns text, logprobs and finish reason of each choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **arguments):
        for choice in chunk.choices:
            into = found.setdefault(choice.index, {"text": "", "logprobs": [], "reason": None, "role": None})
            assert into["reason"] is None, "nothing may follow the finish reason"
            into["role"] = into["role"] or choice.delta.role
            into["text"] += choice.delta.content or ""
            into["logprobs"] += (choice.logprobs.content or []) if choice.logprobs else []
            into["reason"] = choice.finish_reason
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": 7, "max_tokens": 150},
        {"seed": 7, "max_tokens": 60, "n": 3},
        {"seed": 11, "max_tokens": 200, "stop": ["w1", "🙂", "日本w"]},
        {"temperature": 0, "max_tokens": 5},
        {"seed": 3, "max_tokens": 40, "n": 2, "logprobs": True, "top_logprobs": 3, "stop": "w2"},
    ],
)
def test_a_streamed_answer_reassembles_to_the_unstreamed(client: OpenAI, arguments: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **arguments)
    pieces = streamed(client, model=MODEL, messages=MESSAGES, **arguments)
    assert len(pieces) == len(whole.choices) == arguments.get("n", 1)
    for choice in whole.choices:
        piece = pieces[choice.index]
        assert piece["text"] == choice.message.content
        assert piece["reason"] == choice.finish_reason
        assert piece["role"] == "assistant"
        assert piece["logprobs"] == ((choice.logprobs.content or []) if choice.logprobs else [])


def test_the_text_is_what_the_tokens_decode_to(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=90, n=2)
    (submit,) = engine.submits
    assert [choice.message.content for choice in answer.choices] == [expected_text(submit, i) for i in (0, 1)]
    rendered = "<|im_start|>user\nSay something 🙂<|im_end|>\n<|im_start|>assistant\n"
    assert list(submit.prompt_tokens) == make_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_finish_reasons_and_usage(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    prompt_tokens = len(engine.submits[0].prompt_tokens)
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.total_tokens == prompt_tokens + 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == prompt_tokens // 2

    ended = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].message.content == expected_text(engine.submits[1])
    assert engine.submits[1].max_tokens == engine.max_model_len - prompt_tokens


def test_the_end_token_counts_and_is_no_text(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model=MODEL, prompt=[65], max_tokens=500, seed=2)
    assert answer.choices[0].finish_reason == "stop"
    text_tokens = make_tokenizer().encode(answer.choices[0].text, add_special_tokens=False)
    assert "<|im_end|>" not in answer.choices[0].text and EOS not in text_tokens.ids
    forced = client.completions.create(
        model=MODEL, prompt=[65], max_tokens=500, seed=2, extra_body={"ignore_eos": True}
    )
    assert forced.choices[0].finish_reason == "length"
    assert forced.usage is not None and forced.usage.completion_tokens == 500
    assert answer.usage is not None and answer.usage.completion_tokens < 500
    assert forced.choices[0].text.startswith(answer.choices[0].text.rstrip("\ufffd"))


def test_a_stop_string_ends_the_text_before_it_and_the_engine_at_once(
    client: OpenAI, engine: FakeEngine
) -> None:
    engine.step_s = 0.01
    whole = client.completions.create(
        model=MODEL, prompt="go", seed=9, max_tokens=60, extra_body={"ignore_eos": True}
    )
    text = whole.choices[0].text
    stop = text[20:24]
    cut = client.completions.create(
        model=MODEL, prompt="go", seed=9, max_tokens=2000, stop=[stop], extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    wait_until(lambda: not engine.running, "the engine has stopped")
    assert len(engine.aborts) == 1


def test_stop_token_ids_end_the_text(client: OpenAI, engine: FakeEngine) -> None:
    free = client.completions.create(
        model=MODEL, prompt=[70], seed=4, max_tokens=20, logprobs=0, extra_body={"ignore_eos": True}
    )
    assert free.choices[0].logprobs is not None
    stop = make_tokenizer().encode(free.choices[0].logprobs.tokens[10], add_special_tokens=False).ids  # type: ignore[index]
    answer = client.completions.create(
        model=MODEL,
        prompt=[70],
        seed=4,
        max_tokens=20,
        extra_body={"ignore_eos": True, "stop_token_ids": stop[:1]},
    )
    assert answer.choices[0].finish_reason == "stop" or len(stop) > 1
    assert list(engine.submits[1].stop_token_ids) == stop[:1]


def test_include_usage_ends_a_stream_with_a_usage_chunk(client: OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=1, max_tokens=3, stream=True, stream_options=options
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_on_the_wire(local_stack: LocalStack, key: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 3, "stream": True}
    answer = httpx.post(
        f"{local_stack.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    last = json.loads(events[-3].removeprefix("data: "))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        seed=1,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 12
    joined = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert logprobs.content[0].top_logprobs[2].logprob == -9999.0


def test_completion_logprobs_and_offsets(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", seed=1, max_tokens=12, logprobs=2, extra_body={"ignore_eos": True}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    offsets = choice.logprobs.text_offset or []
    assert (
        len(choice.logprobs.tokens or []) == len(choice.logprobs.token_logprobs or []) == len(offsets) == 12
    )
    assert offsets[0] == 0 and offsets == sorted(offsets)
    tokens = ["", *(choice.logprobs.tokens or [])]
    for before, token, offset in zip(tokens, tokens[1:], offsets, strict=False):
        # After a part of a character, it is the next token that shows it.
        assert "\ufffd" in before + token or choice.text[offset:].startswith(token)


def test_several_prompts_and_token_prompts(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, seed=6, max_tokens=30)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    first, second = engine.submits
    expected = [expected_text(submit, index) for submit in (first, second) for index in (0, 1)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None and answer.usage.prompt_tokens == 6

    ids = list(first.prompt_tokens)
    same = client.completions.create(model=MODEL, prompt=ids, seed=6, max_tokens=30)
    assert same.choices[0].text == expected[0]


def test_a_continued_message_is_not_closed(client: OpenAI, engine: FakeEngine) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"continue_final_message": True}
    )
    prompt = make_tokenizer().decode(list(engine.submits[0].prompt_tokens), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nWell, ")


async def test_the_async_client(local_stack: LocalStack, key: str) -> None:
    async with local_stack.async_client(key) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=5, max_tokens=50, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == expected_text(local_stack.engines[0].submits[0])


# ---- tenants --------------------------------------------------------------------------------------------


def test_two_tenants_with_one_adapter_name_get_their_own(local_stack: LocalStack, engine: FakeEngine) -> None:
    keys = [local_stack.add_tenant(tenant) for tenant in ("a", "b")]
    local_stack.add_adapter("a", "sql", SQL_A)
    local_stack.add_adapter("b", "sql", SQL_B)
    for key, digest in zip(keys, (SQL_A, SQL_B), strict=True):
        answer = local_stack.client(key).chat.completions.create(model="sql", messages=MESSAGES, max_tokens=1)
        assert answer.model == "sql@1"
        assert engine.submits[-1].adapter_digest == digest


def test_anothers_adapter_is_answered_like_none(local_stack: LocalStack, client: OpenAI) -> None:
    local_stack.add_tenant("other")
    local_stack.add_adapter("other", "secret", SQL_A)
    answers = []
    for name in ("secret", "nosuch", "secret@1", "SECRET/../x"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=name, messages=MESSAGES)
        answers.append(json.dumps(caught.value.body).replace(name, "NAME"))
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    assert len(set(answers)) == 1


def test_models_lists_the_base_and_own_adapters(local_stack: LocalStack, client: OpenAI) -> None:
    local_stack.add_tenant("other")
    local_stack.add_adapter("other", "secret", SQL_B)
    local_stack.add_adapter("acme", "sql", SQL_A)
    local_stack.add_adapter("acme", "sql", SQL_B)
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {MODEL, "sql"}
    assert client.models.retrieve("sql@1").id == "sql@1"
    assert client.models.retrieve(MODEL).id == MODEL


def test_cache_scopes_keep_private_tenants_apart(local_stack: LocalStack, engine: FakeEngine) -> None:
    sharing = {
        "p1": PrefixSharing.PRIVATE,
        "p2": PrefixSharing.PRIVATE,
        "s1": PrefixSharing.SHARED,
        "s2": PrefixSharing.SHARED,
    }
    scopes = {}
    for tenant, kind in sharing.items():
        client = local_stack.client(local_stack.add_tenant(tenant, kind))
        for salt in (None, "salt"):
            extra = {"cache_salt": salt} if salt else {}
            client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body=extra)
            scopes[tenant, salt] = engine.submits[-1].cache_scope
            assert engine.submits[-1].tenant == tenant
    assert scopes["s1", None] == scopes["s2", None]
    assert scopes["s1", "salt"] == scopes["s2", "salt"]
    assert len(set(scopes.values())) == 6


def test_a_request_without_a_key_is_refused_before_its_body_is_judged(local_stack: LocalStack) -> None:
    answer = httpx.post(f"{local_stack.url}/v1/chat/completions", json={"nonsense": 1})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


# ---- what goes on the wire ------------------------------------------------------------------------------


def test_sampling_reaches_the_engine_with_openais_defaults(client: OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model=MODEL, prompt="x")
    plain = engine.submits[-1]
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.max_tokens) == (1.0, 1.0, 16)
    assert not plain.sampling.HasField("logprobs")
    client.completions.create(
        model=MODEL, prompt="x", temperature=0.5, top_p=0, presence_penalty=1, frequency_penalty=-1,
        max_tokens=2, logit_bias={"5": 2},
        extra_body={"top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 1},
    )  # fmt: skip
    sampling = engine.submits[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (
        0.5,
        7,
        0.25,
        1.5,
    )
    assert 0 < sampling.top_p < 1e-5, "0 means off on the wire, and the most likely token to a client"
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert dict(zip(sampling.bias_tokens, sampling.bias_values, strict=True)) == {5: 2.0}


def test_requests_without_a_seed_differ(client: OpenAI, engine: FakeEngine) -> None:
    for _ in range(2):
        client.completions.create(model=MODEL, prompt="x", n=4, max_tokens=1)
    seeds = [seed for submit in engine.submits for seed in submit.seeds]
    assert len(set(seeds)) == 8


# ---- errors ---------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url"}
F = {"name": "f"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "change", "param", "says"),
    [
        (CHAT, {"messages": None}, "messages", "list"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "system"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "text"),
        (CHAT, {"temperature": 3}, "temperature", "less than or equal to 2"),
        (CHAT, {"temperature": "1"}, "temperature", "number"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"n": 1000}, "n", "128"),
        (CHAT, {"stop": [""]}, "stop[0]", "at least 1 character"),
        (CHAT, {"bogus": 1}, "bogus", "Unrecognized request argument supplied: bogus"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "Missing required parameter"),
        (CHAT, {"tools": [{"type": "custom", "function": F}]}, "tools[0].type", "'function'"),
        (CHAT, {"tools": [{"type": "function", "function": F}]}, "tools", "does not show tools"),
        (CHAT, {"tools": [{"type": "function", "function": F}] * 2}, "tools", "'f' is there more than once"),
        (CHAT, {"tools": [{"type": "function", "function": F | {"parameters": {"type": "array"}}}]},
         "tools[0].function.parameters", "must be \"object\""),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "it needs 'tools'"),
        (CHAT, {"tool_choice": "any"}, "tool_choice", "'required'"),
        (CHAT, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "Missing"),
        (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content", "may be null only"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "needs it"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
         "messages[0].tool_call_id", "only a tool's"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
         "messages[0].tool_calls", "only an assistant's"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        (CHAT, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        (CHAT, {"logit_bias": {"100000": 1}}, "logit_bias", "vocabulary of 512"),
        (CHAT, {"max_tokens": 3000}, "max_tokens", "maximum context length is 2048"),
        (CHAT, {"min_tokens": 30, "max_tokens": 20}, "min_tokens", "at most 20"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": [1, 100000]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": [[1], []]}, "prompt[1]", "at least 1"),
        (TEXT, {"suffix": "x"}, "suffix", "'suffix' is not supported"),
        (TEXT, {"n": 3, "best_of": 2}, "best_of", "at least"),
        (TEXT, {"prompt": "x" * 5000}, "prompt", "length is 2048 tokens. However, your prompt has 5000"),
        (TEXT, {"prompt": "x" * 500_000}, "prompt", "maximum context length is 2048"),
        (TEXT, {"model": "x" * 300}, "model", "256"),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(
    local_stack: LocalStack, key: str, path: str, change: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": MODEL} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | change
    answer = httpx.post(f"{local_stack.url}{path}", json=body, headers={"authorization": f"Bearer {key}"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert says in error["message"]
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "content",
    [b"{", b'{"model": NaN}', b"[]", b"", b'{"model":"\\ud800","messages":[]}', b"[" * 100_000, b"\xff"],
)
def test_bodies_that_are_no_request(local_stack: LocalStack, key: str, content: bytes) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    answer = httpx.post(f"{local_stack.url}{CHAT}", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_body_is_read_for_a_known_caller_only_and_up_to_a_bound(
    local_stack: LocalStack, key: str, path: str
) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    assert httpx.post(f"{local_stack.url}{path}", content=body).status_code == 401
    answer = httpx.post(f"{local_stack.url}{path}", content=body, headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    answer = httpx.post(f"{local_stack.url}/admin/tenants", content=b" " * (MAX_UNKNOWN_BYTES + 1))
    assert answer.status_code == 413, "FastAPI reads this one before it asks for the key"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {f"f{index}": 1 for index in range(700_000)}, None),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 220_000}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 2_000_000}]}, "messages[0].content"),
        (CHAT, {"metadata": {str(index): 1 for index in range(600_000)}}, "metadata"),
        (CHAT, {"logit_bias": {str(index): "" for index in range(600_000)}}, "logit_bias"),
        (CHAT, {"stop": [1] * 2_000_000}, "stop"),
        (CHAT, {"stop_token_ids": ["a"] * 1_000_000}, "stop_token_ids"),
        ("/v1/completions", {"prompt": ["a"] * 1_000_000}, "prompt"),
        ("/v1/completions", {"prompt": [[]] * 2_000_000}, "prompt"),
    ],
)
def test_a_body_of_very_many_faults_does_not_hold_up_the_others(
    path: str, fields: dict[str, Any], param: str | None
) -> None:
    kind = ChatRequest if path == CHAT else CompletionRequest
    value = (
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"model": MODEL}
    )
    began = time.process_time()
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(value | fields)
    fault = validation_error(caught.value.errors(include_url=False, include_input=False))
    assert time.process_time() - began < 0.5, "some milliseconds are normal"
    assert fault.status == 400 and (fault.param or "").startswith(param or "")


def test_a_body_without_a_content_type_is_read_all_the_same(local_stack: LocalStack, key: str) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2}).encode()
    answer = httpx.post(f"{local_stack.url}{CHAT}", content=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        b'"messages":[{"role":"user","content":"\\ud800"}]',
        b'"messages":[{"role":"user","content":"a"}],"logit_bias":{"\\ud800":1}',
        b'"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":"\\udfff"}',
    ],
)
def test_half_a_surrogate_pair_is_no_text(local_stack: LocalStack, key: str, fields: bytes) -> None:
    body = b'{"model":"%b",%b}' % (MODEL.encode(), fields)
    answer = httpx.post(f"{local_stack.url}{CHAT}", content=body, headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_more_choices_than_an_engine_runs_are_refused(valkey_url: str, tmp_path: Path) -> None:
    stack = LocalStack(valkey_url, tmp_path / "store", [FakeEngine("engine-1", valkey_url, max_num_seqs=4)])
    stack.start()
    try:
        stack.wait_ready()
        client = stack.client(stack.add_tenant("acme"))
        assert len(client.completions.create(model=MODEL, prompt="x", n=4, max_tokens=1).choices) == 4
        with pytest.raises(openai.BadRequestError, match="at most 4 choices") as caught:
            client.completions.create(model=MODEL, prompt="x", n=5)
        assert caught.value.param == "n"
    finally:
        stack.stop()


def test_an_unknown_field_is_named_whatever_its_name(local_stack: LocalStack, key: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "best-of": 2}
    answer = httpx.post(f"{local_stack.url}{CHAT}", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.json()["error"]["message"] == "Unrecognized request argument supplied: best-of"


def test_unknown_routes_and_methods_have_the_error_shape(local_stack: LocalStack) -> None:
    missing = httpx.get(f"{local_stack.url}/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    wrong = httpx.get(f"{local_stack.url}{CHAT}")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_failing_request_is_an_error_and_not_an_answer(local_stack: LocalStack, client: OpenAI) -> None:
    local_stack.add_adapter("acme", "nan", FAILING_DIGEST)
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.chat.completions.create(model="nan", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.chat.completions.create(model="nan", messages=MESSAGES, stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_that_cannot_be_read_just_now_is_503_before_anything_is_sent(
    local_stack: LocalStack, client: OpenAI, stream: bool
) -> None:
    local_stack.add_adapter("acme", "cold", UNREADABLE_DIGEST)
    with pytest.raises(openai.InternalServerError, match="files cannot be read") as caught:
        client.chat.completions.create(model="cold", messages=MESSAGES, stream=stream)
    answer = caught.value.response
    assert (answer.status_code, caught.value.code) == (503, "store_unavailable")
    assert int(answer.headers["retry-after"]) > 0


def test_a_bug_is_a_500_without_internals(
    local_stack: LocalStack, client: OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("gateway.api.converse.build_submits", explode)
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert "secret" not in caught.value.message
    assert caught.value.response.headers["x-request-id"] in caplog.text
    assert "secret detail" in caplog.text


# ---- health ---------------------------------------------------------------------------------------------


def test_health_ready_and_metrics(local_stack: LocalStack, client: OpenAI) -> None:
    assert httpx.get(f"{local_stack.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{local_stack.url}/ready").json()["engines"] == 1
    client.completions.create(model=MODEL, prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
    text = httpx.get(f"{local_stack.url}/metrics").text
    assert 'loraplex_requests_total{outcome="completed",route="completions"} 1.0' in text
    assert "loraplex_completion_tokens_total 5.0" in text
    assert "loraplex_time_to_first_token_seconds_count 1.0" in text
    assert "loraplex_requests_running 0.0" in text
