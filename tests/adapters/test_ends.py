"""Against PEFT itself: what an adapter does to every module, by what its layout says and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from adapters.errors import InvalidAdapter
from adapters.layout import AdapterLayout, LowRank, StoredTensor, TrainedTokens
from adapters.reader import read_layout
from tests.adapters.files import SHAPE

# PEFT advises against one of two tied weights adapted alone, and against much else that is possible.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = [3, 60, 7]
ADDED = [*range(SHAPE.vocab_size, SHAPE.vocab_size + 5)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=SHAPE.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=request.param,
            initializer_range=0.2,
        )
    )
    # PEFT looks at the folder to see whether the vocabulary has grown.
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


ALWAYS: dict[str, Any] = {"save_embedding_layers": True}
NEVER: dict[str, Any] = {"save_embedding_layers": False}

# Fields of the config, how many tokens the vocabulary has more, and how the adapter is saved.
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "bias": ({"lora_bias": True, "target_modules": ["q_proj", "down_proj"]}, 0, {}),
    "bias on lm_head": ({"lora_bias": True, "target_modules": ["lm_head", "k_proj"]}, 0, {}),
    "dora": ({"use_dora": True, "rank_pattern": {"q_proj": 7}}, 0, {}),
    "dora on the ends": ({"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}, 0, NEVER),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, 0, {}),
    "trained biases where there are none": ({"bias": "all"}, 0, {}),
    "lora on the embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, 0, {}),
    "lora on the embedding alone": ({"target_modules": ["embed_tokens"], "use_rslora": True}, 0, NEVER),
    "lora on lm_head": ({"target_modules": ["lm_head"]}, 0, {}),
    "lora on both": ({"target_modules": ["lm_head", "embed_tokens"]}, 0, NEVER),
    "lora on both, tied": ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, 0, {}),
    "lora on lm_head, tied": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, 0, NEVER),
    "saved embedding": ({"modules_to_save": ["embed_tokens"]}, 0, {}),
    "saved lm_head": ({"modules_to_save": ["lm_head"]}, 0, {}),
    "saved both": ({"modules_to_save": ["lm_head", "model.embed_tokens"]}, 0, {}),
    "saved and tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, 0, {}),
    "saved lm_head and tied": ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, 0, {}),
    "saved one, lora on the other": (
        {"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head"]}, 0, {},
    ),
    "everything saved along": ({}, 0, ALWAYS),
    "trained tokens": ({"trainable_token_indices": TOKENS}, 0, {}),
    "trained tokens, tied": ({"trainable_token_indices": TOKENS, "ensure_weight_tying": True}, 0, {}),
    "trained tokens of lm_head": ({"trainable_token_indices": {"lm_head": TOKENS}}, 0, {}),
    "trained tokens of both": (
        {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}}, 0, {},
    ),
    "different trained tokens": (
        {"trainable_token_indices": {"model.embed_tokens": TOKENS, "lm_head": [5, 3]}}, 0, {},
    ),
    "added tokens": ({}, 5, {}),
    "added and trained tokens": ({"trainable_token_indices": [*ADDED, 2]}, 5, {}),
    "added tokens, saved both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, 5, {}),
    "added tokens, saved embedding": ({"modules_to_save": ["embed_tokens"]}, 5, {}),
    "added tokens under lora": ({"target_modules": ["embed_tokens", "lm_head"]}, 5, {}),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "added", "saving"), CASES.values(), ids=CASES.keys())
def test_every_module_does_what_peft_makes_it_do(
    base: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any], added: int, saving: dict[str, Any]
) -> None:
    check_against_peft(save_adapter(base, tmp_path, fields, added, saving), base, added)


@pytest.mark.parametrize(
    "case",
    ["lora on the embedding", "lora on lm_head", "everything saved along", "saved one, lora on the other"],
)
def test_weights_of_the_base_that_are_saved_along_count(
    base: LlamaForCausalLM, tmp_path: Path, case: str
) -> None:
    """As PEFT writes them they repeat the base's own. Others count, on a tied base for both ends."""
    fields, added, _ = CASES[case]
    folder = save_adapter(base, tmp_path, fields, added, ALWAYS)
    weights = load_file(folder / WEIGHTS_FILE)
    for name, tensor in weights.items():
        if name.endswith(("base_layer.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor += 0.3 * torch.randn_like(tensor)
    save_file(weights, folder / WEIGHTS_FILE)
    check_against_peft(folder, base, added)


@torch.no_grad()
def check_against_peft(folder: Path, base: LlamaForCausalLM, added: int) -> None:
    """What every module gives under the adapter's layout is what PEFT makes it give."""
    shape = replace(SHAPE, tied_embeddings=base.config.tie_word_embeddings)
    layout = read_layout(folder, shape)
    assert layout.vocab_size == SHAPE.vocab_size + added
    assert {part.tensor.name for part in layout.parts} == load_file(folder / WEIGHTS_FILE).keys()

    expected = PeftModel.from_pretrained(resized(base, added), str(folder)).eval()
    model: Any = expected.get_base_model()
    applied = Applied(folder, layout)
    plain = resized(base, 0)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            inputs = torch.randn(5, module.in_features)
            _, _, layer, _, kind = name.split(".")
            mine = applied.linear(inputs, module.weight, layout.linear.get((int(layer), kind)))
            theirs = model.get_submodule(name)(inputs)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)
    tokens, inputs = torch.arange(layout.vocab_size), torch.randn(5, 32)
    theirs = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(applied.embedding(plain)[tokens], theirs, rtol=1e-5, atol=1e-5)
    theirs = model.get_output_embeddings()(inputs)
    torch.testing.assert_close(applied.head(plain, inputs), theirs, rtol=1e-5, atol=1e-5)


def resized(base: LlamaForCausalLM, added: int) -> LlamaForCausalLM:
    model = copy.deepcopy(base)
    if added:
        model.resize_token_embeddings(SHAPE.vocab_size + added, mean_resizing=False)
    return model


@torch.no_grad()
def save_adapter(
    base: LlamaForCausalLM, folder: Path, fields: Mapping[str, Any], added: int, saving: Mapping[str, Any]
) -> Path:
    """An adapter as training would leave it: everything that is trained differs from its first value."""
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **copy.deepcopy(dict(fields))}
    model = get_peft_model(
        resized(base, added), PeftLoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
    )
    assert isinstance(model, PeftModel)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_embedding" not in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(folder), **saving)
    return folder


