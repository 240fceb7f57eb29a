"""The keys and values of all blocks, in all layers: one allocation for the life of the process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.model.config import ModelConfig
from engine.transfer import to_device
from kernels.plans import BLOCK_SIZE


class KVCache:
    """Owns the KV tensors.

    ``data`` is [layers, 2 (k, v), blocks, kv_heads, 16, head_dim]; ``layers`` are its (k, v) views, one
    [blocks, kv_heads, 16, head_dim] each. Kernels write through them at a step's slots; nothing else does.
    Memory of a CPU that no block has used yet is not resident.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [(layer[0], layer[1]) for layer in self.data]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, target)``, in all layers.

        All sources are read before a target is written: what one pair has left may be the target of another.
        """
        if not copies:
            return
        sources, targets = to_device(np.array(copies, np.int64).T.copy(), self.data.device)
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))


def kv_block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * BLOCK_SIZE * config.head_dim * dtype.itemsize
