"""An adapter in rank pages holds exactly what its file says, whatever modules, layers and ranks it has."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from adapters.errors import InvalidAdapter
from adapters.peft_config import LoraConfig, parse_config
from adapters.reader import read_config
from adapters.safetensors_header import RawHeader
from adapters.weight_files import RawHeaders, read_headers
from engine.model import adapter_reading, adapter_weights
from engine.model.adapter_packing import PackingPlan, packing_plan
from engine.model.adapter_reading import read_adapter, read_as_stored
from engine.model.adapter_rehearsal import prepare_loads, rehearse_packing
from engine.model.adapter_weights import HostAdapter
from engine.model.config import PROJECTION_GROUPS, ModelConfig
from engine.model.llama import LlamaModel
from engine.model.loading import load_model
from engine.model.lora_pool import RankPagePool, rank_page_bytes
from kernels import native
from tests.model_zoo import save_adapter, save_tiny_model

PARENTS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LlamaModel]:
    folder = tmp_path_factory.mktemp("base")
    model = save_tiny_model(folder)
    return model, load_model(str(folder), dtype="float32", device="cpu", max_model_len=None).network


def delta(adapter: HostAdapter, config: ModelConfig, layer: int, group: str, m: int) -> torch.Tensor:
    """B·A with its scale, as the kernels compute it from the live rank rows of the pages: [out, in]."""
    weights, splits = adapter.groups[group], config.group_splits(group)
    total = torch.zeros(splits[m + 1] - splits[m], config.group_in(group))
    for page in range(adapter.num_pages):
        scale, live = weights.scales[layer, page, m], min(16, adapter.rank - 16 * page)
        if scale:
            b = weights.b[layer, page, :live, splits[m] : splits[m + 1]]
            total += scale * (b.T @ weights.a[layer, page, m, :live])
    return total


@pytest.mark.parametrize(
    ("rank", "targets", "options", "scale"),
    [
        (4, ("q_proj", "v_proj"), {}, lambda name: 2.0),
        (16, ("k_proj", "down_proj"), {"use_rslora": True, "lora_alpha": 8}, lambda name: 8 / math.sqrt(16)),
        (
            16,
            ("q_proj", "k_proj", "gate_proj"),
            {
                "use_rslora": True,
                "lora_alpha": 16,
                "rank_pattern": {"k_proj": 4},
                "alpha_pattern": {"layers.0.mlp.gate_proj": 6},
            },
            lambda name: 8.0 if "k_proj" in name else 1.5 if "layers.0.mlp" in name else 4.0,
        ),
        (40, ("o_proj", "gate_proj", "up_proj"), {"layers_to_transform": [1]}, lambda name: 2.0),
        (
            8,
            ("q_proj", "up_proj"),
            {"rank_pattern": {"up_proj": 20}, "alpha_pattern": {"layers.2.mlp.up_proj": 60}},
            lambda name: 3.0 if "layers.2.mlp" in name else 16 / 20 if "up_proj" in name else 2.0,
        ),
    ],
)
def test_pages_hold_the_adapter(
    base: tuple[PreTrainedModel, LlamaModel],
    tmp_path: Path,
    rank: int,
    targets: tuple[str, ...],
    options: dict[str, Any],
    scale: Any,
) -> None:
    model, network = base
    config = network.config
    folder = save_adapter(model, tmp_path / "adapter", rank=rank, targets=targets, seed=1, **options)
    stored = load_file(folder / "adapter_model.safetensors")
    adapter = read_adapter(folder, network, pin=False)
    assert adapter.rank == max(rank, *options.get("rank_pattern", {"": 0}).values())
    assert adapter.num_pages == math.ceil(adapter.rank / 16)
    assert adapter.nbytes == adapter.num_pages * rank_page_bytes(config, torch.float32)
    for layer in range(config.num_layers):
        for group, projections in PROJECTION_GROUPS.items():
            for m, projection in enumerate(projections):
                name = f"base_model.model.model.layers.{layer}.{PARENTS[group]}.{projection}"
                actual = delta(adapter, config, layer, group, m)
                if f"{name}.lora_A.weight" in stored:
                    a, b = stored[f"{name}.lora_A.weight"], stored[f"{name}.lora_B.weight"]
                    torch.testing.assert_close(actual, scale(name) * b @ a)
                else:
                    assert adapter.groups[group].scales[layer, :, m].count_nonzero() == 0
                    assert actual.count_nonzero() == 0


def test_adapters_that_look_alike_share_a_plan_and_nothing_else(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path
) -> None:
    """The same names and shapes: what differs is the weights, or the config, or its order of targets."""
    model, network = base
    folders = [
        save_adapter(model, tmp_path / str(seed), rank=4, targets=("q_proj", "down_proj"), seed=seed)
        for seed in (1, 2)
    ]
    louder, turned = tmp_path / "louder", tmp_path / "turned"
    for folder in (louder, turned):
        shutil.copytree(folders[0], folder)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        change = (
            {"lora_alpha": 40} if folder is louder else {"target_modules": config["target_modules"][::-1]}
        )
        path.write_text(json.dumps(config | change))
    first, second, loud, same = (
        read_adapter(folder, network, pin=False).groups["qkv"] for folder in (*folders, louder, turned)
    )
    stored = load_file(folders[1] / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    q = slice(None), 0, 0, slice(4)
    assert torch.equal(second.a[1, 0, 0, :4], stored[name]) and not torch.equal(first.a[q], second.a[q])
    assert torch.equal(loud.a[q], first.a[q]) and torch.equal(loud.scales, 5 * first.scales)
    assert torch.equal(same.a[q], first.a[q]) and torch.equal(same.scales, first.scales)


def test_plans_are_kept_by_what_decides_them(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path
) -> None:
    model, network = base
    folder = save_adapter(model, tmp_path / "adapter", rank=4, targets=("q_proj", "down_proj"), seed=1)
    config, headers = read_config(folder), read_headers(folder)

    def plan(
        config: LoraConfig, dtype: torch.dtype = torch.float32, headers: RawHeaders = headers
    ) -> PackingPlan:
        return packing_plan(config, headers, network.config, dtype)

    ((name, header),) = headers.files
    padded = RawHeader(header.text + b" " * 2**20, header.file_size + 2**20)
    huge = replace(headers, files=((name, padded),))

    assert isinstance(config.target_modules, tuple)
    turned = replace(config, target_modules=config.target_modules[::-1], base_model="another/name")
    assert plan(turned) is plan(config)
    assert plan(config, torch.bfloat16) is not plan(config)
    assert plan(replace(config, use_rslora=True)) is not plan(config)
    assert plan(config, headers=huge) is not plan(config, headers=huge), "megabytes are not kept"
    with pytest.raises(InvalidAdapter, match="trainable_token_indices"):
        plan(replace(config, token_indices={"embed_tokens": (3,)}))


def test_a_config_is_parsed_once_and_never_taken_for_another(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, network = base
    folder = save_adapter(model, tmp_path / "adapter", rank=4, targets=("q_proj",), seed=1)
    parsed: list[bytes] = []

    def parse(raw: bytes) -> LoraConfig:
        parsed.append(raw)
        return parse_config(raw)

    monkeypatch.setattr(adapter_reading, "_kept_config", lru_cache(4)(parse))
    first, again = (read_adapter(folder, network, pin=False) for _ in range(2))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 40}))
    louder = read_adapter(folder, network, pin=False)
    assert len(parsed) == 2
    assert torch.equal(again.groups["qkv"].scales, first.groups["qkv"].scales)
    assert louder.groups["qkv"].scales.max() == 10 > first.groups["qkv"].scales.max()


def test_the_rehearsed_plan_is_that_of_an_adapter_from_peft(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path
) -> None:
    model, network = base
    modules = tuple(network.config.modules)
    folder = save_adapter(model, tmp_path / "adapter", rank=16, targets=modules, seed=1, lora_alpha=8)
    real = packing_plan(read_config(folder), read_headers(folder), network.config, torch.float32)
    made_up = rehearse_packing(network.config, torch.float32)
    assert made_up.layout.linear.keys() == real.layout.linear.keys()
    assert torch.equal(made_up.scales, real.scales)
    assert made_up.copies.shape == real.copies.shape


def test_what_is_copied_in_rehearsal_fills_one_page(base: tuple[PreTrainedModel, LlamaModel]) -> None:
    _, network = base
    pool = RankPagePool(network.config, 2, torch.float32, torch.device("cpu"))
    for lora in (lora for layer in pool.layers for lora in layer):
        lora.a[:] = lora.b[:] = lora.scales[:] = 1.0
    prepare_loads(network, pool.write, host_bytes=0, max_rank=64)
    for lora in (lora for layer in pool.layers for lora in layer):
        for weights in (lora.a, lora.b):
            assert not weights[0].any() and weights[1].all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("rank", "options"),
    [(8, {}), (16, {}), (40, {"rank_pattern": {"k_proj": 3}}), (3, {"rank_pattern": {"o_proj": 20}})],
)
def test_files_laid_out_in_pages_fill_all_rows_that_are_read_and_no_other_page(
    base: tuple[PreTrainedModel, LlamaModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    options: dict[str, Any],
    compiled: bool,
) -> None:
    """Beside what is there already: NaN, which no product may meet."""
    model, network = base
    if not compiled:
        monkeypatch.setattr(native, "compiled", lambda dtype: None)
    targets = ("k_proj", "o_proj", "down_proj")
    folder = save_adapter(model, tmp_path / "adapter", rank=rank, targets=targets, seed=1, **options)
    stored, laid_out = read_as_stored(folder, network), read_adapter(folder, network, pin=False)
    pool = RankPagePool(network.config, 5, torch.float32, torch.device("cpu"))
    pages = (3, 0, 2)[: stored.num_pages]
    for lora in (lora for layer in pool.layers for lora in layer):
        lora.a[:4] = lora.b[:4] = lora.scales[:4] = float("nan")
    pool.write(pages, stored)
    assert (stored.rank, stored.num_pages) == (laid_out.rank, laid_out.num_pages)
    others = sorted({0, 1, 2, 3} - set(pages))
    for i, layer in enumerate(pool.layers):
        for group, lora in layer._asdict().items():
            expected, splits = laid_out.groups[group], network.config.group_splits(group)
            assert (
                lora.a[4].count_nonzero() == lora.b[4].count_nonzero() == lora.scales[4].count_nonzero() == 0
            )
            assert lora.a[others].isnan().all() and lora.b[others].isnan().all()
            for index, page in enumerate(pages):
                assert torch.equal(lora.scales[page], expected.scales[i, index])
                live = min(16, stored.rank - 16 * index)
                for m in lora.scales[page].nonzero().flatten().tolist():
                    columns = slice(splits[m], splits[m + 1])
                    assert torch.equal(lora.a[page, m, :live], expected.a[i, index, m, :live])
                    assert torch.equal(lora.b[page, :live, columns], expected.b[i, index, :live, columns])


def test_a_file_that_has_become_shorter_is_no_adapter(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, network = base
    folder = save_adapter(model, tmp_path / "adapter", rank=4, targets=("o_proj",), seed=1)
    headers = read_headers(folder)
    monkeypatch.setattr(adapter_reading, "read_headers", lambda folder: headers)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(EOFError, match="shorter"):
        read_as_stored(folder, network)


def test_writing_fills_all_that_is_read_of_a_page_and_no_other(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path
) -> None:
    model, network = base
    big = save_adapter(model, tmp_path / "big", rank=32, targets=("q_proj", "down_proj"), seed=1)
    small = save_adapter(model, tmp_path / "small", rank=4, targets=("o_proj",), seed=2)
    pool = RankPagePool(network.config, 4, torch.float32, torch.device("cpu"))
    first = read_adapter(big, network, pin=False)
    second = read_adapter(small, network, pin=False)
    pool.write((3, 1), first)
    pool.write((3,), second)
    own = slice(*network.config.group_splits("qkv")[:2])
    for i, layer in enumerate(pool.layers):
        was, now = first.groups["qkv"], second.groups["o"]
        assert torch.equal(layer.o.a[3, :, :4], now.a[i, 0, :, :4])
        assert torch.equal(layer.o.b[3, :4], now.b[i, 0, :4])
        assert torch.equal(layer.qkv.a[1, 0], was.a[i, 1, 0])
        assert torch.equal(layer.qkv.b[1, :, own], was.b[i, 1, :, own])
        for group, lora in layer._asdict().items():
            assert torch.equal(lora.scales[3], second.groups[group].scales[i, 0])
            assert torch.equal(lora.scales[1], first.groups[group].scales[i, 1])
            for weights in (lora.a, lora.b, lora.scales):
                assert not weights[0].any() and not weights[2].any()


def test_what_an_adapter_lacks_is_not_copied(
    base: tuple[PreTrainedModel, LlamaModel], tmp_path: Path
) -> None:
    """And a page that is another's no more holds what nobody reads."""
    model, network = base
    folder = save_adapter(model, tmp_path / "adapter", rank=4, targets=("q_proj", "o_proj"), seed=1)
    pool = RankPagePool(network.config, 1, torch.float32, torch.device("cpu"))
    for lora in (lora for layer in pool.layers for lora in layer):
        lora.a[:] = lora.b[:] = lora.scales[:] = float("nan")
    pool.write((0,), read_adapter(folder, network, pin=False))
    for layer in pool.layers:
        for lora in (layer.gate_up, layer.down):
            assert lora.a.isnan().all() and lora.b.isnan().all() and not lora.scales.any()
        assert layer.qkv.scales[0, 0] and not layer.qkv.scales[0, 1:].any() and layer.o.scales.all()


@pytest.mark.parametrize("options", [{"rank_pattern": {"o_proj": 3}}, {"use_dora": True}])
def test_memory_that_held_another_is_zero_where_an_adapter_is_read_but_has_nothing(
    base: tuple[PreTrainedModel, LlamaModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """In the rank rows that one projection has and another lacks, and in rows of vectors."""
    model, network = base
    folder = save_adapter(
        model, tmp_path / "adapter", rank=4, targets=("q_proj", "o_proj"), seed=1, **options
    )

    def used(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    monkeypatch.setattr(adapter_weights.huge_pages, "empty", used)
    adapter = read_adapter(folder, network, pin=False)
    for weights in adapter.groups.values():
        assert weights.a.isfinite().all() and weights.b.isfinite().all()
