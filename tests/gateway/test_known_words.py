"""Tokens that are put together from known words are those that the tokenizer itself makes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from gateway.known_words import KnownWords
from gateway.tokenizer import ModelTokenizer
from gateway.tokenizer_effect import TokenizerEffect

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
CASED = r"[\p{Lu}\p{Lt}]*\p{Ll}+|\s+"
SAMPLE = (
    "It's 1984, isn't it?  We'll see!\n\n\tdef f(x): return x ** 2 + 10_000\r\n I'VE got it. <|im_end|>\n  "
)
PLAIN = ByteLevel(add_prefix_space=False)
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


def tokenizer_of(cut: PreTokenizer, *added: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([SAMPLE * 3, "the cat and the hat, " * 5], trainer)
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=False, special=True), *added])
    return tokenizer


def known_of(tokenizer: Tokenizer) -> KnownWords | None:
    return ModelTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})._words


WAYS = {
    "GPT-2": tokenizer_of(PLAIN),
    "SmolLM2": tokenizer_of(
        Sequence([Digits(individual_digits=True), PLAIN]), AddedToken("<|im_end", normalized=False)
    ),
    "Llama 3": tokenizer_of(Sequence([Split(Regex(LLAMA_3), "isolated"), BYTES])),
    "Qwen 2": tokenizer_of(
        Sequence([Split(Regex(QWEN_2), "isolated"), BYTES]), AddedToken("2+", normalized=False)
    ),
}
WAYS["Qwen 2"].normalizer = normalizers.NFC()
KNOWN = {name: known_of(tokenizer) for name, tokenizer in WAYS.items()}

texts = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=6),
        st.sampled_from(
            ["<|im_end|>", "<|im_end", "2+", "'S", "'ll", "  ", "\n\n", " the", "\x1c", "\x0b", "123"]
        ),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", WAYS)
@given(text=texts)
def test_tokens_are_the_tokenizers(name: str, text: str) -> None:
    known = KNOWN[name]
    assert known is not None
    for given_text in (text, SAMPLE + text):
        assert known.encode(given_text) == WAYS[name].encode(given_text, add_special_tokens=False).ids


def test_what_is_not_plainly_the_same_is_left_to_the_tokenizer() -> None:
    known = KNOWN["GPT-2"]
    assert known is not None
    assert known.encode("naïve") is None
    assert known.encode("a " * 5000) is None
    for tokenizer in (
        tokenizer_of(PLAIN, AddedToken("eh", normalized=False, single_word=True)),
        tokenizer_of(PLAIN, AddedToken("eh", normalized=True)),
        tokenizer_of(ByteLevel(add_prefix_space=True)),
        tokenizer_of(Sequence([PLAIN, Digits(individual_digits=True)])),
        tokenizer_of(Sequence([Split(Regex(CASED), "isolated"), BYTES])),
        tokenizer_of(Sequence([Split(Regex(QWEN_2), "removed"), BYTES])),
        tokenizer_of(BYTES),
    ):
        assert known_of(tokenizer) is None
    lowered = tokenizer_of(PLAIN)
    lowered.normalizer = normalizers.Lowercase()
    assert known_of(lowered) is None


def test_nothing_is_learnt_from_texts() -> None:
    known = known_of(WAYS["Llama 3"])
    assert known is not None
    before, kept = dict(known.known), dict(known.kept)
    for text in (SAMPLE, "these words were not known", "xqzv " * 50):
        assert known.encode(text) == WAYS["Llama 3"].encode(text).ids
    assert known.known == before and len(before) > 100 and known.kept == kept


def test_what_a_template_puts_around_messages_is_kept() -> None:
    tokenizer = tokenizer_of(PLAIN)
    template = "{% for each in messages %}the cat's {{ each.content }}<|im_end|>{% endfor %}the hat, xqzv"
    files = {"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": template.encode()}
    made = ModelTokenizer.from_files(files)
    made.warm_up()
    assert made._words is not None and list(made._words.kept) == ["<|im_end|>", "the hat, xqzv"]
    for text in ("the hat, xqzv", "of the hat, xqzv", "1<|im_end|>the hat, xqzv<|im_end|>", SAMPLE):
        assert made._words.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert list(made._words.kept) == ["<|im_end|>", "the hat, xqzv"]


def test_a_word_to_which_no_merges_lead_is_not_known_as_its_token() -> None:
    tokenizer = tokenizer_of(PLAIN)
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"]["quux"] = 1000
    tokenizer = Tokenizer.from_str(json.dumps(state))
    known = known_of(tokenizer)
    assert known is not None
    assert known.encode("quux") == tokenizer.encode("quux").ids != [1000]


def test_what_an_adapters_tokenizer_leaves_out_is_not_known_there() -> None:
    tokenizer = tokenizer_of(PLAIN, AddedToken("zebra", normalized=False))
    base = ModelTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})
    added = json.loads(tokenizer.to_str())["added_tokens"]
    effect = TokenizerEffect(tuple(token for token in added if token["content"] != "zebra"), None, {}, None)
    own = base.extended(effect)
    assert own._words is not None
    (zebra,) = base.encode("zebra", add_special_tokens=False)
    tokens = own.encode("zebra", add_special_tokens=False)
    assert zebra not in tokens and own.text_of(tokens) == "zebra"
