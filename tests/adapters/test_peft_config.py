from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import peft
import pytest

from adapters.errors import InvalidAdapter
from adapters.peft_config import HANDLED, HARMLESS, MAX_CONFIG_BYTES, REFUSED, LoraConfig, parse_config
from tests.adapters.files import config


def parse(**changes: Any) -> LoraConfig:
    return parse_config(json.dumps(config(**changes)).encode())


def fault_of(raw: bytes) -> InvalidAdapter:
    with pytest.raises(InvalidAdapter) as error:
        parse_config(raw)
    return error.value


def test_every_field_of_the_installed_peft_is_in_exactly_one_table() -> None:
    fields = [field.name for field in dataclasses.fields(peft.LoraConfig)]
    for name in fields:
        tables = [name in table for table in (HANDLED, HARMLESS, REFUSED)]
        assert sum(tables) == 1, f"{name} is in {sum(tables)} tables"
    assert HANDLED | HARMLESS.keys() | REFUSED.keys() == set(fields)


def test_peft_defaults_are_accepted() -> None:
    fields = peft.LoraConfig(target_modules=["q_proj"]).to_dict()
    fields["target_modules"] = list(fields["target_modules"])
    parsed = parse_config(json.dumps(fields).encode())
    assert (parsed.r, parsed.lora_alpha, parsed.target_modules) == (8, 8.0, ("q_proj",))


def test_absent_fields_take_the_defaults_of_peft() -> None:
    ours = parse_config(b'{"peft_type": "LORA", "target_modules": "all-linear"}')
    theirs = peft.LoraConfig()
    assert (ours.r, ours.lora_alpha, ours.use_rslora) == (theirs.r, theirs.lora_alpha, theirs.use_rslora)


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [True, {"x": 1}, [1], "x", 1])
def test_refused_fields_are_refused_by_name(name: str, value: object) -> None:
    error = fault_of(json.dumps(config(**{name: value})).encode())
    assert error.field_or_tensor == name and name in error.message


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [None, False, [], {}])
def test_refused_fields_may_be_off(name: str, value: object) -> None:
    assert parse(**{name: value}) == parse()


def test_unknown_fields_are_refused_unless_they_are_off() -> None:
    assert parse(use_something_new=False, new_config=None, new_list=[]) == parse()
    for value in (True, 1, 0, "x", [0], {"a": None}):
        error = fault_of(json.dumps(config(use_something_new=value)).encode())
        assert error.field_or_tensor == "use_something_new"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("peft_type", ["LORA"]),
        ("task_type", "SEQ_CLS"),
        ("bias", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "PiSSA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "invented"),
        ("init_lora_weights", 3),
        ("r", 0),
        ("r", -1),
        ("r", True),
        ("r", 8.0),
        ("r", "8"),
        ("r", None),
        ("r", 10**100),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", [16]),
        ("lora_alpha", 10**400),
        ("use_rslora", 1),
        ("use_rslora", "true"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 4.0}),
        ("rank_pattern", {"q_proj": None}),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", {f"p{i}": 4 for i in range(10_001)}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("alpha_pattern", {"(?i)q_proj": 1}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", 7),
        ("target_modules", [1]),
        ("target_modules", [""]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", "(q_proj"),
        ("exclude_modules", "*"),
        ("exclude_modules", [None]),
        ("layers_to_transform", -1),
        ("layers_to_transform", [0, "1"]),
        ("layers_to_transform", True),
        ("layers_to_transform", 1.0),
        ("layers_pattern", "layers"),
        ("base_model_name_or_path", 5),
        ("base_model_name_or_path", "x" * 1025),
    ],
)
def test_wrong_values_name_their_field(field: str, value: object) -> None:
    error = fault_of(json.dumps(config(**{field: value})).encode())
    assert error.field_or_tensor == field
    assert field in error.message and len(error.message) < 500


