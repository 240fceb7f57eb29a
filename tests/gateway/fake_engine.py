"""An engine that speaks the wire contract and computes
nothing: tokens are a hash of seed, position and last token.

So the tokens of a choice depend on what a real engine's depend on, and a choice continues elsewhere with the
same text. Serves on a real socket; as a program, it is a process that tests can kill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import random
import signal
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from adapters.leases import EngineLease, EngineLeases
from engine.beams import BeamOptions, BeamSearch, EarlyStopping
from engine.step import TokenLogprobs
from gateway import tasks
from protos import engine_pb2 as pb
from protos.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

EOS = 257
FAILING_DIGEST = b"\xee" * 32
UNREADABLE_DIGEST = b"\xed" * 32
MODEL = "tiny"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: 256 bytes, the specials of ChatML, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    assert tokenizer.token_to_id("<|im_end|>") == EOS
    # Pieces of text that random tokens make readable, and characters of several bytes.
    tokenizer.add_tokens([f"w{index}" for index in range(200)] + ["→", "🙂", "日本", "END"])
    return tokenizer


TOKENIZER_FILES = {
    "tokenizer.json": make_tokenizer().to_str().encode(),
    "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
    "chat_template.jinja": CHAT_TEMPLATE.encode(),
}
VOCAB_SIZE = 512
HIDDEN_SIZE = 8
SERVER_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]


@dataclass
class Choice:
    request: pb.Submit
    index: int
    seed: int
    tokens: list[int]
    ends_at: float
    search: BeamSearch | None = None
    """Of all choices of the request, which this one stands for."""


def next_token(request: pb.Submit, seed: int, tokens: list[int]) -> int:
    """The token after `tokens`; a pure function of what the contract says it may depend on."""
    sampled_by = 0 if request.sampling.temperature == 0 else seed
    position = len(request.prompt_tokens) + len(tokens)
    last = tokens[-1] if tokens else request.prompt_tokens[-1]
    data = struct.pack("<QQQ", sampled_by, position, last) + request.adapter_digest
    value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    may_end = not request.ignore_eos and len(tokens) >= request.min_tokens
    if value % 101 == 0 and may_end:
        return EOS
    # Half of the tokens are single bytes, most of them no characters by themselves.
    return value % 256 if value % 2 else 258 + value % 204


def prompt_vector(request: pb.Submit) -> bytes:
    """A vector that depends on the prompt, the adapter and the pooling, and is not of length 1."""
    data = repr((list(request.prompt_tokens), request.adapter_digest, request.pooling)).encode()
    numbers = hashlib.blake2b(data, digest_size=HIDDEN_SIZE).digest()
    return struct.pack(f"<{HIDDEN_SIZE}f", *(number - 127.5 for number in numbers))


@dataclass
class FakeEngine(EngineServicer):
    """`submits` and `aborts` keep all that was received. `counts` has, by tenant and length of the prompt,
    how many prompts it took and how many tokens it gave.

    `scripts` are what choices give in place of hashes, and end with: choice i gives the i-th, and again.

    While `refusing`, it takes nothing, and says why and when to come back; when set to be `garbled`, its next
    message breaks the contract. While `holds_at` is set, no choice gets more tokens than that, and while
    `rests_after` is, nobody gets any once it has had more submissions: so what a test does in the middle of
    an answer, or of many, is done there, however slow the machine is.
    """

    engine_id: str
    redis_url: str | None = None
    step_s: float = 0.001
    lease_s: float = 10
    max_model_len: int = 2048
    max_num_seqs: int = 256
    num_blocks: int = 4096
    model: str = MODEL
    digest: bytes = b"\x11" * 32
    residency: dict[str, str] = field(default_factory=dict)
    port: int = 0
    refusing: bool = False
    refusal: pb.Refusal = pb.REFUSAL_DRAINING
    retry_after_ms: int = 0
    garbled: bool = False
    holds_at: int | None = None
    rests_after: int | None = None
    scripts: list[list[int]] = field(default_factory=list)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=lambda: TOKENIZER_FILES)
    submits: list[pb.Submit] = field(default_factory=list)
    aborts: list[pb.Abort] = field(default_factory=list)
    running: dict[tuple[int, int], Choice] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    unloaded: list[bytes] = field(default_factory=list)
    announced: list[bytes] = field(default_factory=list)
    states: dict[bytes, pb.AdapterState] = field(default_factory=dict)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_EngineServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        self._beat = asyncio.create_task(self._publish()) if self.redis_url else None

    async def stop(self) -> None:
        if self._beat:
            await tasks.cancel(self._beat)
        await self._server.stop(None)

    async def _publish(self) -> None:
        async with Redis.from_url(self.redis_url or "") as redis:
            leases = EngineLeases(redis)
            while True:
                lease = EngineLease(
                    self.engine_id, f"127.0.0.1:{self.port}", self.model, self.digest, self.max_model_len,
                    residency=self.residency, running=len(self.running),
                )  # fmt: skip
                with contextlib.suppress(RedisError, OSError):
                    await leases.publish(lease, ttl_s=self.lease_s)
                await asyncio.sleep(0.3)

    # ---- the contract -------------------------------------------------------------------------------

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.ModelInfo:
        return pb.ModelInfo(
            name=self.model, digest=self.digest, architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len, num_layers=2, eos_token_ids=[EOS], max_lora_rank=64,
            max_num_seqs=self.max_num_seqs, num_blocks=self.num_blocks, block_size=16,
            pooling=pb.POOLING_MEAN, hidden_size=HIDDEN_SIZE,
            modules=[pb.LinearModule(name="q_proj", in_features=8, out_features=8)],
        )  # fmt: skip

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.FileChunk]:
        for name, data in self.tokenizer_files.items():
            for at in range(0, len(data), 4096):
                yield pb.FileChunk(name=name, data=data[at : at + 4096])

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: object) -> pb.ListAdaptersResponse:
        nowhere = pb.AdapterState(digest=request.digest)
        return pb.ListAdaptersResponse(adapters=[self.states.get(request.digest, nowhere)])

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: object) -> pb.AdapterState:
        self.unloaded.append(request.digest)
        return pb.AdapterState(digest=request.digest)

    async def Link(
        self, requests: AsyncIterator[pb.LinkRequest], context: object
    ) -> AsyncIterator[pb.LinkResponse]:
        choices: dict[tuple[int, int], Choice] = {}
        early: list[pb.LinkResponse] = []
        arrived = asyncio.Event()
        reader = asyncio.create_task(self._read(requests, choices, early, arrived))
        due = time.monotonic()
        try:
            while True:
                if not choices and not early:
                    arrived.clear()
                    await arrived.wait()
                while early:
                    yield early.pop(0)
                due = max(due + self.step_s, time.monotonic() - 1)
                await asyncio.sleep(max(0, due - time.monotonic()))
                while early:
                    yield early.pop(0)
                message = self._step(choices)
                if self.garbled and message.tokens:
                    self.garbled = False
                    message.logprobs.add()  # for some of the tokens only
                    message.tokens.append(0)
                    message.request_ids.append(message.request_ids[0])
                    message.choices.append(message.choices[0])
                if message.tokens or message.finished or message.searched:
                    yield message
        finally:
            reader.cancel()
            for key in choices:
                self.running.pop(key, None)

    async def _read(
        self,
        requests: AsyncIterator[pb.LinkRequest],
        choices: dict[tuple[int, int], Choice],
        early: list[pb.LinkResponse],
        arrived: asyncio.Event,
    ) -> None:
        async for message in requests:
            if message.HasField("submit"):
                self.submits.append(message.submit)
                early.append(self._admit(message.submit, choices))
            elif message.HasField("announce"):
                self.announced.append(message.announce.adapter_digest)
            else:
                self.aborts.append(message.abort)
                for key in [key for key in choices if _matches(key, message.abort)]:
                    del choices[key]
                    self.running.pop(key, None)
            arrived.set()

    def _admit(self, submit: pb.Submit, choices: dict[tuple[int, int], Choice]) -> pb.LinkResponse:
        request_id, indexes = submit.request_id, range(len(submit.seeds))
        if self.refusing:
            refusals = [_finished(request_id, index, pb.FINISH_REASON_REFUSED, "busy") for index in indexes]
            for refused in refusals:
                refused.refusal, refused.retry_after_ms = self.refusal, self.retry_after_ms
            return pb.LinkResponse(finished=refusals)
        if submit.adapter_digest == FAILING_DIGEST:
            error = "The adapter's logits are not finite."
            return pb.LinkResponse(
                finished=[_finished(request_id, i, pb.FINISH_REASON_ERROR, error) for i in indexes]
            )
        if submit.adapter_digest == UNREADABLE_DIGEST:
            ends = [_finished(request_id, i, pb.FINISH_REASON_ERROR, "StoreUnavailable") for i in indexes]
            for end in ends:
                end.failure = pb.FAILURE_STORE_UNAVAILABLE
            return pb.LinkResponse(finished=ends)
        self._count(submit)[0] += 1
        started = pb.Started(request_id=request_id, cached_tokens=len(submit.prompt_tokens) // 2)
        message = pb.LinkResponse(started=[started])
        if submit.HasField("prompt_logprobs"):
            message.prompt_logprobs.extend(_prompt_logprobs(submit))
        if submit.pooling:
            message.embeddings.add(request_id=request_id, values=prompt_vector(submit))
            message.finished.append(_finished(request_id, 0, pb.FINISH_REASON_STOP, ""))
            return message
        if submit.prompt_only:
            message.finished.extend(_finished(request_id, i, pb.FINISH_REASON_LENGTH, "") for i in indexes)
            return message
        for index in indexes[:1] if submit.HasField("beams") else indexes:
            ends_at = time.monotonic() + submit.deadline_ms / 1000 if submit.deadline_ms else math.inf
            choice = Choice(submit, index, submit.seeds[index], list(submit.output_tokens), ends_at)
            choice.search = BeamSearch(_beam_options(submit)) if submit.HasField("beams") else None
            choices[request_id, index] = self.running[request_id, index] = choice
        return message

    def _token(self, choice: Choice) -> int:
        if not self.scripts:
            return next_token(choice.request, choice.seed, choice.tokens)
        script = self.scripts[choice.index % len(self.scripts)]
        return script[len(choice.tokens)] if len(choice.tokens) < len(script) else EOS

    def _count(self, submit: pb.Submit) -> list[int]:
        return self.counts.setdefault(f"{submit.tenant}:{len(submit.prompt_tokens)}", [0, 0])

    def _step(self, choices: dict[tuple[int, int], Choice]) -> pb.LinkResponse:
        message = pb.LinkResponse()
        if self.rests_after is not None and len(self.submits) > self.rests_after:
            return message
        any_logprobs = any(choice.request.sampling.HasField("logprobs") for choice in choices.values())
        for key, choice in list(choices.items()):
            if choice.search is not None:
                self._search(message, key[0], choice.request, choice.search, any_logprobs)
                if not choice.search.beams:
                    del choices[key], self.running[key]
                continue
            is_late = time.monotonic() >= choice.ends_at
            if self.holds_at is not None and len(choice.tokens) >= self.holds_at and not is_late:
                continue
            token = self._token(choice)
            choice.tokens.append(token)
            self._count(choice.request)[1] += 1
            message.request_ids.append(key[0])
            message.choices.append(key[1])
            message.tokens.append(token)
            if any_logprobs:
                message.logprobs.append(_logprobs(token, choice.request.sampling.logprobs))
            stopped = token in choice.request.stop_token_ids or (
                token == EOS and not choice.request.ignore_eos
            )
            if stopped or is_late or len(choice.tokens) >= choice.request.max_tokens:
                reason = pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH
                reason = pb.FINISH_REASON_DEADLINE if is_late else reason
                message.finished.append(_finished(*key, reason, ""))
                del choices[key]
                self.running.pop(key, None)
        return message

    def _search(
        self,
        message: pb.LinkResponse,
        request_id: int,
        request: pb.Submit,
        search: BeamSearch,
        any_logprobs: bool,
    ) -> None:
        """Takes one step of a search, and tells its choices if that was the last."""
        count, width = search.options.num_candidates, search.options.width
        search.advance({beam: _top(request, beam.tokens, count) for beam in search.beams})
        message.searched.add(request_id=request_id, tokens=width)
        self._count(request)[1] += width
        if search.beams:
            return
        for index, answer in enumerate(search.answers):
            message.request_ids.extend([request_id] * answer.length)
            message.choices.extend([index] * answer.length)
            message.tokens.extend(answer.tokens)
            for told in (beam.logprobs or TokenLogprobs(0.0) for beam in answer.path):
                if any_logprobs:
                    message.logprobs.add(
                        chosen=told.chosen, top_tokens=told.top_tokens, top_logprobs=told.top_logprobs
                    )
            is_end = answer.token in search.options.end_tokens
            reason = pb.FINISH_REASON_STOP if is_end else pb.FINISH_REASON_LENGTH
            message.finished.append(_finished(request_id, index, reason, ""))


def _beam_options(submit: pb.Submit) -> BeamOptions:
    ends = frozenset((*submit.stop_token_ids, *(() if submit.ignore_eos else (EOS,))))
    return BeamOptions(
        len(submit.seeds),
        submit.max_tokens,
        ends,
        submit.beams.length_penalty,
        EarlyStopping(submit.beams.early_stopping),
        submit.sampling.logprobs if submit.sampling.HasField("logprobs") else None,
    )


def _top(request: pb.Submit, tokens: list[int], count: int) -> TokenLogprobs:
    """The likeliest tokens after some: what is drawn, and those behind it."""
    first = next_token(request, 0, tokens)
    likely = tuple((first + i) % VOCAB_SIZE for i in range(count))
    return TokenLogprobs(0.0, likely, tuple(-0.25 - 1.25 * i for i in range(count)))


def _logprobs(token: int, count: int) -> pb.TokenLogprobs:
    top = [token, (token + 1) % VOCAB_SIZE, (token + 2) % VOCAB_SIZE]
    return pb.TokenLogprobs(
        chosen=-(token % 7) / 4, top_tokens=top[:count], top_logprobs=[-0.25, -1.5, float("-inf")][:count]
    )


def _prompt_logprobs(submit: pb.Submit) -> list[pb.PromptLogprobs]:
    """In parts of three tokens."""
    told = [_logprobs(token, submit.prompt_logprobs) for token in submit.prompt_tokens[1:]]
    return [
        pb.PromptLogprobs(request_id=submit.request_id, start=1 + at, tokens=told[at : at + 3])
        for at in range(0, len(told), 3)
    ]


def _finished(request_id: int, choice: int, reason: pb.FinishReason, error: str) -> pb.Finished:
    return pb.Finished(request_id=request_id, choice=choice, reason=reason, error=error)


def _matches(key: tuple[int, int], abort: pb.Abort) -> bool:
    return key[0] == abort.request_id and (not abort.HasField("choice") or key[1] == abort.choice)


def expected_text(request: pb.Submit, choice: int = 0) -> str:
    """What a client must see of a choice, by decoding all of its tokens at once."""
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        token = next_token(request, request.seeds[choice], tokens)
        if token == EOS and not request.ignore_eos:
            break
        tokens.append(token)
    return make_tokenizer().decode(tokens, skip_special_tokens=True)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--engine-id", default=f"fake-{random.randrange(10**6)}")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--counts", type=Path, help="file for `counts`, written on SIGTERM")
    options = parser.parse_args()
    engine = FakeEngine(options.engine_id, options.redis_url, step_s=options.step_s, port=options.port)
    await engine.start()
    stopping = asyncio.Event()
    if options.counts:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()
    options.counts.write_text(json.dumps(engine.counts))


if __name__ == "__main__":
    asyncio.run(_main())
