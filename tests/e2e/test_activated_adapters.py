"""Ten activated adapters and the base model over one long document: it is computed once, for all of them."""

from __future__ import annotations

import pytest

from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, TinyZoo, ask, upload, words

pytestmark = pytest.mark.e2e

DOCUMENT_TOKENS = 2000
NUM_TOKENS = 8


def test_ten_activated_adapters_and_the_base_model_share_a_document(zoo: TinyZoo, tiny_stack: Stack) -> None:
    key = tiny_stack.create_tenant("readers")
    document, question = words(DOCUMENT_TOKENS, 7), words(9, 8)
    invocations = {f"reader-{i}": [480 + i, 500, 501][: 1 + i % 3] for i in range(10)}
    for seed, (name, invocation) in enumerate(invocations.items(), start=50):
        uploaded = upload(
            tiny_stack, key, name, zoo.add(name, seed=seed, alora_invocation_tokens=list(invocation))
        )
        assert uploaded["invocation_tokens"] == invocation
    assert ask(tiny_stack, key, TINY, [*document, *question]).cached_tokens == 0
    texts = set()
    for name, invocation in [(TINY, []), *invocations.items()]:
        prompt = [*document, *invocation, *question]
        answer = ask(tiny_stack, key, name, prompt, NUM_TOKENS)
        assert answer.cached_tokens >= DOCUMENT_TOKENS // 16 * 16
        text, logprobs = zoo.expected(None if name == TINY else name, prompt, len(answer.logprobs))
        assert answer.text == text
        assert answer.logprobs == pytest.approx(logprobs, abs=2e-3)
        assert answer.model == (name if name == TINY else f"{name}@1")
        texts.add(text)
    assert len(texts) == 11, "an adapter that changes nothing"


def test_without_its_invocation_an_activated_adapter_is_the_base_model(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    key, prompt = tiny_stack.create_tenant("silent-reader"), words(100, 9)
    upload(tiny_stack, key, "reader", zoo.add("silent", seed=70, alora_invocation_tokens=[490, 500]))
    base = ask(tiny_stack, key, TINY, prompt)
    answer = ask(tiny_stack, key, "reader", prompt)
    assert answer.model == "reader@1"
    assert (answer.text, answer.cached_tokens) == (base.text, 96)
    assert answer.text == zoo.expected("silent", prompt, len(answer.logprobs))[0]
    twice = [490, 500, *prompt, 490, 500, *prompt[:3]]
    assert ask(tiny_stack, key, "reader", twice).text == zoo.expected("silent", twice, 16)[0]
