"""Where activated adapters begin, against PEFT's own search."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets

from gateway.activation import activation_start


def start_in_peft(prompt: list[int], invocation: list[int]) -> int | None:
    configs: Any = {"it": SimpleNamespace(alora_invocation_tokens=invocation)}
    (offset,) = calculate_alora_offsets(configs, "it", torch.tensor([prompt]))
    return None if offset is None else len(prompt) - offset


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    invocation=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
def test_it_is_where_peft_lets_it_begin(prompt: list[int], invocation: list[int]) -> None:
    assert activation_start(prompt, invocation) == start_in_peft(prompt, invocation)


def test_every_token_of_a_large_vocabulary_counts() -> None:
    # 0xD800 and up are no characters that UTF-8 could hold.
    for token in (0, 0x7F, 0xD800, 0xDFFF, 0xFFFF, 300_000):
        assert activation_start([5, token, 6], [token]) == 1
        assert activation_start([5, token + 1, 6], [token]) is None


def test_long_prompts_that_nearly_match_everywhere_take_no_longer() -> None:
    prompt = [7] * 200_000
    began = time.thread_time()
    for invocation in ([7] * 1000 + [8], [8] + [7] * 1000, [7] * 500 + [8] + [7] * 500):
        assert activation_start(prompt, invocation) is None
    assert time.thread_time() - began < 1.0
