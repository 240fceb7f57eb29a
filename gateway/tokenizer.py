"""Tokenizers, built from the files that an engine serves:
one per model digest, for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

from adapters.chat_templates import stated_template
from gateway import memory
from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.detokenizer import ByteDecoder, TokenDecoder, WindowDecoder
from gateway.known_words import KnownWords, common_words
from gateway.tokenizer_bounds import check_bounds
from gateway.tokenizer_effect import TokenizerEffect, extend

logger = logging.getLogger(__name__)

TokenizerFiles = Mapping[str, bytes]
_FAST = 1
"""zlib's level, which packs a tokenizer to some 40 %."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that transformers hands to a chat template."""

_PROBE = "whatever is said"


class ModelTokenizer:
    """One model's tokenizer and chat template. Its methods may be called from several threads at once."""

    end_tokens: Sequence[int] = ()
    """Tokens that end an answer besides those that the model's own settings name."""
    trusted = True
    """Whether the chat template is the operator's, and may be rendered in this process."""

    def __init__(
        self, tokenizer: Tokenizer, *, named_tokens: Mapping[str, str], template: str | None, byte_level: bool
    ) -> None:
        """See `from_files`. `byte_level`: tokens are strings of bytes."""
        self.named_tokens = named_tokens
        self.template_source = template
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, each in added.items() if each.special)
        self._added = {each.content: token for token, each in added.items()}
        self._tables: dict[frozenset[int], Sequence[bytes]] = {}  # by the special tokens that they show
        self._byte_level = byte_level
        self._adds_special = tokenizer.num_special_tokens_to_add(False) > 0
        self._lock = threading.Lock()

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> ModelTokenizer:
        """Makes the tokenizer of `files`: `tokenizer.json`, and optionally `tokenizer_config.json` and
        `chat_template.jinja`.

        Raises ValueError when there is no usable `tokenizer.json`.
        """
        raw = files.get("tokenizer.json")
        if raw is None:
            raise ValueError("the engine serves no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        return cls(
            tokenizer,
            named_tokens=_named_tokens(config),
            template=_template_source(files, config),
            byte_level=_is_byte_level(tokenizer.decoder),
        )

    def extended(self, effect: TokenizerEffect) -> ModelTokenizer:
        """Returns an adapter's own tokenizer, which shares this one's vocabulary. Takes some milliseconds.

        Raises Unbounded for one with which texts would take more than their share of time and memory.
        """
        check_bounds(effect, self._tokenizer)
        own = ModelTokenizer(
            extend(self._tokenizer, effect),
            named_tokens=effect.named_tokens,
            template=effect.chat_template,
            byte_level=self._byte_level,
        )
        own.trusted = effect.chat_template == self.template_source
        end = own._tokenizer.token_to_id(effect.named_tokens.get("eos_token", ""))
        own.end_tokens = () if end is None else (end,)
        own.longest_token = max([self.longest_token, *(_size(token) for token in effect.added_tokens)])
        if self._byte_level:
            own._text_bytes = self._extended_bytes(own, effect)
            own._words = self._words and self._extended_words(self._words, own)
        return own

    def _extended_words(self, words: KnownWords, own: ModelTokenizer) -> KnownWords | None:
        # What was added here need not be added there.
        common = {word: token for word, token in words.known.items() if word not in self._added}
        return KnownWords.of(own._tokenizer, common, _CHAR_OF_BYTE)

    def _extended_bytes(self, own: ModelTokenizer, effect: TokenizerEffect) -> list[bytes]:
        table = list(self._text_bytes)
        for number in {*self._special, *(token["id"] for token in effect.added_tokens)}:
            table += [b""] * (number + 1 - len(table))
            table[number] = b"" if number in own._special else own.token_bytes(number)
        return table

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises ChatTemplateError when it has none, or none that compiles."""
        if self.template_source is None:
            raise ChatTemplateError("This model has no chat template. Use /v1/completions.")
        return ChatTemplate(self.template_source, self.named_tokens)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text of n bytes has fewer than n / longest_token tokens."""
        if self._byte_level:  # they are there, and to list a vocabulary takes some 20 ms
            return max([1, *map(len, self._text_bytes), *(len(token.encode()) for token in self._added)])
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the text's tokens. Special tokens written
        out in the text count as such, as in transformers.

        `add_special_tokens` adds what the tokenizer puts around a plain text
        (a BOS token, for some); a rendered chat template already holds it.
        Takes time in proportion to the text, without the interpreter lock.
        """
        if self._words is not None and not (add_special_tokens and self._adds_special):
            tokens = self._words.encode(text)
            if tokens is not None:
                return tokens
        # The fast one keeps no offsets, which for a long text takes most of the time, and memory.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    @cached_property
    def _words(self) -> KnownWords | None:
        if not self._byte_level:
            return None
        common = common_words(self._tokenizer, self._text_bytes, _CHAR_OF_BYTE)
        return KnownWords.of(self._tokenizer, common, _CHAR_OF_BYTE)

    def decoder(self, shown: frozenset[int] = frozenset()) -> TokenDecoder:
        """Returns a decoder for one choice's tokens, without special tokens but those in `shown`."""
        if self._byte_level:
            return ByteDecoder(self._table_with(shown) if shown else self._text_bytes)
        return WindowDecoder(self._tokenizer, self._special - shown)

    def added_token(self, text: str) -> int | None:
        """Returns the token that a text is, if it was added to the vocabulary as one."""
        return self._added.get(text)

    def token_bytes(self, token: int) -> bytes:
        """Returns what one token stands for, special tokens by their names; may be a part of a character."""
        name = self._tokenizer.id_to_token(token) or ""
        if self._byte_level:
            return _bytes_of(name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("▁", " ").encode()

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns what tokens stand for; bytes that are no whole character become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    @cached_property
    def _text_bytes(self) -> list[bytes]:
        with self._lock:
            # One by one: all names in a dictionary leave holes of some MB in memory.
            size, table = self._tokenizer.get_vocab_size(), []
            for token in range(size):
                name = self._tokenizer.id_to_token(token)
                if name is None:
                    return self._table_with_gaps()
                table.append(b"" if token in self._special else _bytes_of(name))
            return table

    def _table_with_gaps(self) -> list[bytes]:
        vocabulary = self._tokenizer.get_vocab()
        table = [b""] * (max(vocabulary.values()) + 1)
        for name, token in vocabulary.items():
            if token not in self._special:
                table[token] = _bytes_of(name)
        return table

    @cached_property
    def tags(self) -> Sequence[int]:
        """Tokens such as `<think>` that were added as one, and are text. Grammars take them for no text."""
        return [
            token
            for text, token in self._added.items()
            if token not in self._special and text.startswith("<") and text.endswith(">")
        ]

    def _table_with(self, shown: frozenset[int]) -> Sequence[bytes]:
        if shown not in self._tables:
            table = list(self._text_bytes)
            for token in shown & self._special:
                table[token] = self.token_bytes(token)
            self._tables[shown] = table
        return self._tables[shown]

    def warm_up(self) -> None:
        """Builds what is built on first use, so that no request waits for it. Takes some 100 ms."""
        if self._byte_level:
            _ = self._text_bytes
        _ = self.longest_token, self._words
        if self.template_source is not None:
            try:
                _ = self.chat_template
            except ChatTemplateError as error:
                logger.warning("%s; chat requests will be refused", error)
            else:
                self._keep_template()

    def _keep_template(self) -> None:
        """Has the tokens kept of what the template puts around messages."""
        if self._words is None:
            return
        try:
            text = self.chat_template.render([{"role": "user", "content": _PROBE}])
        except ChatTemplateError:
            return  # it wants another beginning
        self._words.keep(part for part in self._words.parts(text) if _PROBE not in part)


class Tokenizers:
    """The tokenizers of all models that were seen, by model digest."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, ModelTokenizer] = {}
        self._packed: dict[bytes, TokenizerFiles] = {}  # by zlib: some MB, which few requests need
        self._lock = asyncio.Lock()

    def get(self, digest: bytes) -> ModelTokenizer:
        """Returns a model's tokenizer; an engine's link has loaded it before the model is shown to anyone."""
        return self._by_digest[digest]

    def files(self, digest: bytes) -> TokenizerFiles:
        """Returns the files that a model's tokenizer was made of. Takes some 10 ms to unpack them."""
        return {name: zlib.decompress(data) for name, data in self._packed[digest].items()}

    async def load(self, digest: bytes, fetch: Callable[[], Awaitable[TokenizerFiles]]) -> None:
        """Makes the tokenizer of this model, from the files that `fetch` returns, unless it is there.

        Raises ValueError when the files make no tokenizer, and what `fetch` raises.
        """
        async with self._lock:
            if digest not in self._by_digest:
                files = await fetch()
                self._packed[digest] = await asyncio.to_thread(_packed, files)
                self._by_digest[digest] = await asyncio.to_thread(_build, files)


def _packed(files: TokenizerFiles) -> TokenizerFiles:
    return {name: zlib.compress(data, _FAST) for name, data in files.items()}


def _build(files: TokenizerFiles) -> ModelTokenizer:
    tokenizer = ModelTokenizer.from_files(files)
    tokenizer.warm_up()
    memory.give_back()
    return tokenizer


def _size(token: Mapping[str, Any]) -> int:
    return len(token["content"].encode())


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Reads the special tokens' texts: each is a string, or an object with its `content`."""
    found = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(files: TokenizerFiles, config: Mapping[str, Any]) -> str | None:
    """Finds the template: its own file, else what the config states."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    return stated_template(config.get("chat_template"))


def _is_byte_level(decoder: Decoder | None) -> bool:
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())  # as in tokenizer.json, which would take far longer to parse
    while state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return state["type"] == "ByteLevel"


def _byte_of_char() -> dict[int, int]:
    """The alphabet of byte-level BPE, for str.translate: printable bytes stand for themselves, the others for
    characters from 256 on. Bytes as characters outside of it become one that is no byte.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, _NO_BYTE) | {byte: byte for byte in printable}
    table.update({256 + index: byte for index, byte in enumerate(others)})
    return table


_NO_BYTE = 0xFFFF
_BYTE_OF_CHAR = _byte_of_char()
_CHAR_OF_BYTE = {byte: chr(char) for char, byte in _BYTE_OF_CHAR.items() if byte < 128}


def _bytes_of(name: str) -> bytes:
    """Returns a byte-level token's bytes; one with characters
    outside the alphabet was added by hand, as text.
    """
    try:
        return name.translate(_BYTE_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()
