"""`adapters check`: the report for people and programs, and how the command ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.adapter_files import WEIGHTS_FILE
from adapters.base_model import BaseModelShape
from adapters.check import check_folder, rows_of
from adapters.cli import main
from adapters.validation import validate
from tests.adapters.fake_gateway import KEY, FakeGateway, serve
from tests.adapters.files import SHAPE, config, tensors, write_adapter
from tests.adapters.kinds import KINDS, Kind

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The base model's folder, of which only the config is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    fields = {
        "num_hidden_layers": SHAPE.num_layers,
        "hidden_size": SHAPE.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": SHAPE.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serve(FakeGateway()) as served:
        yield served


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["check", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out, err


@each_kind
def test_a_report_says_what_validation_found(tmp_path: Path, kind: Kind) -> None:
    folder = kind.write(tmp_path)
    summary = validate(folder, kind.shape)
    (folder / "README.md").write_text("PEFT writes one")
    alone, against = check_folder(folder, None), check_folder(folder, kind.shape)
    assert alone.digest == against.digest == summary.digest
    assert alone.nbytes == against.nbytes == summary.nbytes
    assert against.layout.target_modules == summary.target_modules
    assert not alone.against_base and against.against_base
    assert alone.as_json()["modules"] and json.loads(json.dumps(against.as_json()))["valid"] is True
    assert {row.module for row in rows_of(against.layout)} == set(summary.target_modules)


def test_the_table(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "lora_bias": True,
        "rank_pattern": {"layers.1.mlp.down_proj": 4},
        "alpha_pattern": {"1.*q_proj": 2},
    }
    kind = KINDS["bias"]
    folder = write_adapter(tmp_path / "a", config_json=config(**fields), weights=kind.weights)
    (folder / "tokenizer.json").write_text("{}")
    code, out, err = run(capsys, folder, "--model", model)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["module", "layers", "rank", "scale", "dtype", "and"]
    assert lines[1:4] == [
        ["q_proj", "0", "4", "2", "F32", "bias"],
        ["q_proj", "1", "4", "0.5", "F32", "bias"],
        ["down_proj", "0-1", "4", "2", "F32", "bias"],
    ]
    assert "12 tensors" in out and "only a server can judge: tokenizer.json" in out
    assert out.splitlines()[-1] == f"valid (fits the base model); sha256:{validate_digest(folder)}"


def validate_digest(folder: Path) -> str:
    return validate(folder, SHAPE).digest.hex()


def test_the_ends_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, KINDS["added tokens, saved"].write(tmp_path / "a"))
    assert code == 0 and "whole weight, 67 tokens" in out and "not checked against a base model" in out
    code, out, _ = run(capsys, KINDS["trained tokens"].write(tmp_path / "b"))
    assert code == 0 and "2 trained tokens" in out
    code, out, _ = run(capsys, KINDS["activated"].write(tmp_path / "c"))
    assert code == 0 and "activated by 3 tokens" in out


def test_what_is_wrong_is_told_in_both_forms(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "a", config_json=config(use_qalora=True))
    code, out, err = run(capsys, folder, "--model", model)
    assert code == 1 and not out and err.startswith("error: ") and "use_qalora" in err
    code, out, err = run(capsys, folder, "--json")
    told = json.loads(out)
    assert code == 1 and not err and told["valid"] is False
    assert told["field_or_tensor"] == "use_qalora" and "use_qalora" in told["error"]

    # Right in itself, but for another base model.
    folder = write_adapter(tmp_path / "b", config_json=config(layers_to_transform=[0]), weights=tensors())
    assert run(capsys, folder, "--model", model)[0] == 1
    wide = write_adapter(
        tmp_path / "c", weights=tensors("up_proj"), config_json=config(target_modules=["up_proj"])
    )
    narrow = model / "config.json"
    narrow.write_text(json.dumps({**json.loads(narrow.read_text()), "intermediate_size": 47}))
    assert run(capsys, wide)[0] == 0
    code, _, err = run(capsys, wide, "--model", model)
    assert code == 1 and "[47, 4]" in err


def test_an_adapter_that_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {name: (dtype, shape, bytes(len(data))) for name, (dtype, shape, data) in tensors().items()}
    folder = write_adapter(tmp_path, weights=zero)
    code, _, err = run(capsys, folder)
    assert code == 1 and "--allow-zero" in err
    code, out, _ = run(capsys, folder, "--allow-zero")
    assert code == 0 and "changes nothing" in out


def test_a_folder_of_links_is_checked(tmp_path: Path) -> None:
    """As the cache of Hugging Face's hub is made."""
    folder = write_adapter(tmp_path / "files")
    links = tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert check_folder(links, SHAPE).digest == validate(folder, SHAPE).digest


def test_against_a_gateway(
    tmp_path: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.base = base_object(SHAPE)
    folder = write_adapter(tmp_path)
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    code, _, err = run(capsys, folder, "--url", gateway.url)
    assert code == 2 and "LORAPLEX_API_KEY" in err
    assert run(capsys, folder, "--url", gateway.url, "--api-key", "lpx_wrong_key")[0] == 4
    monkeypatch.setenv("LORAPLEX_API_KEY", KEY)
    code, out, _ = run(capsys, folder, "--url", gateway.url)
    assert code == 0 and "fits the base model" in out
    gateway.base = base_object(BaseModelShape(3, SHAPE.modules, 64, 64))
    code, _, err = run(capsys, folder, "--url", gateway.url)
    assert code == 1 and "layers.2" in err
    gateway.base = {"object": "something else"}
    assert run(capsys, folder, "--url", gateway.url)[0] == 2
    assert run(capsys, folder, "--url", "http://127.0.0.1:9")[0] == 3


def base_object(shape: BaseModelShape) -> dict[str, Any]:
    return {
        "object": "adapter.base",
        "num_layers": shape.num_layers,
        "modules": {name: list(sizes) for name, sizes in shape.modules.items()},
        "max_lora_rank": shape.max_lora_rank,
        "vocab_size": shape.vocab_size,
        "tied_embeddings": shape.tied_embeddings,
    }


def test_wrong_usage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "a")
    assert run(capsys)[0] == 2
    assert run(capsys, tmp_path / "nowhere")[0] == 2
    assert run(capsys, folder, "--model", model, "--url", "http://x")[0] == 2
    code, _, err = run(capsys, folder, "--model", folder / WEIGHTS_FILE)
    assert code == 2 and "GGUF" in err
