"""A tenant for clients that others wrote: the tiny model, an adapter, and one whose template shows tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from tests.e2e.processes import START_S, Stack
from tests.e2e.tiny import TinyZoo, upload
from tests.gateway.tool_templates import ADDED, SPECIAL, TEMPLATES

PLAIN, CALLING = "clients-plain", "clients-calling"


@dataclass(frozen=True)
class Account:
    """Where and as whom a client asks."""

    base_url: str
    key: str


@pytest.fixture(scope="session")
def account(tiny_stack: Stack, zoo: TinyZoo) -> Account:
    key = tiny_stack.create_tenant("clients")
    upload(tiny_stack, key, PLAIN, zoo.add(PLAIN, seed=40))
    folder = zoo.add(CALLING, seed=41)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(zoo.folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(list(ADDED))
    tokenizer.chat_template = TEMPLATES["hermes"]
    tokenizer.save_pretrained(folder)
    upload(tiny_stack, key, CALLING, folder)
    return Account(f"{tiny_stack.url}/v1", key)


@pytest.fixture(scope="session")
def client(account: Account) -> Iterator[OpenAI]:
    with OpenAI(base_url=account.base_url, api_key=account.key, max_retries=0, timeout=START_S) as client:
        yield client


def approximately(value: Any) -> Any:
    """What equals `value` but for the rounding of its floats, which a batch of another shape changes."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
