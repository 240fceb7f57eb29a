from __future__ import annotations

import time

import pytest

from adapters.tensor_names import MAX_NAME_CHARS, Slot, parse_tensor_name, tensor_name

Q = "model.layers.3.self_attn.q_proj"
E = "model.embed_tokens"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{Q}.lora_A.weight", (Q, Slot.A, None)),
        (f"{Q}.lora_A.default.weight", (Q, Slot.A, "default")),
        (f"{Q}.lora_B.weight", (Q, Slot.B, None)),
        (f"{Q}.lora_B.bias", (Q, Slot.BIAS, None)),
        (f"{Q}.lora_B.default.bias", (Q, Slot.BIAS, "default")),
        # Since DoRA was new; while the vector was a module of its own; with the adapter's name.
        (f"{Q}.lora_magnitude_vector", (Q, Slot.MAGNITUDE, None)),
        (f"{Q}.lora_magnitude_vector.weight", (Q, Slot.MAGNITUDE, None)),
        (f"{Q}.lora_magnitude_vector.default", (Q, Slot.MAGNITUDE, "default")),
        (f"{Q}.lora_magnitude_vector.default.weight", (Q, Slot.MAGNITUDE, "default")),
        (f"{E}.lora_embedding_A", (E, Slot.A, None)),
        (f"{E}.lora_embedding_B.default", (E, Slot.B, "default")),
        (f"{E}.weight", (E, Slot.WEIGHT, None)),
        (f"{E}.base_layer.weight", (E, Slot.BASE, None)),
        (f"{E}.original_module.weight", (E, Slot.ORIGINAL, None)),
        (f"{E}.modules_to_save.weight", (E, Slot.COPY, None)),
        (f"{E}.token_adapter.trainable_tokens_delta", (E, Slot.TOKENS, None)),
        (f"{E}.token_adapter.trainable_tokens_delta.default", (E, Slot.TOKENS, "default")),
        (f"{E}.token_adapter.base_layer.weight", (E, Slot.TOKENS_BASE, None)),
        ("language_model.lm_head.lora_B.weight", ("language_model.lm_head", Slot.B, None)),
    ],
)
def test_names_that_peft_writes(name: str, expected: tuple[str, Slot, str | None]) -> None:
    parsed = parse_tensor_name(f"base_model.model.{name}")
    assert parsed is not None and (parsed.path, parsed.slot, parsed.infix) == expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "base_model.model.",
        f"{Q}.lora_A.weight",
        "base_model.model.lora_A.weight",
        f"base_model.model.{Q}.lora_A",
        f"base_model.model.{Q}.lora_A.bias",
        f"base_model.model.{Q}.lora_A.a.b.weight",
        f"base_model.model.{Q}.lora_A..weight",
        f"base_model.model.{Q}..lora_A.weight",
        f"base_model.model.{Q}.lora_C",
        f"base_model.model.{Q}.bias",
        f"base_model.model.{Q}.base_layer.bias",
        f"base_model.model.{Q}.base_layer.lora_A.weight",
        f"base_model.model.{E}.lora_embedding_A.weight",
        f"base_model.model.{E}.token_adapter.trainable_tokens_delta.weight",
        f"base_model.model.{E}.token_adapter.trainable_tokens_original",
        f"base_model.model.{Q}.lora_A.weight\n",
        f"base_model.model.{Q} .lora_A.weight",
        f"base_model.model.{'x' * MAX_NAME_CHARS}.lora_A.weight",
    ],
)
def test_names_that_it_does_not(name: str) -> None:
    assert parse_tensor_name(name) is None


@pytest.mark.parametrize(
    ("slot", "embedding"),
    [(slot, False) for slot in Slot] + [(slot, True) for slot in Slot if slot is not Slot.BIAS],
)
def test_a_name_says_what_was_put_in_it(slot: Slot, embedding: bool) -> None:
    parsed = parse_tensor_name(tensor_name(E, slot, embedding=embedding))
    assert parsed is not None and (parsed.path, parsed.slot, parsed.infix) == (E, slot, None)


def test_endless_names_take_no_time() -> None:
    begun = time.process_time()
    for name in ("base_model.model." + "lora_A." * 1_000_000, "base_model.model." + "." * 5_000_000):
        assert parse_tensor_name(name) is None
    assert time.process_time() - begun < 1
