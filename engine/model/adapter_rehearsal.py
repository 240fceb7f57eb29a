"""A made-up adapter, laid out before any real one comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from adapters.base_model import ROOTS, BaseModelShape
from adapters.peft_config import parse_config
from adapters.safetensors_header import RawHeader
from adapters.weight_files import RawHeaders
from engine.model.adapter_packing import PackingPlan, packing_plan
from engine.model.adapter_reading import reserve_host_memory
from engine.model.adapter_weights import HostAdapter, HostBlock
from engine.model.config import ModelConfig
from engine.model.llama import LlamaModel
from kernels.packing import prepare as prepare_packing

_RANK = 16
_ITEM_BYTES = 2

WriteAdapter = Callable[[Sequence[int], HostAdapter], object]
"""``Runner.write_adapter``."""


def prepare_loads(network: LlamaModel, write: WriteAdapter, *, host_bytes: int, max_rank: int) -> None:
    """Does all that the first adapters of a GPU's engine would wait for, and the steps beside them.

    Page 0, which nobody may have yet, is overwritten, as part of the rehearsal.

    Args:
        host_bytes: of memory to page-lock, for an adapter of ``max_rank`` and smaller ones.
    """
    prepare_packing(network.dtype)
    rehearse_packing(network.config, network.dtype)
    reserve_host_memory(network, nbytes=host_bytes, max_rank=max_rank)
    # The first copy takes device memory for its stream, and loads the device's code for it.
    block = HostBlock.empty(1, network.config, network.dtype, pin=network.device.type == "cuda")
    block.scales.fill_(1)  # what is under a scale of 0 is not copied
    write((0,), HostAdapter(_RANK, 1, block.nbytes, block.groups))


def rehearse_packing(model: ModelConfig, dtype: torch.dtype) -> PackingPlan:
    """Works out the plan of an adapter on all linear layers, as PEFT would write it. Nothing is read.

    The first plan of a process takes far longer than the next, in Python with which the engine's loop takes
    turns: beside 128 decodes on a GPU, two steps and more between two tokens.
    """
    config = parse_config(
        json.dumps({"peft_type": "LORA", "r": _RANK, "target_modules": "all-linear"}).encode()
    )
    shape = BaseModelShape(model.num_layers, model.modules, _RANK)
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for path, (_, module) in shape.paths(ROOTS[0]).items():
        width_in, width_out = model.modules[module]
        for matrix, rows, columns in (("lora_A", _RANK, width_in), ("lora_B", width_out, _RANK)):
            begin, end = end, end + rows * columns * _ITEM_BYTES
            entries[f"base_model.model.{path}.{matrix}.weight"] = {
                "dtype": "BF16",
                "shape": [rows, columns],
                "data_offsets": [begin, end],
            }
    text = json.dumps(entries).encode()
    header = RawHeader(text, 8 + len(text) + end)
    return packing_plan(config, RawHeaders((("adapter_model.safetensors", header),), None), model, dtype)
