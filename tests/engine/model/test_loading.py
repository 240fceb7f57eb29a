"""From a path to a model: what is found, what is identified, and what is said when it is not there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.loading import ModelNotAvailable, UnsupportedModel, load_model, resolve_dtype
from tests.model_zoo import save_tiny_model


def load(source: Path | str) -> object:
    return load_model(str(source), dtype="float32", device="cpu", max_model_len=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def test_the_digest_is_of_contents(folder: Path, tmp_path: Path) -> None:
    first = load_model(str(folder), dtype="float32", device="cpu", max_model_len=None)
    assert len(first.digest) == 32
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert load_model(str(moved), dtype="bfloat16", device="cpu", max_model_len=64).digest == first.digest
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert load_model(str(moved), dtype="float32", device="cpu", max_model_len=None).digest != first.digest


def test_tokenizer_files(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32", device="cpu", max_model_len=None)
    assert model.tokenizer_files == {}
    (folder / "tokenizer.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "old"}')
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": templates})
    )
    files = load_model(str(folder), dtype="float32", device="cpu", max_model_len=None).tokenizer_files
    assert files["tokenizer.json"] == b"{}"
    assert files["chat_template.jinja"] == b"{% if tools %}T{% else %}D{% endif %}"
    assert json.loads(files["tokenizer_config.json"]) == {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "chat_template.jinja").write_text("F")
    files = load_model(str(folder), dtype="float32", device="cpu", max_model_len=None).tokenizer_files
    assert files["chat_template.jinja"] == b"F"


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotAvailable, match="no model at"):
        load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelNotAvailable, match=r"neither a \.gguf file nor"):
        load(tmp_path / "notes.txt")
    with pytest.raises(ModelNotAvailable, match=r"no config\.json"):
        load(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotAvailable, match=r"no \.safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotAvailable, match=shard.name):
        load(tmp_path)


def test_a_damaged_file_and_a_wrong_shape_are_named(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ModelNotAvailable, match=r"model\.safetensors cannot be read"):
        load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(UnsupportedModel, match=r"gate_proj\.weight has the shape \(96, 64\)"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (319, 64)),
        ("model.norm.weight", (63,)),
        ("model.layers.1.input_layernorm.weight", (65,)),
    ],
)
def test_no_tensor_is_shorter_than_what_the_kernels_read(
    folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(shape)}, file)
    with pytest.raises(UnsupportedModel, match=re.escape(f"{name} has the shape {shape}")):
        load(folder)


def test_quantized_weights_are_refused_by_name(folder: Path) -> None:
    file, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight is of torch\.float8_e4m3fn"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("config.json", "[]", r"config\.json says"),
        ("config.json", "\xff", r"config\.json is not valid JSON"),
        ("model.safetensors.index.json", "{}", r"index\.json is not an index"),
    ],
)
def test_a_file_that_says_something_else_is_one_sentence(
    folder: Path, file: str, text: str, named: str
) -> None:
    (folder / file).write_text(text, encoding="latin-1")
    with pytest.raises(ModelNotAvailable, match=named):
        load(folder)


def test_a_rope_without_its_factor_is_one_sentence(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="factor"):
        load(folder)


def test_a_hub_name_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[bool] = []

    def unreachable(name: str, *, local_files_only: bool = False, **_: object) -> str:
        calls.append(local_files_only)
        raise LocalEntryNotFoundError(name) if local_files_only else ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ModelNotAvailable, match=r"^Model some/model is not on disk and could not be fetched"
    ) as e:
        load("some/model")
    assert calls == [True, False]
    assert "(ConnectionError); set HF_TOKEN if it is gated there" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_disk_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def full(name: str, *, local_files_only: bool = False, **_: object) -> str:
        raise (LocalEntryNotFoundError(name) if local_files_only else OSError(28, "No space left on device"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelNotAvailable, match="No space left on device"):
        load("some/model")


def test_a_hub_name_comes_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folder))
    assert load_model("some/model", dtype="float32", device="cpu", max_model_len=None).config.num_layers == 3


def test_dtype_names() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("float32", cpu) is torch.float32
    assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
