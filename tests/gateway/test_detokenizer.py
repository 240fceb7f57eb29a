"""The pieces of a text, joined, are the text; whatever the tokens, the stop strings and the cuts."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import ByteDecoder, StopMatcher, TextStream, TokenDecoder, WindowDecoder
from gateway.tokenizer import ModelTokenizer
from tests.gateway.fake_engine import TOKENIZER_FILES, VOCAB_SIZE, make_tokenizer

BYTE_LEVEL = ModelTokenizer.from_files(TOKENIZER_FILES)
BYTE_LEVEL_ORACLE = make_tokenizer()


def sentencepiece_like() -> Tokenizer:
    """Words with leading ▁ and single bytes, decoded as Llama 2's and Gemma's tokenizers do."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁a",
        "cat",
        "日",
        "é",
        "▁▁",
        "s",
    ]
    tokenizer = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def joined(decoder: TokenDecoder, tokens: list[int]) -> str:
    pieces = [decoder.step(token) for token in tokens]
    return "".join(pieces) + decoder.finish()


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_byte_level_pieces_join_to_what_the_tokenizer_decodes_at_once(tokens: list[int]) -> None:
    assert isinstance(BYTE_LEVEL.decoder(), ByteDecoder)
    assert joined(BYTE_LEVEL.decoder(), tokens) == BYTE_LEVEL_ORACLE.decode(tokens, skip_special_tokens=True)


def test_special_tokens_are_text_when_they_are_to_be_shown() -> None:
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<s>", "[CALL]"])
    sentencepiece = ModelTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})
    for model, special in ((BYTE_LEVEL, ("<|im_start|>", "<|im_end|>")), (sentencepiece, ("<s>", "[CALL]"))):
        hidden, shown = (model.added_token(text) for text in special)
        assert hidden is not None and shown is not None
        word = model.encode("s", add_special_tokens=False)[-1]
        tokens = [word, hidden, shown, word]
        assert joined(model.decoder(frozenset({shown})), tokens) == f"s{special[1]}s"
        assert joined(model.decoder(), tokens) == "ss"


@given(st.text(max_size=30))
def test_no_piece_of_a_valid_text_holds_a_broken_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False)
    decoder = BYTE_LEVEL.decoder()
    pieces = [decoder.step(token) for token in tokens]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@st.composite
def sentencepiece_tokens(draw: st.DrawFn) -> list[int]:
    """Words, and characters spelled in bytes; runs of bytes are whole characters, as a model's mostly are."""
    word = st.integers(257, SENTENCEPIECE.get_vocab_size() - 1).map(lambda token: [token])
    spelled = st.characters(codec="utf-8", exclude_characters="\ufffd").map(
        lambda char: [1 + byte for byte in char.encode()]
    )
    return [token for part in draw(st.lists(word | spelled, max_size=30)) for token in part]


@given(sentencepiece_tokens())
def test_window_pieces_join_to_what_the_tokenizer_decodes_at_once(tokens: list[int]) -> None:
    decoder = WindowDecoder(SENTENCEPIECE, frozenset({0}))
    assert joined(decoder, tokens) == SENTENCEPIECE.decode(tokens, skip_special_tokens=False)


@given(st.lists(st.integers(0, 264), max_size=200))
def test_the_window_stays_small_whatever_comes(tokens: list[int]) -> None:
    decoder = WindowDecoder(SENTENCEPIECE, frozenset({0}))
    for token in tokens:
        decoder.step(token)
        assert len(decoder._window) <= 40


def test_a_split_emoji_is_held_back_until_it_is_whole() -> None:
    tokens = BYTE_LEVEL.encode("a🙃b", add_special_tokens=False)
    decoder = BYTE_LEVEL.decoder()
    assert [decoder.step(token) for token in tokens] == ["a", "", "", "", "🙃", "b"]


def test_an_incomplete_character_at_the_end_becomes_the_replacement() -> None:
    decoder = BYTE_LEVEL.decoder()
    tokens = BYTE_LEVEL.encode("é🙃", add_special_tokens=False)
    assert "".join(decoder.step(token) for token in tokens[:-1]) == "é"
    assert decoder.finish() == "\ufffd"


def test_tokens_beyond_the_vocabulary_are_no_text() -> None:
    assert joined(BYTE_LEVEL.decoder(), [VOCAB_SIZE + 1000]) == ""


# ---- stop strings ---------------------------------------------------------------------------------------


def cut_by_brute_force(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string whose last character comes first; of several, the longest."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


few_letters = st.text("abc", max_size=4)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(few_letters, max_size=12), stop_lists)
@settings(max_examples=500)
def test_stop_strings_are_found_wherever_the_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.matched is not None:
            break
    else:
        text += matcher.finish()
    expected, stop = cut_by_brute_force("".join(pieces), stops)
    assert (text, matcher.matched) == (expected, stop)


@given(st.lists(few_letters, max_size=12), stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = emitted = ""
    for piece in pieces:
        seen += piece
        emitted += matcher.feed(piece)
        if matcher.matched is not None:
            return
        held = seen[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_no_stop_string_makes_a_character_costly() -> None:
    """The text goes on being the beginning of one, and nearly of all others, which are as long as allowed."""
    matcher = StopMatcher(["a" * 1023 + "z"] + ["b" + "a" * 1022 + str(index) for index in range(15)])
    matcher.feed("a" * 1022)
    began = time.process_time()
    for _ in range(1000):
        matcher.feed("a")
    assert time.process_time() - began < 0.3, "20 ms are normal; looking for each beginning took 1.5 s"


def test_text_before_a_stop_over_three_tokens_is_exact() -> None:
    stream = TextStream(BYTE_LEVEL.decoder(), ["END!"])
    pieces = [stream.feed(token) for token in BYTE_LEVEL.encode("sayEN END!x", add_special_tokens=False)[:-1]]
    assert "".join(pieces) == "sayEN "
    assert stream.stopped


@given(
    st.lists(st.integers(0, 461), max_size=40),
    st.lists(st.sampled_from(["w1", "→", "🙂", "\ufffd", "w2w"]), max_size=3),
)
def test_streams_stop_where_the_whole_text_does(tokens: list[int], stops: list[str]) -> None:
    stream = TextStream(BYTE_LEVEL.decoder(), stops)
    text = ""
    for token in tokens:
        text += stream.feed(token)
        if stream.stopped:
            break
    else:
        text += stream.finish()
    whole = BYTE_LEVEL_ORACLE.decode(tokens, skip_special_tokens=True)
    assert text == cut_by_brute_force(whole, stops)[0]
    assert stream.emitted_len == len(text)


def test_ids_may_have_gaps() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "Ġb": 5, "c": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    gappy = ModelTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})
    assert joined(gappy.decoder(), [0, 5, 1, 2, 9]) == "a bc"
