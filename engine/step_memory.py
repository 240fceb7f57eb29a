"""What steps take of a GPU beside weights, pages and blocks: measured before the rest is divided."""

from __future__ import annotations

import gc

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

    Compiles most kernels on the way, so that the time is not lost. Leaves no memory taken but for the
    kernels themselves.

    Raises:
        torch.OutOfMemoryError: even so little does not fit.
    """
    device = model.device
    pages = pages_of_rank(max_lora_rank)
    runner = Runner(
        model,
        num_blocks=-(-min(max_num_batched_tokens, model.config.max_model_len) // BLOCK_SIZE),
        num_rank_pages=pages,
        max_lora_rank=max_lora_rank,
    )
    _settle(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.warm_up(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    activations = torch.cuda.max_memory_reserved(device) - before
    # Beside a step are the logits of the one before, and an adapter on its way.
    activations += max_num_seqs * model.config.vocab_size * model.dtype.itemsize
    activations += pages * rank_page_bytes(model.config, model.dtype)
    graphs = 0
    if has_graphs:
        graphs = runner.estimate_graphs(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
    del runner
    _settle(device)
    return StepMemory(activations, graphs)


def _settle(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