def test_text_beyond_ascii_is_text() -> None:
    raw = rb'{"peft_type": "LORA", "target_modules": ".*", "base_model_name_or_path": "\ud83d\ude00 \u00e9"}'
    assert parse_config(raw).base_model == "😀 é"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"modules_to_save": ["embed_tokens", "model.norm"]}, "modules_to_save"),
        ({"modules_to_save": "lm_head.x"}, "modules_to_save"),
        ({"modules_to_save": [1]}, "modules_to_save"),
        ({"trainable_token_indices": [1, 1]}, "trainable_token_indices"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
        ({"trainable_token_indices": [2**31]}, "trainable_token_indices"),
        ({"trainable_token_indices": ["a"]}, "trainable_token_indices"),
        ({"trainable_token_indices": [True]}, "trainable_token_indices"),
        ({"trainable_token_indices": {"wte": [1]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": [1], "x.lm_head": [2]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": [1], "model.lm_head": [2]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": 1}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": []}}, "trainable_token_indices"),
        ({"trainable_token_indices": [1], "modules_to_save": ["lm_head"]}, "trainable_token_indices"),
        ({"lora_bias": True, "use_dora": True}, "lora_bias"),
        ({"lora_bias": 1}, "lora_bias"),
        ({"use_dora": "yes"}, "use_dora"),
        ({"ensure_weight_tying": 0}, "ensure_weight_tying"),
        ({"alora_invocation_tokens": [1.5]}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": "x"}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1] * 1025}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "task_type": None}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "use_dora": True}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "modules_to_save": ["lm_head"]}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "trainable_token_indices": [1]}, "alora_invocation_tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(fields: dict[str, Any], names: str) -> None:
    error = fault_of(json.dumps(config(**fields)).encode())
    assert error.field_or_tensor == names and names in error.message


def test_what_concerns_the_ends() -> None:
    parsed = parse(
        modules_to_save=["model.embed_tokens", "lm_head", "embed_tokens"], ensure_weight_tying=True
    )
    assert parsed.modules_to_save == ("embed_tokens", "lm_head") and parsed.ensure_weight_tying
    assert parse(trainable_token_indices=[3, 1]).token_indices == {"embed_tokens": (3, 1)}
    by_name = {"lm_head": [5], "model.embed_tokens": [2, 4]}
    assert parse(trainable_token_indices=by_name).token_indices == {"lm_head": (5,), "embed_tokens": (2, 4)}


def test_activated_lora() -> None:
    assert parse(alora_invocation_tokens=[7, 7, 8]).invocation_tokens == (7, 7, 8)
    # PEFT takes both for a plain LoRA.
    assert parse(alora_invocation_tokens=[]) == parse(alora_invocation_tokens=None) == parse()


def test_layers_to_transform_needs_a_list_of_modules() -> None:
    error = fault_of(json.dumps(config(target_modules=".*q_proj", layers_to_transform=[0])).encode())
    assert error.field_or_tensor == "layers_to_transform"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"\x80\x02}q\x00.", "not UTF-8"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'"LORA"', "no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"\\ud83d\\ude00": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"r": 1, "r": 2}', "'r' twice"),
        (b'{"lora_alpha": Infinity}', "Infinity"),
        (rb'{"base_model_name_or_path": "\uD800"}', "surrogate"),
        (rb'{"\udfff": null}', "surrogate"),
        (b'{"rank_pattern": {"a": 1, "a": 2}}', "'a' twice"),
        (b" " * (MAX_CONFIG_BYTES + 1), "limit"),
    ],
)
def test_what_is_no_config(raw: bytes, says: str) -> None:
    error = fault_of(raw)
    assert says in error.message and "adapter_config.json" in error.message


def test_many_patterns_are_read_soon() -> None:
    begun = time.process_time()
    assert len(parse(rank_pattern={f"layers.{i}.q_proj": 4 for i in range(10_000)}).rank_pattern) == 10_000
    assert time.process_time() - begun < 10
