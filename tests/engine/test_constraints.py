"""Grammars against a brute-force model, and answers that must fit them in the loop over a real runner."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.constraints import Grammar, Grammars, InvalidGrammar
from engine.model.loading import LoadedModel, load_model
from engine.runner import Runner
from engine.sequence import FinishReason, Request
from engine.step import SamplingParams
from tests.engine.sampled_serving import Served, grammar_of, serve, serve_requests
from tests.gateway.fake_engine import EOS, TOKENIZER_FILES, VOCAB_SIZE, make_tokenizer
from tests.model_zoo import save_tiny_model

WORDS = ["a", "ab", "abc", "b", "w1", "w12", "w123x", "日本", "日", "END!"]
PATTERNS = [r"(w1|w22|ab)+c", r"[0-9]{1,3}", r"(日本|→){2,4}!"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER_FILES["tokenizer.json"].decode(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    return load_model(str(folder), dtype="float32", device="cpu", max_model_len=None)


def regex(grammars: Grammars, pattern: str) -> Grammar:
    return grammars.understand(LLMatcher.grammar_from_regex(pattern))


def allowed_by(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def bytes_of(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The text of each token that has one; the specials have none that a grammar can mean."""
    byte_of = {char: byte for byte, char in enumerate(_byte_level_alphabet())}
    added = {token: added.content.encode() for token, added in tokenizer.get_added_tokens_decoder().items()}
    found = {
        token: added.get(token) or bytes(byte_of[char] for char in text)
        for text, token in tokenizer.get_vocab().items()
    }
    return {token: text for token, text in found.items() if not text.startswith(b"<|im_")}


