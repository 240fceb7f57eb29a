"""Copies of whole blocks, in all layers."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache
from tests.engine.test_memory import CONFIG


def test_copies_reach_every_layer_and_no_other_block() -> None:
    cache = KVCache(CONFIG, 5, torch.float32, torch.device("cpu"))
    cache.data.copy_(torch.randn_like(cache.data))
    before = cache.data.clone()
    cache.copy_blocks(((1, 4), (3, 0)))
    for keys_and_values, old in zip(cache.layers, before, strict=True):
        for tensor, was in zip(keys_and_values, old, strict=True):
            assert torch.equal(tensor[4], was[1])
            assert torch.equal(tensor[0], was[3])
            assert torch.equal(tensor[1:4], was[1:4])
    cache.copy_blocks(())


def test_a_source_that_is_another_pair_s_target_is_read_before() -> None:
    """As where the last holder of a block takes a copy, and the block goes to whoever writes next."""
    cache = KVCache(CONFIG, 4, torch.float32, torch.device("cpu"))
    cache.data.copy_(torch.randn_like(cache.data))
    before = cache.data.clone()
    cache.copy_blocks(((1, 2), (3, 1)))
    assert torch.equal(cache.data[:, :, 2], before[:, :, 1])
    assert torch.equal(cache.data[:, :, 1], before[:, :, 3])
