"""Adapters' own tokenizers against transformers' AutoTokenizer for the adapter's folder, taken and loaded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from adapters.registry import AdapterVersion
from engine.model.gguf import GgufFile
from engine.model.gguf_tokenizer import tokenizer_files
from gateway.errors import ApiError
from gateway.own_tokenizers import OwnTokenizers, check_own_tokenizer
from gateway.resolve import ResolvedModel
from gateway.tokenizer import ModelTokenizer, Tokenizers
from gateway.tokenizer_check import judge
from gateway.tokenizer_effect import EFFECT_FILE, TokenizerEffect, identity_of
from protos.engine_pb2 import ModelInfo
from tests.gateway.fake_engine import TOKENIZER_FILES
from tests.gateway.own_tokenizer_files import Files, changed, extra_token, token, write
from tests.model_zoo import smollm2_path

TEXTS = (
    "Hello, world! It's 2026.",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<tool> call </tool><tool>  twice\t</tool>",
    "new_word and new_wordy, NEW_WORD; new_word",
    "日本語 🙂 <think>é</think>\n\n",
    "",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <tool>?"},
    {"role": "assistant", "content": "new_word"},
    {"role": "user", "content": "🙂"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


@pytest.fixture(scope="module")
def base() -> Files:
    """The files of a real model's tokenizer."""
    return tokenizer_files(GgufFile(smollm2_path()).metadata)


@pytest.fixture
def small() -> Files:
    """The files of a tokenizer of 462 tokens, for what needs no real one."""
    return TOKENIZER_FILES


@pytest.fixture(scope="module")
def base_folder(base: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(base, tmp_path_factory.mktemp("base"))


MODEL, ADAPTER = b"m" * 32, b"a" * 32


@pytest.fixture
async def tokenizers(small: Files, tmp_path: Path) -> OwnTokenizers:
    """Reads every blob's files from one folder, `own`."""
    of_models = Tokenizers()

    async def fetch() -> Files:
        return small

    await of_models.load(MODEL, fetch)
    return OwnTokenizers(of_models, lambda digest, name: (tmp_path / "own" / name).read_bytes())


def read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def add_plain_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["<tool>", "</tool>", "new_word"])


def add_special_tokens(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"], "pad_token": "<pad>"})
    tokenizer.add_tokens([AddedToken("new_word", rstrip=True)])


def end_otherwise(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"eos_token": "<|done|>"})
    tokenizer.chat_template = TEMPLATE


def keep_nothing_special(tokenizer: Any) -> None:
    """But for what the config names: the base model's other special tokens are text."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    for added in document["added_tokens"]:
        added["special"] = False
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(document))


def write_another_template(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE


CHANGES = (add_plain_tokens, add_special_tokens, end_otherwise, keep_nothing_special, write_another_template)


@pytest.mark.parametrize("change", CHANGES)
def test_it_tokenises_detokenises_and_renders_as_transformers_does(
    base: Files, base_folder: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    change(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    effect = judge(read(tmp_path), base)
    assert effect is not None
    own = ModelTokenizer.from_files(base).extended(TokenizerEffect.from_bytes(effect.to_bytes()))
    for text in TEXTS:
        for special in (False, True):
            assert own.encode(text, add_special_tokens=special) == oracle.encode(
                text, add_special_tokens=special
            )
        decoder = own.decoder()
        tokens = oracle.encode(text) + list(range(20)) + list(range(len(oracle) - 5, len(oracle)))
        decoded = "".join([decoder.step(token) for token in tokens]) + decoder.finish()
        assert decoded == oracle.decode(tokens, skip_special_tokens=True)
    rendered = own.chat_template.render(CHAT)
    assert rendered == oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    expected = oracle.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert own.encode(rendered, add_special_tokens=False) == expected
    assert own.end_tokens == (oracle.eos_token_id,)
    assert own.trusted == (oracle.chat_template == AutoTokenizer.from_pretrained(base_folder).chat_template)


def test_an_extension_leaves_the_base_model_s_tokenizer_as_it_was(base: Files, base_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    model = ModelTokenizer.from_files(base)
    before = [model.encode(text, add_special_tokens=True) for text in TEXTS]
    added = AutoTokenizer.from_pretrained(base_folder)
    add_plain_tokens(added)
    files = {"tokenizer.json": added.backend_tokenizer.to_str().encode()}
    effect = judge(files, base)
    assert effect is not None
    own = model.extended(effect)
    assert own.encode("<tool>", add_special_tokens=False) == [len(tokenizer)]
    assert [model.encode(text, add_special_tokens=True) for text in TEXTS] == before
    assert len(model.encode("<tool>", add_special_tokens=False)) > 1


def test_files_that_equal_the_base_model_s_in_effect_do_not_count(
    base: Files, base_folder: Path, tmp_path: Path
) -> None:
    """Saved anew by transformers: other bytes, padding and truncation set, the template in a file."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer("some text", truncation=True, max_length=5, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    assert read(tmp_path)["tokenizer.json"] != base["tokenizer.json"]
    assert judge(read(tmp_path), base) is None
    assert judge({}, base) is None
    assert judge({"chat_template.jinja": base["chat_template.jinja"]}, base) is None


