"""Whatever the files hold, the answer is a summary or `InvalidAdapter`, and soon; never another exception."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.adapter_files import INDEX_FILE, WEIGHTS_FILE
from adapters.base_model import BaseModelShape
from adapters.errors import InvalidAdapter
from adapters.reader import read_layout
from adapters.standalone import digest_of_folder
from adapters.validation import AdapterSummary, validate
from tests.adapters.files import SHAPE, Tensors, config, safetensors, with_header, write_adapter
from tests.adapters.kinds import KINDS, Kind

_fuzz = settings(
    max_examples=200,
    deadline=10_000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_kinds = st.sampled_from(list(KINDS.values()))
_json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_likely_names = st.sampled_from(
    [*config(), "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules",
     "use_rslora", "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices",
     "ensure_weight_tying", "alora_invocation_tokens"]
)  # fmt: skip
_likely_values = st.one_of(
    _json_values,
    st.sampled_from(
        [4, 8, "q_proj", ["q_proj"], ["embed_tokens"], ["lm_head", "q_proj"], ".*", "all-linear", True, [0],
         [0, 1], [63], [66], {"q_proj": 4}, {".*": 1}, {"lm_head": [1]},
         {"embed_tokens": [4, 9], "lm_head": [4, 9]}]
    ),
    st.dictionaries(st.text(alphabet="q_proj.*()[]|\\d+?{}1", max_size=12), st.integers(0, 9), max_size=2),
)  # fmt: skip
_pieces = st.sampled_from(
    ["base_model.model", "model", "language_model", "layers", "0", "1", "2", "-1", "self_attn", "mlp",
     "q_proj", "down_proj", "embed_tokens", "lm_head", "lora_A", "lora_B", "lora_embedding_A",
     "lora_embedding_B", "lora_magnitude_vector", "default", "weight", "bias", "base_layer",
     "token_adapter", "modules_to_save",
     "trainable_tokens_delta", "original_module", ""]
)  # fmt: skip


def outcome(folder: Path, shape: BaseModelShape = SHAPE) -> AdapterSummary | None:
    """The summary of a valid adapter. The same files must be one adapter for every reader, or for none."""
    try:
        summary = validate(folder, shape)
    except InvalidAdapter as error:
        assert error.message and len(error.message) < 1200 and error.message.isprintable()
        return None
    layout = read_layout(folder, shape)
    assert len(layout.parts) == summary.num_tensors
    assert digest_of_folder(folder) == summary.digest
    return summary


@_fuzz
@given(_kinds, st.dictionaries(st.one_of(_likely_names, st.text(max_size=8)), _likely_values, max_size=4))
@example(KINDS["plain"], {"r": 4})
def test_fields(tmp_path: Path, kind: Kind, changes: dict[str, Any]) -> None:
    write_adapter(tmp_path, config_json=config(**{**kind.fields, **changes}), weights=kind.weights)
    outcome(tmp_path, kind.shape)


@_fuzz
@given(st.binary(max_size=200))
@example(b'{"peft_type":"LORA","r":' + b"9" * 5000 + b"}")
def test_bytes_of_the_config(tmp_path: Path, raw: bytes) -> None:
    assert outcome(write_adapter(tmp_path, config_json=raw)) is None


@_fuzz
@given(_kinds, st.data())
def test_flipped_bytes_of_the_config(tmp_path: Path, kind: Kind, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(config(**kind.fields)).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    outcome(write_adapter(tmp_path, config_json=bytes(raw), weights=kind.weights), kind.shape)


@_fuzz
@given(_kinds, st.data())
def test_entries_of_the_header(tmp_path: Path, kind: Kind, data: st.DataObject) -> None:
    """A good file with some fields of some tensors replaced."""
    whole = safetensors(kind.weights)
    (length,) = struct.unpack("<Q", whole[:8])
    header: dict[str, Any] = json.loads(whole[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        entry = header[data.draw(st.sampled_from(sorted(header)))]
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        number = st.integers(-4, 2**70) | st.integers(0, 64) | st.integers(0, 6000)
        entry[key] = data.draw(
            st.lists(number, max_size=3) | st.sampled_from(["F16", "F32", "BF16", "U8"]) | _json_values
        )
    raw = with_header(json.dumps(header).encode(), whole[8 + length :])
    outcome(write_adapter(tmp_path, config_json=config(**kind.fields), weights=raw), kind.shape)


@_fuzz
@given(_kinds, st.data())
def test_bytes_of_the_weights(tmp_path: Path, kind: Kind, data: st.DataObject) -> None:
    """A good file with a few bytes changed, or cut short, or with bytes added."""
    whole = bytearray(safetensors(kind.weights))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 900) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(whole)))
    raw = bytes(whole[:cut]) + data.draw(st.binary(max_size=4))
    outcome(write_adapter(tmp_path, config_json=config(**kind.fields), weights=raw), kind.shape)


@_fuzz
@given(_kinds, st.data())
def test_names_of_tensors(tmp_path: Path, kind: Kind, data: st.DataObject) -> None:
    """A good adapter with tensors renamed, left out, of another's shape, or of another kind's."""
    weights = dict(kind.weights)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(kind.weights)))
        tensor = weights.pop(name, None)
        action = data.draw(st.sampled_from(["drop", "rename", "part", "shape", "foreign"]))
        if tensor is None or action == "drop":
            continue
        if action == "rename":
            weights[".".join(data.draw(st.lists(_pieces, max_size=8)))] = tensor
        elif action == "part":
            parts = name.split(".")
            parts[data.draw(st.integers(0, len(parts) - 1))] = data.draw(_pieces)
            weights[".".join(parts)] = tensor
        elif action == "shape":
            weights[name] = weights.get(data.draw(st.sampled_from(sorted(kind.weights))), tensor)
        else:
            other = data.draw(_kinds).weights
            weights[name] = tensor
            foreign = data.draw(st.sampled_from(sorted(other)))
            weights[foreign] = other[foreign]
    if weights:
        outcome(kind.write(tmp_path, weights=weights), kind.shape)


@_fuzz
@given(_kinds, st.data())
def test_shards_and_their_index(tmp_path: Path, kind: Kind, data: st.DataObject) -> None:
    """An adapter in shards, well or badly cut."""
    for file in tmp_path.iterdir():
        file.unlink()
    kind.write(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    count = data.draw(st.integers(1, 3))
    shards: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in kind.weights.items():
        shards[data.draw(st.integers(0, count - 1))][name] = tensor
    mapping: dict[str, Any] = {}
    for i, weights in enumerate(shards):
        number, total = (
            (data.draw(st.integers(0, 4)), 3) if data.draw(st.integers(0, 9)) == 9 else (i + 1, count)
        )
        file = f"adapter_model-{number:05d}-of-{total:05d}.safetensors"
        (tmp_path / file).write_bytes(safetensors(weights))
        mapping |= dict.fromkeys(weights, file)
    if data.draw(st.booleans()):
        mapping[data.draw(st.sampled_from([*mapping, "x"]))] = data.draw(_json_values)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": mapping}))
    summary = outcome(tmp_path, kind.shape)
    whole = validate(kind.write(tmp_path / "whole"), kind.shape)
    for file in (tmp_path / "whole").iterdir():
        file.unlink()
    (tmp_path / "whole").rmdir()
    assert summary in (None, whole)
