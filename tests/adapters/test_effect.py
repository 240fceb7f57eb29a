"""Of every kind of adapter: what it is summed up as, what in it is refused, and whether it does anything."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.adapter_files import EFFECT_FILE
from adapters.errors import InvalidAdapter
from adapters.standalone import digest_of_folder
from adapters.validation import largest_weights_file, validate
from tests.adapters.files import SHAPE, Tensors
from tests.adapters.kinds import ADDED, EMBEDDING, HEAD, KINDS, VOCAB, Kind

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def with_zeros(weights: Tensors, *names: str) -> Tensors:
    return {
        name: (dtype, shape, bytes(len(data)) if any(part in name for part in names) else data)
        for name, (dtype, shape, data) in weights.items()
    }


def fault_of(folder: Path, kind: Kind) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        validate(folder, kind.shape)
    return error.value


@each_kind
def test_every_kind_is_valid(tmp_path: Path, kind: Kind) -> None:
    summary = validate(kind.write(tmp_path), kind.shape)
    assert summary.num_tensors == len(kind.weights)
    assert summary.nbytes == sum(len(data) for _, _, data in kind.weights.values())
    assert summary.invocation_tokens == tuple(kind.fields.get("alora_invocation_tokens", ()))
    assert summary.vocab_size == (VOCAB + ADDED if f"{EMBEDDING}.weight" in kind.weights else 0)
    assert summary.tokenizer == "" and len(summary.digest) == 32


@each_kind
def test_the_digest_needs_no_base_model(tmp_path: Path, kind: Kind) -> None:
    folder = kind.write(tmp_path)
    assert digest_of_folder(folder) == validate(folder, kind.shape).digest
    assert digest_of_folder(folder, "ab") == validate(folder, kind.shape, tokenizer="ab").digest


@each_kind
def test_the_digest_changes_with_each_tensor_and_setting(tmp_path: Path, kind: Kind) -> None:
    digests = {validate(kind.write(tmp_path), kind.shape).digest}
    for name, (dtype, shape, data) in kind.weights.items():
        changed = {**kind.weights, name: (dtype, shape, bytes([data[0] ^ 1]) + data[1:])}
        digests.add(validate(kind.write(tmp_path, weights=changed), kind.shape).digest)
    assert len(digests) == 1 + len(kind.weights)


def test_the_digest_changes_with_what_no_tensor_shows(tmp_path: Path) -> None:
    def digest(name: str, tokenizer: str = "", **fields: object) -> bytes:
        kind = KINDS[name]
        folder = replace(kind, fields={**kind.fields, **fields}).write(tmp_path)
        return validate(folder, kind.shape, tokenizer=tokenizer).digest

    assert digest("plain") != digest("plain", tokenizer="ab") != digest("plain", tokenizer="cd")
    assert digest("plain") != digest("activated") != digest("activated", alora_invocation_tokens=[5, 6])
    assert digest("trained tokens") != digest("trained tokens", trainable_token_indices=[4, 9])
    assert digest("trained tokens") != digest("trained tokens", ensure_weight_tying=True)
    assert digest("plain") == digest("plain", ensure_weight_tying=True, fan_in_fan_out=True, bias="all")


@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_in_any_tensor_are_named(tmp_path: Path, kind: Kind, value: float) -> None:
    for name, (dtype, shape, data) in kind.weights.items():
        changed = {**kind.weights, name: (dtype, shape, data[:-4] + struct.pack("<f", value))}
        assert fault_of(kind.write(tmp_path, weights=changed), kind).field_or_tensor == name


NOTHING = {
    "plain": ["lora_B"],
    "bias": ["lora_A", "lora_B.bias"],
    # A magnitude before training is the norm of a weight that is not known here.
    "dora": ["lora_B"],
    "activated": ["lora_A"],
    "embedding": ["lora_embedding_A"],
    "lm_head": ["lora_B"],
    # The base's own weight, which PEFT saves with LoRA on it, does nothing.
    "both ends, saved along": ["lora_A", "lora_embedding_B"],
}


@each_kind
def test_what_does_nothing_is_refused(tmp_path: Path, kind: Kind) -> None:
    name = next(name for name, other in KINDS.items() if other is kind)
    parts = NOTHING.get(name, ["lora_B"])
    folder = kind.write(tmp_path, weights=with_zeros(kind.weights, *parts))
    if name in NOTHING:
        assert "allow_zero" in fault_of(folder, kind).message
        assert validate(folder, kind.shape, allow_zero=True).num_tensors == len(kind.weights)
    else:  # trained rows and weights have an effect without LoRA
        validate(folder, kind.shape)


def test_one_part_with_an_effect_is_enough(tmp_path: Path) -> None:
    for name, parts in {"bias": ["lora_A"], "both ends, saved along": ["q_proj.lora_B", "lm_head"]}.items():
        kind = KINDS[name]
        validate(kind.write(tmp_path, weights=with_zeros(kind.weights, *parts)), kind.shape)


def test_activated_lora_goes_with_lora_of_lm_head_alone(tmp_path: Path) -> None:
    activated = {"alora_invocation_tokens": [1]}
    for name, kind in KINDS.items():
        folder = replace(kind, fields={**kind.fields, **activated}).write(tmp_path)
        if name in ("plain", "bias", "lm_head", "activated"):
            assert validate(folder, kind.shape).invocation_tokens == (1,)
        else:
            assert fault_of(folder, kind).field_or_tensor == "alora_invocation_tokens"
    beyond = {"alora_invocation_tokens": [VOCAB]}
    error = fault_of(replace(KINDS["plain"], fields=beyond).write(tmp_path), KINDS["plain"])
    assert error.field_or_tensor == "alora_invocation_tokens" and f"token {VOCAB}" in error.message


@pytest.mark.parametrize("root", ["model.language_model", "language_model.model"])
def test_the_text_half_of_a_model_that_sees_images(tmp_path: Path, root: str) -> None:
    """As Unsloth and PEFT name it, in both layouts that transformers has had."""
    head = "base_model.model.language_model.lm_head" if root.startswith("l") else HEAD
    for name, kind in KINDS.items():
        renamed = {
            key.replace(HEAD, head).replace("base_model.model.model.", f"base_model.model.{root}."): tensor
            for key, tensor in kind.weights.items()
        }
        whole = validate(kind.write(tmp_path), kind.shape)
        assert validate(kind.write(tmp_path, weights=renamed), kind.shape) == whole, name


def test_roots_are_not_mixed(tmp_path: Path) -> None:
    kind = KINDS["plain"]
    name = next(iter(kind.weights))
    other = name.replace("model.model.", "model.model.language_model.", 1)
    mixed = {other if key == name else key: tensor for key, tensor in kind.weights.items()}
    assert fault_of(kind.write(tmp_path, weights=mixed), kind).field_or_tensor == other


def test_files_of_a_tokenizer(tmp_path: Path) -> None:
    kind = KINDS["plain"]
    folder = kind.write(tmp_path)
    plain = validate(folder, SHAPE)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    assert validate(folder, SHAPE) == plain  # whoever calls has found that they change nothing
    (folder / EFFECT_FILE).write_text("{}")
    assert fault_of(folder, kind).field_or_tensor == EFFECT_FILE
    own = validate(folder, SHAPE, tokenizer="ab" * 32)
    assert own.tokenizer == "ab" * 32 and own.digest != plain.digest
    (folder / "chat_template.jinja").write_bytes(bytes(1024 * 1024 + 1))
    assert fault_of(folder, kind).field_or_tensor == "chat_template.jinja"


@each_kind
def test_no_valid_file_is_larger_than_the_bound(tmp_path: Path, kind: Kind) -> None:
    assert sum(len(data) for _, _, data in kind.weights.values()) < largest_weights_file(kind.shape)