def test_what_an_adapter_lacks_is_the_base_model_s(base: Files) -> None:
    effect = judge({"chat_template.jinja": TEMPLATE.encode()}, base)
    assert effect is not None and effect.chat_template == TEMPLATE
    assert effect.named_tokens["eos_token"] == "<|im_end|>"
    in_config = judge(
        {
            "tokenizer_config.json": json.dumps(
                {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
            ).encode()
        },
        base,
    )
    assert in_config is not None and in_config.chat_template == TEMPLATE
    both = judge(
        {"chat_template.jinja": b"{{ 1 }}", "tokenizer_config.json": b'{"chat_template": "{{ 2 }}"}'}, base
    )
    assert both is not None and both.chat_template == "{{ 1 }}"


async def test_one_that_was_stored_and_is_no_longer_taken_is_refused(
    small: Files, tokenizers: OwnTokenizers, tmp_path: Path
) -> None:
    effect = judge({"chat_template.jinja": TEMPLATE.encode()}, small)
    assert effect is not None
    slow = token(462, "\t", rstrip=True)
    stored = replace(effect, added_tokens=(*effect.added_tokens, slow)).to_bytes()
    folder = write({EFFECT_FILE: stored}, tmp_path / "own")
    for _ in range(2):
        with pytest.raises(
            ApiError, match=r"The adapter's tokenizer sets rstrip .*upload the adapter"
        ) as caught:
            await tokenizers.of(resolved(identity_of(stored)))
        assert (caught.value.status, caught.value.code) == (400, "invalid_adapter")
        (folder / EFFECT_FILE).unlink(missing_ok=True)  # it is read once


async def test_what_counts_lies_beside_the_files_and_what_does_not_is_removed(
    small: Files, tokenizers: OwnTokenizers, tmp_path: Path
) -> None:
    folder = write({"chat_template.jinja": TEMPLATE.encode(), "adapter_config.json": b"{}"}, tmp_path / "own")
    identity = await tokenizers.take(folder, MODEL)
    data = (folder / EFFECT_FILE).read_bytes()
    assert identity == identity_of(data)
    assert TokenizerEffect.from_bytes(data).chat_template == TEMPLATE
    same = write({**small, "adapter_config.json": b"{}"}, tmp_path / "same")
    assert await tokenizers.take(same, MODEL) == ""
    assert [path.name for path in same.iterdir()] == ["adapter_config.json"]
    await check_own_tokenizer(same, 10)


async def test_a_token_without_weights_is_refused(
    small: Files, tokenizers: OwnTokenizers, tmp_path: Path
) -> None:
    folder = write(changed(small, extra_token()), tmp_path / "own")
    await tokenizers.take(folder, MODEL)
    await check_own_tokenizer(folder, 463)
    with pytest.raises(ApiError, match="'<x>' as number 462, but the adapter and its base model have 462"):
        await check_own_tokenizer(folder, 462)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": b'{"added_tokens": [' + b"[" * 10_000_000},
        {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {' + b'"a": 1,' * 3_000_000},
    ],
    ids=["nested", "cut off"],
)
async def test_files_that_would_exhaust_the_gateway_exhaust_a_process_of_their_own(
    tokenizers: OwnTokenizers, tmp_path: Path, files: Files
) -> None:
    folder = write(files, tmp_path / "own")
    ticks, longest_s = 0, 0.0  # of this process' own time, which a busy machine does not stretch

    async def tick() -> None:
        nonlocal ticks, longest_s
        while True:
            before = time.process_time()
            await asyncio.sleep(0.01)
            longest_s = max(longest_s, time.process_time() - before)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(ApiError) as caught:
        await tokenizers.take(folder, MODEL)
    ticking.cancel()
    assert caught.value.status == 400 and caught.value.code == "invalid_adapter"
    assert longest_s < 0.1 and ticks > 3, "the event loop stood still meanwhile"


async def test_a_tokenizer_is_loaded_once_for_all_that_have_it(
    small: Files, tokenizers: OwnTokenizers, tmp_path: Path
) -> None:
    folder = write({"chat_template.jinja": TEMPLATE.encode()}, tmp_path / "own")
    model = resolved(await tokenizers.take(folder, MODEL))
    first, second = await asyncio.gather(tokenizers.of(model), tokenizers.of(model))
    assert first is second and first.template_source == TEMPLATE
    plain = await tokenizers.of(resolved(""))
    assert plain.template_source != TEMPLATE and plain is await tokenizers.of(ResolvedModel("m", model.info))


async def test_one_that_cannot_be_read_is_tried_again(tokenizers: OwnTokenizers, tmp_path: Path) -> None:
    folder = write({"chat_template.jinja": TEMPLATE.encode()}, tmp_path / "own")
    model = resolved(await tokenizers.take(folder, MODEL))
    published = (folder / EFFECT_FILE).read_bytes()
    for damage in (None, published[:-1], published.replace(b"ASSISTANT", b"assistant")):
        if damage is None:
            (folder / EFFECT_FILE).unlink()
        else:
            (folder / EFFECT_FILE).write_bytes(damage)
        with pytest.raises(ApiError) as caught:
            await tokenizers.of(model)
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
    (folder / EFFECT_FILE).write_bytes(published)
    assert (await tokenizers.of(model)).template_source == TEMPLATE


def resolved(tokenizer: str) -> ResolvedModel:
    version = AdapterVersion("acme", "it", 1, ADAPTER, 8, 1, (), None, 0, tokenizer=tokenizer)
    return ResolvedModel("it@1", ModelInfo(digest=MODEL), version)
