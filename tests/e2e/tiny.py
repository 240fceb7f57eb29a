"""A tiny model with a tokenizer, on a stack of its own, and PEFT beside it to say what is right."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from tests.e2e.processes import Stack
from tests.gateway.fake_engine import TOKENIZER_FILES, make_tokenizer
from tests.model_zoo import save_adapter, save_tiny_model

TINY = "tiny"
VOCAB_SIZE = 512
FLAGS = (
    *("--served-model-name", TINY, "--dtype", "float32", "--max-model-len", "2304"),
    *("--max-num-batched-tokens", "384", "--max-num-seqs", "128", "--lora-memory-bytes", "40MiB"),
)
WORDS = range(258, 458)
"""Tokens that are whole words, so that texts tell them apart."""


@dataclass(frozen=True)
class Answer:
    """What came of a greedy request."""

    text: str
    logprobs: tuple[float, ...]
    cached_tokens: int
    model: str


@dataclass
class TinyZoo:
    """The tiny model in `folder`, and PEFT's view of it with adapters by name."""

    folder: Path
    model: PreTrainedModel
    peft: PeftModel | None = None
    adapters: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> TinyZoo:
        model = save_tiny_model(
            folder / "model", vocab_size=VOCAB_SIZE, max_position_embeddings=2304, eos_token_id=257
        )
        for name, data in TOKENIZER_FILES.items():
            (folder / "model" / name).write_bytes(data)
        modules = [{"idx": 0, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (folder / "model" / "modules.json").write_text(json.dumps(modules))
        (folder / "model" / "1_Pooling").mkdir()
        (folder / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        return cls(folder, model)

    def add(self, name: str, *, seed: int, **options: Any) -> Path:
        """Makes an adapter; another seed is another adapter."""
        path = save_adapter(
            copy.deepcopy(self.model),
            self.folder / name,
            rank=8,
            targets=("q_proj", "v_proj", "down_proj"),
            seed=seed,
            **options,
        )
        if self.peft is None:
            self.peft = PeftModel.from_pretrained(endless(self.model), str(path), adapter_name=name).eval()
        else:
            self.peft.load_adapter(str(path), adapter_name=name)
        self.adapters[name] = path
        return path

    def expected(
        self, adapter: str | None, prompt: Sequence[int], count: int
    ) -> tuple[str, tuple[float, ...]]:
        """The text that PEFT generates greedily, and the logprobs of its tokens."""
        assert self.peft is not None
        with self._with(adapter):
            tokens, logprobs = generate(self.peft, prompt, count)
        return make_tokenizer().decode(tokens), logprobs

    @torch.inference_mode()
    def vector(self, adapter: str | None, prompt: Sequence[int]) -> torch.Tensor:
        """The mean of the final hidden states that PEFT computes, with length 1."""
        assert self.peft is not None
        with self._with(adapter):
            states = self.peft(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        return torch.nn.functional.normalize(states.mean(0), dim=0)

    def _with(self, adapter: str | None) -> AbstractContextManager[None]:
        assert self.peft is not None
        if adapter is None:
            return self.peft.disable_adapter()
        self.peft.set_adapter(adapter)
        return nullcontext()


def endless(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that no token ends, as with `ignore_eos`. To be made before PEFT wraps it."""
    own: Any = copy.deepcopy(model)
    own.config.eos_token_id = own.generation_config.eos_token_id = None
    return own


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], tuple[float, ...]]:
    """The tokens that transformers generates greedily, and their logprobs. `model` comes from `endless`."""
    ids = torch.tensor([prompt])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == count
    steps = zip(found.logits, tokens, strict=True)
    return tokens, tuple(logits[0].log_softmax(-1)[token].item() for logits, token in steps)


def words(count: int, seed: int) -> list[int]:
    """A document of whole words."""
    return random.Random(seed).choices(WORDS, k=count)


def upload(stack: Stack, key: str, name: str, folder: Path) -> dict[str, Any]:
    """Uploads a folder over HTTP. Fails the test when it is refused."""
    answer = try_upload(stack, key, name, folder)
    assert answer.status_code == 201, answer.text
    return answer.json()


def try_upload(stack: Stack, key: str, name: str, folder: Path) -> httpx.Response:
    files = [("files", (path.name, path.read_bytes())) for path in folder.iterdir() if path.suffix != ".md"]
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{stack.url}/v1/adapters", data={"name": name}, files=files, headers=headers, timeout=60
    )


def ask(stack: Stack, key: str, model: str, prompt: Sequence[int], count: int = 16) -> Answer:
    """Asks greedily for `count` tokens."""
    with stack.client(key) as client:
        answer = client.completions.create(
            model=model,
            prompt=list(prompt),
            max_tokens=count,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
    (choice,) = answer.choices
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    return Answer(
        choice.text,
        tuple(choice.logprobs.token_logprobs),
        answer.usage.prompt_tokens_details.cached_tokens or 0,
        answer.model,
    )
