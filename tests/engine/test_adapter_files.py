"""Adapters as programs write them and targets as PEFT lets one name them: answered as PEFT answers."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from adapters.adapter_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from engine.model.loading import LoadedModel, load_model
from engine.scheduler import SchedulerLimits
from tests.engine.engine_driver import Ask, EngineDriver
from tests.model_zoo import save_tiny_model
from tests.oracles import Answer, PeftOracle, assert_only_ties

NUM_TOKENS = 12
PROMPTS = (tuple(range(5, 60, 3)), tuple(range(200, 240)))

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "a regex with exceptions": {
        "target_modules": r".*\.(?:self_attn|mlp)\.(?:q|o|up)_proj",
        "exclude_modules": r".*\.1\.mlp\..*",
    },
    "all-linear with exceptions": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "some layers": {
        "target_modules": ["v_proj", "down_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "full names": {"target_modules": ["model.layers.1.mlp.gate_proj", "layers.2.self_attn.q_proj"]},
    "fan_in_fan_out": {"target_modules": ["q_proj", "down_proj"], "fan_in_fan_out": True},
}
PLAIN: Mapping[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}

Weights = dict[str, torch.Tensor]


def in_dtype(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


FILES: Mapping[str, Callable[[Weights], Weights]] = {
    "in float16": in_dtype(torch.float16),
    "in bfloat16": in_dtype(torch.bfloat16),
    "the adapter's name in tensors' names": renamed(".weight", ".default.weight"),
    "the text half of a model that sees images": renamed(
        "base_model.model.model.", "base_model.model.model.language_model."
    ),
    "the same, in transformers' former layout": renamed(
        "base_model.model.model.", "base_model.model.language_model.model."
    ),
}
ROUNDED = ("in float16", "in bfloat16")
SHARDS = "shards"


@dataclass(frozen=True)
class Zoo:
    """What the engine reads, by name, and what PEFT is to read in its place where it reads no such file."""

    model: PreTrainedModel
    loaded: LoadedModel
    folders: Mapping[str, Path]
    references: Mapping[str, Path]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    root = tmp_path_factory.mktemp("files")
    model = save_tiny_model(root / "model", eos_token_id=None)
    folders = {
        name: save(model, root / name, seed, fields) for seed, (name, fields) in enumerate(TARGETS.items())
    }
    references = dict(folders)
    for seed, (name, change) in enumerate([*FILES.items(), (SHARDS, None)], start=len(TARGETS)):
        plain = save(model, root / f"{name}, plain", seed, PLAIN)
        folders[name] = Path(shutil.copytree(plain, root / name))
        references[name] = folders[name] if name in ROUNDED else plain
        if change is None:
            cut_in_two(folders[name])
        else:
            save_file(change(load_file(plain / WEIGHTS_FILE)), folders[name] / WEIGHTS_FILE)
    loaded = load_model(str(root / "model"), dtype="float32", device="cpu", max_model_len=None)
    return Zoo(model, loaded, folders, references)


def save(model: PreTrainedModel, folder: Path, seed: int, fields: Mapping[str, Any]) -> Path:
    """As PEFT saves it, but with the fields as they were given: PEFT writes out which modules it found."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=8, lora_alpha=16, task_type="CAUSAL_LM", init_lora_weights=False, **copy.deepcopy(dict(fields))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it ignores `fan_in_fan_out` here
        wrapped = get_peft_model(copy.deepcopy(model), config)
    assert isinstance(wrapped, PeftModel)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def cut_in_two(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    mapping = {}
    for number in (1, 2):
        file = f"adapter_model-{number:05d}-of-00002.safetensors"
        shard = {name: weights[name] for name in sorted(weights)[number - 1 :: 2]}
        save_file(shard, folder / file)
        mapping |= dict.fromkeys(shard, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": mapping}))


def answer(zoo: Zoo, *batches: list[Ask]) -> list[Answer]:
    """The answers of an engine that is given one batch after another."""
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=64)
    engine = EngineDriver(zoo.loaded, zoo.folders, num_blocks=200, num_rank_pages=16, limits=limits)
    try:
        return [found for batch in batches for found in engine.run(batch)]
    finally:
        engine.close()


def test_alone_and_in_one_batch_they_answer_as_peft_does(zoo: Zoo) -> None:
    asks = [Ask(name, prompt, NUM_TOKENS) for prompt in PROMPTS for name in (None, *zoo.folders)]
    mixed = answer(zoo, asks)
    alone = answer(zoo, *([ask] for ask in asks))
    oracle = PeftOracle(copy.deepcopy(zoo.model), zoo.references)
    assert_only_ties(oracle.differences([*mixed, *alone]))
    base = {found.prompt: found.tokens for found in mixed if found.adapter is None}
    unchanged = [found.adapter for found in mixed if found.adapter and found.tokens == base[found.prompt]]
    assert not unchanged, "an adapter that changes nothing would hide a mistake"
