"""Vectors of prompts against transformers and PEFT, in steps where others decode."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from engine.model.loading import LoadedModel, load_model
from engine.model.pooling_config import read_pooling
from engine.pooling import pooled_tokens
from engine.scheduler import SchedulerLimits
from engine.step import Pooling, SamplingParams, StepRow
from tests.engine.engine_driver import Ask, EngineDriver
from tests.model_zoo import save_adapter, save_tiny_model

ADAPTERS = ("a", "b")
LENGTHS = (1, 7, 16, 33, 100)


@dataclass(frozen=True)
class Zoo:
    model: LoadedModel
    peft: PeftModel
    folders: dict[str, Path]

    @torch.inference_mode()
    def expected(self, adapter: str | None, prompt: tuple[int, ...], pooling: Pooling) -> np.ndarray:
        """What transformers' last hidden states, after the final norm, come to."""
        with self._with(adapter):
            ids = torch.tensor([prompt])
            states = self.peft(ids, output_hidden_states=True).hidden_states[-1][0]
        return (states.mean(0) if pooling is Pooling.MEAN else states[-1]).numpy()

    def _with(self, adapter: str | None) -> AbstractContextManager[None]:
        if adapter is None:
            return self.peft.disable_adapter()
        self.peft.set_adapter(adapter)
        return nullcontext()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("pooling")
    base = save_tiny_model(folder / "model", eos_token_id=None)
    folders = {
        name: save_adapter(
            copy.deepcopy(base),
            folder / name,
            rank=8 * (i + 1),
            targets=("q_proj", "v_proj", "down_proj"),
            seed=i,
        )
        for i, name in enumerate(ADAPTERS)
    }
    peft = PeftModel.from_pretrained(base, str(folders["a"]), adapter_name="a")
    peft.load_adapter(str(folders["b"]), adapter_name="b")
    model = load_model(str(folder / "model"), dtype="float32", device="cpu", max_model_len=None)
    return Zoo(model, peft.eval(), folders)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def engine(request: pytest.FixtureRequest, zoo: Zoo) -> Iterator[EngineDriver]:
    """One with so few blocks, and tokens a step, that prompts are cut and sequences are preempted."""
    engine = EngineDriver(
        zoo.model,
        zoo.folders,
        num_blocks=12,
        num_rank_pages=4,
        limits=SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=24),
        overlap=request.param,
    )
    yield engine
    engine.close()


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (length,), generator=generator).tolist())


@pytest.mark.parametrize("pooling", list(Pooling))
def test_vectors_are_those_of_transformers_and_peft(zoo: Zoo, engine: EngineDriver, pooling: Pooling) -> None:
    asks: list[Ask] = []
    for i, length in enumerate(LENGTHS):
        for adapter in (None, *ADAPTERS):
            asks.append(Ask(adapter, prompt_of(length, i), 1, pooling=pooling))
            if i % 2:
                asks.append(Ask(adapter, prompt_of(20, 50 + i), 30))
    decoding = [i for i, ask in enumerate(asks) if ask.pooling is None]
    alone = engine.run([asks[i] for i in decoding])
    for again in range(2):  # the second time, last tokens find their prefix in the cache
        answers = engine.run(asks)
        assert engine.vectors.keys() == set(range(len(asks))) - set(decoding)
        for i, vector in engine.vectors.items():
            expected = zoo.expected(asks[i].adapter, asks[i].prompt, pooling)
            assert vector.dtype == np.float32 and vector.shape == expected.shape
            assert cosine(vector, expected) >= 0.99999, (again, asks[i].adapter, len(asks[i].prompt))
            np.testing.assert_allclose(vector, expected, rtol=2e-3, atol=2e-3)
            assert answers[i].tokens == ()
        assert [answers[i].tokens for i in decoding] == [answer.tokens for answer in alone]
    figures = engine.scheduler.figures()
    assert figures["preemptions"] + figures["seat_yields"] > 0


def test_only_last_tokens_vectors_are_served_from_the_prefix_cache(zoo: Zoo) -> None:
    engine = EngineDriver(
        zoo.model, {}, num_blocks=64, num_rank_pages=1, limits=SchedulerLimits(max_num_seqs=4)
    )
    prompt = prompt_of(100, 9)
    engine.run([Ask(None, prompt, 1)])
    engine.run([Ask(None, prompt, 1, pooling=Pooling.MEAN)])
    assert engine.num_cached_tokens == 0
    engine.run([Ask(None, prompt, 1, pooling=Pooling.LAST)])
    assert engine.num_cached_tokens == 96
    engine.close()


def test_what_is_pooled_of_a_row() -> None:
    def row(pooling: Pooling | None, sampling: SamplingParams | None) -> StepRow:
        return StepRow(0, (1, 2, 3), 0, (0,), sampling=sampling, pooling=pooling)

    assert list(pooled_tokens(row(Pooling.MEAN, None))) == [0, 1, 2]
    assert list(pooled_tokens(row(Pooling.LAST, None))) == []
    assert list(pooled_tokens(row(Pooling.LAST, SamplingParams()))) == [2]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, Pooling.LAST),
        (["no object"], Pooling.LAST),
    ],
)
def test_the_pooling_is_the_models_own(tmp_path: Path, config: Any, expected: Pooling) -> None:
    assert read_pooling(tmp_path) is Pooling.LAST
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_pooling(tmp_path) is expected


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
