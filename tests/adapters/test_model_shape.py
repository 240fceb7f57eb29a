"""The shape of a base model from its files is that of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from adapters.base_model import BaseModelShape
from adapters.model_shape import UnknownModel, shape_of_files, shape_of_object
from gateway.base_shape import shape_object, shape_of
from protos.engine_pb2 import LinearModule, ModelInfo
from tests.model_zoo import TINY_LLAMA, save_tiny_model


def shape_of_model(model: Any) -> BaseModelShape:
    layer = model.model.layers[0]
    modules = {
        name: (module.in_features, module.out_features)
        for parent in (layer.self_attn, layer.mlp)
        for name, module in parent.named_children()
        if name.endswith("_proj")
    }
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return BaseModelShape(len(model.model.layers), modules, 256, model.lm_head.out_features, tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_hugging_face_folder(tmp_path: Path, family: str, tied: bool) -> None:
    classes: dict[str, Any] = {}
    if family == "qwen3":
        classes = {"model_class": Qwen3ForCausalLM, "config_class": Qwen3Config}
    save_tiny_model(tmp_path, tie_word_embeddings=tied, **classes)
    model = (Qwen3ForCausalLM if classes else LlamaForCausalLM).from_pretrained(tmp_path)
    found = shape_of_files(tmp_path, max_lora_rank=256)
    assert found == shape_of_model(model) and found.hidden_size == TINY_LLAMA["hidden_size"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file(tmp_path: Path, tied: bool) -> None:
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = save_tiny_model(tmp_path, tie_word_embeddings=tied)
    found = shape_of_files(tmp_path / "model.gguf", max_lora_rank=256)
    assert found == shape_of_model(model)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"num_attention_heads": 0, "hidden_size": 8}', b'{"a'])
def test_what_is_no_model(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(UnknownModel):
        shape_of_files(tmp_path, max_lora_rank=64)
    (tmp_path / "config.json").write_bytes(raw)
    (tmp_path / "model.gguf").write_bytes(raw)
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(UnknownModel) as error:
            shape_of_files(path, max_lora_rank=64)
        assert str(path) in str(error.value)


def test_what_a_gateway_tells_is_understood() -> None:
    module = LinearModule(name="q_proj", in_features=8, out_features=16)
    info = ModelInfo(
        name="m", num_layers=2, modules=[module], max_lora_rank=64, vocab_size=32, tied_embeddings=True
    )
    told = json.loads(json.dumps(shape_object(info)))
    assert shape_of_object(told) == shape_of(info) == BaseModelShape(2, {"q_proj": (8, 16)}, 64, 32, True)
    for broken in (
        {},
        told | {"modules": 3},
        told | {"modules": {"q_proj": [1]}},
        told | {"num_layers": "x"},
    ):
        with pytest.raises(UnknownModel):
            shape_of_object(broken)
