"""instructor over a running stack: objects out of answers, by tools and by schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.clients.conftest import CALLING, PLAIN
from tests.e2e.tiny import TINY

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "w1 日本?"}]


class Item(BaseModel):
    """A thing in an order."""

    model_config = ConfigDict(extra="forbid")  # random weights would write further fields without end

    name: Literal["w1", "日本", "🙂"]
    count: Annotated[int, Field(ge=1, le=9)]


class Order(BaseModel):
    """An order of one or two things."""

    model_config = ConfigDict(extra="forbid")

    items: Annotated[list[Item], Field(min_length=1, max_length=2)]


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (TINY, instructor.Mode.JSON_SCHEMA),
        (PLAIN, instructor.Mode.JSON_SCHEMA),
        (CALLING, instructor.Mode.TOOLS),
    ],
)
def test_an_answer_is_an_object_the_first_time(client: OpenAI, model: str, mode: instructor.Mode) -> None:
    asked = instructor.from_openai(client, mode=mode)
    order, answer = asked.chat.completions.create_with_completion(
        model=model, messages=QUESTION, response_model=Order, max_tokens=300, seed=4, max_retries=0
    )
    assert isinstance(order, Order)
    assert answer.usage.completion_tokens > 0


def test_a_partial_object_grows_to_the_whole_one(client: OpenAI) -> None:
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    arguments: Any = {"model": PLAIN, "messages": QUESTION, "max_tokens": 300, "seed": 4}
    whole = asked.chat.completions.create(response_model=Order, max_retries=0, **arguments).model_dump()
    most_states = 0
    for _ in range(20):  # a machine that holds the gateway up for an answer's time has it in one piece
        states = list(asked.chat.completions.create_partial(response_model=Order, **arguments))
        assert states[-1].model_dump() == whole
        most_states = max(most_states, len(states))
        if most_states > 1:
            break
    assert most_states > 1
