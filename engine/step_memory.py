"""What steps take of a GPU beside weights, pages and blocks: measured before the rest is divided."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.memory import StepMemory
from engine.model.adapter_weights import pages_of_rank
from engine.model.loading import LoadedModel
from engine.model.lora_pool import rank_page_bytes
from engine.runner import Runner
from kernels.plans import BLOCK_SIZE


def measure_step_memory(
    model: LoadedModel,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_lora_rank: int,
    has_graphs: bool,
) -> StepMemory:
    """Runs the largest steps over the smallest of caches, and captures some graphs of each kind.

    Has all kernels compiled first. Leaves no memory taken but for them.

    Raises:
        torch.OutOfMemoryError: even so little does not fit.
    """
    device = model.device
    pages = pages_of_rank(max_lora_rank)
    most = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    _compile_kernels(model, max_lora_rank, most, has_graphs)
    runner = _small_runner(model, max_num_batched_tokens, max_lora_rank)
    _settle(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.warm_up(**most)
    activations = torch.cuda.max_memory_reserved(device) - before
    # Beside a step are the logits of the one before, and an adapter on its way.
    activations += max_num_seqs * model.config.vocab_size * model.dtype.itemsize
    activations += pages * rank_page_bytes(model.config, model.dtype)
    graphs = runner.estimate_graphs(**most) if has_graphs else 0
    del runner
    _settle(device)
    return StepMemory(activations, graphs)


def _compile_kernels(
    model: LoadedModel, max_lora_rank: int, most: Mapping[str, int], has_graphs: bool
) -> None:
    """Has the kernels of all steps compiled, unless an earlier start has left them in Triton's cache.

    The steps are those of a single layer: every layer needs the same kernels.
    """
    from kernels.gpu.compile_ahead import collecting, compile_all

    layer = model.network.first_layers(1)
    with collecting() as jobs:
        runner = _small_runner(
            replace(model, config=layer.config, network=layer), most["max_num_batched_tokens"], max_lora_rank
        )
        runner.warm_up(**most)
        if has_graphs:
            runner.rehearse_graphs(**most)
    compile_all(list(jobs))


def _small_runner(model: LoadedModel, max_num_batched_tokens: int, max_lora_rank: int) -> Runner:
    """Over the smallest of caches that holds the largest step."""
    return Runner(
        model,
        num_blocks=-(-min(max_num_batched_tokens, model.config.max_model_len) // BLOCK_SIZE),
        num_rank_pages=pages_of_rank(max_lora_rank),
        max_lora_rank=max_lora_rank,
    )


def _settle(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