class Applied:
    """A layout's meaning, written down plainly."""

    def __init__(self, folder: Path, layout: AdapterLayout) -> None:
        self._folder = folder
        self._layout = layout

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        data = (self._folder / tensor.file).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(tensor.shape)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, update: LowRank | None) -> torch.Tensor:
        if update is None:
            return x @ weight.T
        delta = update.scale * self.read(update.b) @ self.read(update.a)
        y = x @ (weight + delta).T
        if update.magnitude is not None:
            y = y * self.read(update.magnitude) / (weight + delta).norm(dim=1)
        return y if update.bias is None else y + update.scale * self.read(update.bias)

    def embedding(self, base: LlamaForCausalLM) -> torch.Tensor:
        layout = self._layout
        table = self._table(base.model.embed_tokens.weight, layout.saved_embedding, layout.embedding_tokens)
        update = layout.embedding
        if update is None:
            return table
        delta = update.scale * (self.read(update.b) @ self.read(update.a)).T
        if update.magnitude is None:
            return table + delta
        return (table + delta) * self.read(update.magnitude) / (table + delta).norm(dim=0)

    def head(self, base: LlamaForCausalLM, x: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        table = self._table(base.lm_head.weight, layout.saved_lm_head, layout.lm_head_tokens)
        return self.linear(x, table, layout.lm_head)

    def _table(
        self, base: torch.Tensor, saved: StoredTensor | None, tokens: TrainedTokens | None
    ) -> torch.Tensor:
        weight = base.detach() if saved is None else self.read(saved)
        if tokens is None:
            return weight
        assert saved is not None or max(tokens.indices) < len(weight)
        return weight.index_copy(0, torch.tensor(tokens.indices), self.read(tokens.rows))


def test_added_tokens_need_no_whole_weights_if_their_rows_are_trained_at_both_ends(
    base: LlamaForCausalLM, tmp_path: Path
) -> None:
    both = {"embed_tokens": ADDED, "lm_head": ADDED}
    folder = save_adapter(base, tmp_path / "both", {"trainable_token_indices": both}, 5, NEVER)
    tied = base.config.tie_word_embeddings
    layout = read_layout(folder, replace(SHAPE, tied_embeddings=tied))
    assert layout.vocab_size == SHAPE.vocab_size + 5 and layout.saved_lm_head is None
    assert layout.embedding_tokens and layout.lm_head_tokens
    assert (layout.embedding_tokens.rows == layout.lm_head_tokens.rows) is tied

    # The first of the five is nowhere: it would be random.
    folder = save_adapter(base, tmp_path / "gap", {"trainable_token_indices": ADDED[1:]}, 5, NEVER)
    with pytest.raises(InvalidAdapter, match="adds 5 tokens"):
        read_layout(folder, replace(SHAPE, tied_embeddings=tied))


def fault_of(folder: Path, *, tied: bool = False, shape: Any = SHAPE) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        read_layout(folder, replace(shape, tied_embeddings=tied))
    return error.value


def test_added_tokens_with_rows_at_one_end_only(base: LlamaForCausalLM, tmp_path: Path) -> None:
    if base.config.tie_word_embeddings:
        pytest.skip("a tied model has one weight for both")
    folder = save_adapter(base, tmp_path, {"target_modules": ["embed_tokens"]}, 5, {})
    error = fault_of(folder)
    assert "lm_head" in error.message and "adds 5 tokens" in error.message


def test_a_tensor_that_peft_would_ignore_is_named(base: LlamaForCausalLM, tmp_path: Path) -> None:
    def changed(case: str, name: str, **fields: Any) -> InvalidAdapter:
        folder = save_adapter(base, tmp_path / case / name, *CASES[case])
        path = folder / CONFIG_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return fault_of(folder, tied=base.config.tie_word_embeddings)

    assert "lora_magnitude_vector" in str(changed("dora", "off", use_dora=False).field_or_tensor)
    assert "lora_B.bias" in str(changed("bias", "off", lora_bias=False).field_or_tensor)
    tokens = changed("trained tokens", "off", trainable_token_indices=None)
    assert "trainable_tokens_delta" in str(tokens.field_or_tensor)
    embedding = changed("lora on the embedding", "off", target_modules=["q_proj"])
    assert "embed_tokens" in str(embedding.field_or_tensor)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("dora", "q_proj.lora_magnitude_vector"),
        ("bias", "q_proj.lora_B.bias"),
        ("lora on both", "embed_tokens.lora_embedding_B"),
        ("saved both", "lm_head.weight"),
        ("trained tokens", "token_adapter.trainable_tokens_delta"),
    ],
)
def test_a_tensor_that_is_missing_is_named(
    base: LlamaForCausalLM, tmp_path: Path, case: str, part: str
) -> None:
    folder = save_adapter(base, tmp_path, *CASES[case])
    weights = load_file(folder / WEIGHTS_FILE)
    missing = next(name for name in weights if name.endswith(part))
    del weights[missing]
    save_file(weights, folder / WEIGHTS_FILE)
    assert fault_of(folder, tied=base.config.tie_word_embeddings).field_or_tensor == missing


def test_an_adapter_of_another_vocabulary(base: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path / "saved", *CASES["saved both"])
    wide = replace(SHAPE, vocab_size=SHAPE.vocab_size + 1)
    assert "vocabulary of 64 tokens" in fault_of(folder, shape=wide).message
    folder = save_adapter(base, tmp_path / "tokens", *CASES["trained tokens of lm_head"])
    narrow = replace(SHAPE, vocab_size=60)
    assert "adds 1 tokens" in fault_of(folder, shape=narrow).message


def test_a_base_model_whose_vocabulary_is_not_known(base: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path, *CASES["saved both"])
    assert "lm_head" in fault_of(folder, shape=replace(SHAPE, vocab_size=0)).message