def _byte_level_alphabet() -> list[str]:
    """GPT-2's characters for the bytes 0 to 255: printable ones stand for themselves."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def may_follow(prefix: bytes, tokens: dict[int, bytes], words: Iterable[str]) -> set[int]:
    """By trying each token: the text can still become one of the words, or is one and may end."""
    whole = [word.encode() for word in words]
    found = {token for token, text in tokens.items() if any(w.startswith(prefix + text) for w in whole)}
    return found | ({EOS} if prefix in whole else set())


def test_what_is_allowed_is_what_can_still_become_a_word(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar, tokens = regex(grammars, "|".join(map(re.escape, WORDS))), bytes_of(tokenizer)
    rng = random.Random(1)
    reached = set()
    for _ in range(200):
        constraint, prefix = grammar.start(), b""
        while not constraint.is_complete:
            words = np.full(constraint.num_words, -1, np.int32)
            constraint.write_allowed(words)
            assert allowed_by(words) == may_follow(prefix, tokens, WORDS)
            token = rng.choice(sorted(allowed_by(words)))
            constraint.take(token)
            prefix += tokens.get(token, b"")
        assert not constraint.fault
        reached.add(prefix.decode())
    assert reached == set(WORDS)


def test_sequences_of_one_grammar_do_not_share_their_state(grammars: Grammars) -> None:
    grammar = regex(grammars, "ab|cd")
    first, second = grammar.start(), grammar.start()
    words = np.zeros(first.num_words, np.int32)
    second.write_allowed(words)
    before = allowed_by(words)
    first.take(next(iter(before)))
    second.write_allowed(words)
    assert allowed_by(words) == before


def test_an_answer_that_was_begun_elsewhere_goes_on(grammars: Grammars, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("w12").ids
    constraint = regex(grammars, "|".join(WORDS)).start(output)
    words = np.zeros(constraint.num_words, np.int32)
    constraint.write_allowed(words)
    assert allowed_by(words) == may_follow(b"w12", bytes_of(tokenizer), WORDS)


def test_a_token_that_does_not_fit_leaves_nothing_to_draw(grammars: Grammars) -> None:
    constraint = regex(grammars, "ab").start([EOS])
    words = np.full(constraint.num_words, -1, np.int32)
    constraint.write_allowed(words)
    assert allowed_by(words) == set()
    assert "satisf" in constraint.fault and "\n" not in constraint.fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (LLMatcher.grammar_from_regex("(a"), "unclosed group"),
        (LLMatcher.grammar_from_json_schema('{"type": "strin"}'), "Invalid type: strin"),
        ("start: nothing", "unknown name"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(grammars: Grammars, text: str, fault: str) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(fault)):
        grammars.understand(text)


def test_a_grammar_that_would_hold_up_every_step_fails(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.understand('start: e\ne: e e | "a" | e "b" e | ""').start()
    words = np.zeros(constraint.num_words, np.int32)
    for _ in range(300):
        constraint.write_allowed(words)
        if constraint.fault:
            break
        constraint.take(tokenizer.encode("a").ids[0])
    assert "items" in constraint.fault


@pytest.mark.parametrize("pattern", ["a{100000}", "x(ab){20000}", "(a{300}){300}"])
def test_a_text_that_is_copied_for_every_byte_of_it_fails(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str
) -> None:
    constraint = regex(grammars, pattern).start()
    words = np.full(constraint.num_words, -1, np.int32)
    constraint.write_allowed(words)
    constraint.take(tokenizer.encode(pattern.lstrip("(")[0]).ids[0])
    constraint.write_allowed(words)
    assert allowed_by(words) == set() and "too many expressions" in constraint.fault


def test_few_grammars_are_kept_since_they_grow(grammars: Grammars) -> None:
    kept = [regex(grammars, f"kept{index}") for index in range(65)]
    assert regex(grammars, "kept64") is kept[64]
    assert regex(grammars, "kept0") is not kept[0]


def test_a_grammar_of_many_values_is_understood(grammars: Grammars) -> None:
    values = [f"value-{index}-with-some-text" for index in range(4000)]
    grammar = LLMatcher.grammar_from_json_schema({"enum": values})
    constraint = grammars.understand(grammar).start()
    constraint.write_allowed(np.zeros(constraint.num_words, np.int32))
    assert not constraint.fault


def test_an_answer_with_a_grammar_draws_a_token_every_step(model: LoadedModel, grammars: Grammars) -> None:
    """Though with a step under way its last token has not been read when the next is planned."""
    requests = [
        Request(
            link="link",
            request_id=number,
            prompt=[7, 8, 9],
            sampling=(SamplingParams(temperature=1.0, seed=number, frequency_penalty=0.3),),
            max_len=3 + 24,
            block_root=b"root",
            grammar=regex(grammars, "[0-9w]{200}") if number else None,
        )
        for number in range(2)
    ]
    runner = Runner(model, num_blocks=20, num_rank_pages=0)
    served = serve_requests(model, runner, requests, num_blocks=20, overlap=True, folders={}, num_pages=0)
    assert [len(served.tokens[number, 0]) for number in range(2)] == [24, 24]
    assert served.num_steps < 24 + 4


def test_an_answer_ends_with_its_text_where_the_models_end_tokens_do_not_count(
    model: LoadedModel, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    request = Request(
        link="link",
        request_id=1,
        prompt=[7, 8, 9],
        sampling=(SamplingParams(temperature=1.0, seed=1),),
        max_len=3 + 24,
        block_root=b"root",
        grammar=regex(grammars, "[0-9]{3}"),
    )
    runner = Runner(model, num_blocks=20, num_rank_pages=0)
    served = serve_requests(model, runner, [request], num_blocks=20, overlap=False, folders={}, num_pages=0)
    assert served.ends[1, 0] is FinishReason.STOP
    assert EOS not in served.tokens[1, 0]
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(served.tokens[1, 0]))


def run(
    model: LoadedModel, grammars: Grammars, seed: int, *, num_blocks: int = 120, overlap: bool = False
) -> Served:
    own = [regex(grammars, pattern) for pattern in PATTERNS]
    runner = Runner(model, num_blocks=num_blocks, num_rank_pages=0)
    return serve(
        model,
        runner,
        seed,
        num_blocks=num_blocks,
        overlap=overlap,
        folders={},
        num_pages=0,
        grammars=own,
    )


@pytest.mark.parametrize("seed", range(2))
def test_answers_fit_their_grammars_beside_free_ones(
    model: LoadedModel, grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    """With several choices, penalties and biases, with a step under way, and after preemptions."""
    want = run(model, grammars, seed)
    num_whole = 0
    for (number, choice), tokens in want.tokens.items():
        which = grammar_of(number, len(PATTERNS))
        if which is not None:
            assert not regex(grammars, PATTERNS[which]).start(tokens).fault
            text = tokenizer.decode([token for token in tokens if token != EOS])
            num_whole += bool(re.fullmatch(PATTERNS[which], text))
            assert want.ends[number, choice] in (FinishReason.STOP, FinishReason.LENGTH)
    assert num_whole > 3
    for num_blocks in (120, 12):
        got = run(model, grammars, seed, num_blocks=num_blocks, overlap=True)
        assert (got.num_preemptions > 0) == (num_blocks == 12)
        assert (got.tokens, got.ends) == (want.tokens, want.ends)


@pytest.mark.parametrize("pattern", ["a{26000}", "x(ab){20000}"])
def test_what_fails_is_not_complete(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    constraint = regex(grammars, pattern).start()
    constraint.write_allowed(np.zeros(constraint.num_words, np.int32))
    constraint.take(tokenizer.encode(pattern[0]).ids[0])
    constraint.write_allowed(np.zeros(constraint.num_words, np.int32))
    assert constraint.fault and not constraint.is_complete
