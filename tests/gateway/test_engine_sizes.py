"""Engines of one model, but of two sizes: what only the larger can run goes there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.engine_sizes import info_for_all, is_large_enough
from protos import engine_pb2 as pb
from tests.gateway.fake_engine import MODEL, FakeEngine
from tests.gateway.local_stack import LocalStack, wait_until


@pytest.fixture
def small_and_large(valkey_url: str, tmp_path: Path) -> Iterator[LocalStack]:
    small = FakeEngine("small", valkey_url, max_model_len=256, max_num_seqs=4, num_blocks=32)
    stack = LocalStack(valkey_url, tmp_path / "store", [FakeEngine("large", valkey_url), small])
    stack.start()
    try:
        wait_until(lambda: httpx.get(f"{stack.url}/ready").json()["engines"] == 2, "both engines are linked")
        yield stack
    finally:
        stack.stop()


def test_what_only_one_engine_can_run_goes_there(small_and_large: LocalStack) -> None:
    large, small = small_and_large.engines
    headers = {"Authorization": f"Bearer {small_and_large.add_tenant('acme')}"}
    beams = {"use_beam_search": True, "max_tokens": 150, "ignore_eos": True}
    with httpx.Client(base_url=f"{small_and_large.url}/v1", headers=headers, timeout=60) as client:

        def ask(prompt: list[int], **fields: Any) -> httpx.Response:
            return client.post("/completions", json={"model": MODEL, "prompt": prompt, **fields})

        for number in range(8):  # each prompt has an engine of its own that it would go to
            prompt = [number] * 20
            assert ask(prompt, n=4, **beams).status_code == 200, "44 blocks"
            assert ask(prompt, n=5, max_tokens=4).status_code == 200
            assert ask(prompt, max_tokens=240).status_code == 200
        assert len(large.submits) == 24 and not small.submits

        for number in range(16):
            assert ask([number] * 20, n=2, **beams).status_code == 200, "22 blocks"
        assert small.submits and len(large.submits) > 24

        refused = ask([1] * 20, n=5, **{**beams, "max_tokens": 2040})
        assert refused.status_code == 400 and "2048 tokens" in refused.json()["error"]["message"]


def test_an_engine_is_large_enough_for_what_just_fits() -> None:
    info = pb.ModelInfo(max_model_len=64, max_num_seqs=2, num_blocks=6, block_size=16)
    beams = pb.Beams()

    def fits(prompt: int, choices: int, max_tokens: int, **more: Any) -> bool:
        submit = pb.Submit(prompt_tokens=[1] * prompt, seeds=[0] * choices, max_tokens=max_tokens, **more)
        return is_large_enough(info, submit)

    assert fits(60, 2, 4) and not fits(60, 2, 5) and not fits(60, 3, 4)
    assert fits(63, 1, 0, prompt_only=True) and not fits(64, 1, 0, prompt_only=True)
    assert fits(16, 1, 48, beams=beams) and fits(31, 2, 17, beams=beams), "one shared block, and two each"
    assert fits(32, 2, 32, beams=beams) and not fits(15, 2, 49, beams=beams), "none shared, and four each"


def test_uploads_must_fit_into_every_engine() -> None:
    roomy = pb.ModelInfo(max_model_len=2048, num_blocks=10, max_lora_rank=64, num_rank_pages=4, name="m")
    other = pb.ModelInfo(max_model_len=1024, num_blocks=99, max_lora_rank=16, num_rank_pages=9, name="m")
    info = info_for_all([other, roomy])
    assert (info.max_model_len, info.num_blocks, info.max_lora_rank, info.num_rank_pages) == (2048, 10, 16, 4)
    assert roomy.max_lora_rank == 64, "what an engine says is left as it is"
