"""Adapters that bring a tokenizer, on a whole stack: their words, template, end and new tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletionMessageParam
from peft import PeftModel
from transformers import PreTrainedTokenizerFast

from tests.adapter_kinds import Kind, save_kind
from tests.e2e.processes import Stack
from tests.e2e.tiny import TINY, VOCAB_SIZE, TinyZoo, ask, endless, generate, try_upload, upload

pytestmark = pytest.mark.e2e

CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "w1 w2"},
    {"role": "user", "content": "Is <tool> a w3?"},
]
TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>{% endif %}"
)
HANGING = (
    "{% set n = namespace(x=range(90000) | list) %}{% for i in range(5000) %}"
    "{% set n.y = (n.x | sort(reverse=true)) %}{% endfor %}"
)


def tokenizer_of(zoo: TinyZoo) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(zoo.folder / "model")


def test_prompts_are_made_and_answers_read_with_the_adapter_s_own_tokenizer(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    folder = zoo.add("speaker", seed=80)
    tokenizer = tokenizer_of(zoo)
    tokenizer.add_tokens(["<tool>", "<turn>"], special_tokens=True)
    tokenizer.add_tokens([f" v{i}" for i in range(40)])  # words where the base model has none
    tokenizer.chat_template = TEMPLATE
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert zoo.peft is not None
    zoo.peft.set_adapter("speaker")
    tokens, _ = generate(zoo.peft, prompt, 40)
    # The model is random: one of the tokens that it happens to generate is made the end of an answer.
    length = next(i for i in range(5, 40) if tokens[i] not in tokens[:i] and tokens[i] != 257)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[length])
    tokenizer.save_pretrained(folder)
    oracle: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    assert oracle.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"] == prompt
    key = tiny_stack.create_tenant("speakers")
    upload(tiny_stack, key, "speaker", folder)
    with tiny_stack.client(key) as client:
        answer, longer = (
            client.chat.completions.create(
                model="speaker",
                messages=CHAT,
                max_tokens=40,
                temperature=0,
                extra_body={"ignore_eos": ignore_eos},
            )
            for ignore_eos in (False, True)
        )
    for each in (answer, longer):
        assert each.usage is not None and each.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == oracle.decode(tokens[:length], skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "stop"
    assert longer.choices[0].message.content == oracle.decode(tokens, skip_special_tokens=True)
    assert longer.choices[0].finish_reason == "length"


def test_tokens_beyond_the_vocabulary_are_the_adapter_s_that_adds_them(
    zoo: TinyZoo, tiny_stack: Stack, tmp_path: Path
) -> None:
    added = 5
    folder = save_kind(
        zoo.model, tmp_path / "wide", Kind(8, ("q_proj", "v_proj"), added_tokens=added), seed=81
    )
    tokenizer = tokenizer_of(zoo)
    count = VOCAB_SIZE + added - len(tokenizer)
    tokenizer.add_tokens([f"<x{i}>" for i in range(count)])
    tokenizer.save_pretrained(folder)
    key = tiny_stack.create_tenant("wide")
    upload(tiny_stack, key, "wide", folder)
    prompt = [5, VOCAB_SIZE + added - 1, VOCAB_SIZE, 7]
    model = endless(zoo.model)
    model.resize_token_embeddings(VOCAB_SIZE + added)
    tokens, logprobs = generate(PeftModel.from_pretrained(model, str(folder)).eval(), prompt, 16)
    answer = ask(tiny_stack, key, "wide", prompt)
    assert answer.text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.logprobs == pytest.approx(logprobs, abs=2e-3)
    with tiny_stack.client(key) as client:
        text = f"<x{count - 1}>"
        spelt = client.completions.create(model="wide", prompt=text, max_tokens=1)
        assert spelt.usage is not None and spelt.usage.prompt_tokens == 1
        of_base = client.completions.create(model=TINY, prompt=text, max_tokens=1)
        assert of_base.usage is not None and of_base.usage.prompt_tokens > 1
        for name, beyond in ((TINY, VOCAB_SIZE), ("wide", VOCAB_SIZE + added)):
            with pytest.raises(BadRequestError, match=f"token id {beyond} in 'prompt'"):
                client.completions.create(model=name, prompt=[beyond], max_tokens=1)
    upload(tiny_stack, key, "narrow", zoo.add("narrow", seed=82))
    refusal = try_upload(tiny_stack, key, "mixed", mixed(zoo.adapters["narrow"], folder, tmp_path / "mixed"))
    assert refusal.status_code == 400
    assert f"as number {VOCAB_SIZE}" in refusal.json()["error"]["message"]


def mixed(weights: Path, tokenizer: Path, folder: Path) -> Path:
    """One adapter's weights with another's tokenizer."""
    folder.mkdir()
    for source, pattern in ((weights, "adapter_*"), (tokenizer, "tokenizer*")):
        for path in source.glob(pattern):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_files_that_change_nothing_make_no_other_adapter(zoo: TinyZoo, tiny_stack: Stack) -> None:
    key = tiny_stack.create_tenant("unchanged")
    folder = zoo.add("unchanged", seed=83)
    plain = upload(tiny_stack, key, "plain", folder)
    tokenizer_of(zoo).save_pretrained(folder)
    again = upload(tiny_stack, key, "again", folder)
    assert again["digest"] == plain["digest"]
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    other = upload(tiny_stack, key, "other", folder)
    assert other["digest"] != plain["digest"]


def test_hostile_files_are_refused_and_a_template_that_hangs_holds_up_nobody(
    zoo: TinyZoo, tiny_stack: Stack
) -> None:
    key = tiny_stack.create_tenant("hostile")
    folder = zoo.add("hostile", seed=84)
    document = json.loads((zoo.folder / "model" / "tokenizer.json").read_text())
    document["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    refusal = try_upload(tiny_stack, key, "hostile", folder)
    assert refusal.status_code == 400
    error = refusal.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_adapter", "tokenizer.json")
    assert "another pre_tokenizer" in error["message"]
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text(HANGING)
    upload(tiny_stack, key, "hostile", folder)
    with tiny_stack.client(key) as client:
        with pytest.raises(BadRequestError, match="chat template takes too long"):
            client.chat.completions.create(model="hostile", messages=CHAT, max_tokens=1)
        assert client.chat.completions.create(model=TINY, messages=CHAT, max_tokens=1).choices
        assert client.completions.create(model="hostile", prompt="w1", max_tokens=1).choices
