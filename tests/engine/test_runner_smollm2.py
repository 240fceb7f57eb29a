"""The real model: its weights and tokenizer as transformers reads them, its answers as peft gives them."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from engine.model.gguf import GgufFile
from engine.model.loading import LoadedModel, load_model
from engine.scheduler import SchedulerLimits
from tests.adapter_kinds import LINEAR, Kind, differences, save_kind
from tests.engine.engine_driver import Ask, EngineDriver
from tests.model_zoo import save_adapter, smollm2_path
from tests.oracles import PeftOracle, assert_only_ties

TOKENS = 64
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def hf_model() -> PreTrainedModel:
    path = smollm2_path()
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(str(smollm2_path()), dtype="float32", device="cpu", max_model_len=None)


@pytest.fixture(scope="module")
def adapters(hf_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    shapes = {
        "r4": (4, ("q_proj", "v_proj")),
        "r8": (8, ("gate_proj", "up_proj", "down_proj")),
        "r16": (16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        "r64": (64, ("k_proj", "o_proj", "down_proj")),
    }
    return {
        name: save_adapter(hf_model, root / name, rank=rank, targets=targets, seed=rank, lora_alpha=rank)
        for name, (rank, targets) in shapes.items()
    }


def test_weights_are_those_that_transformers_dequantizes(hf_model: PreTrainedModel) -> None:
    file = GgufFile(smollm2_path())
    for name, expected in hf_model.state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(file.get(name), expected), name


def test_token_ids_are_those_of_transformers_but_for_digits(model: LoadedModel) -> None:
    """transformers' reading of the file loses the splitting of digits, so none are compared."""
    path = smollm2_path()
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    actual = Tokenizer.from_str(model.tokenizer_files["tokenizer.json"].decode())
    sources = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    texts = [re.sub(r"\d", "", source.read_text()) for source in sources[:30]]
    texts += ["Grüße aus Köln, ça va? 東京タワー 🗼 don't  they're\t\tI'LL <|im_start|>user\n\n\n x", "", " "]
    for text in texts:
        assert actual.encode(text).ids == expected(text)["input_ids"]


def prompts(model: LoadedModel) -> list[tuple[int, ...]]:
    """Twenty: five texts, each cut or repeated to four lengths, the longest of several chunks."""
    tokenizer = Tokenizer.from_str(model.tokenizer_files["tokenizer.json"].decode())
    made = []
    for i, text in enumerate(TEXTS):
        # Rotated by its number, so that the repeated ones do not all begin at the same word.
        ids = (tokenizer.encode(text + " " + TEXTS[i - 1]).ids * 20)[i:]
        made += [tuple(ids[:length]) for length in (4, 13, 40, 100)]
    return made


@pytest.mark.timeout(1200)
def test_answers_are_pefts_with_adapters_interleaved_cached_chunked_and_preempted(
    model: LoadedModel, hf_model: PreTrainedModel, adapters: dict[str, Path]
) -> None:
    """20 prompts by base and adapters of ranks 4, 8, 16 and 64: 100 requests of 64 tokens each.

    All adapters fit into the pages and run in one batch. The pool holds a part of the sequences, so that
    some are preempted and computed again; the budget is smaller than the longest prompts.
    """
    engine = EngineDriver(
        model,
        adapters,
        num_blocks=160,
        num_rank_pages=7,
        limits=SchedulerLimits(max_num_seqs=40, max_num_batched_tokens=64),
    )
    asks = [Ask(name, prompt, TOKENS) for prompt in prompts(model) for name in (None, *adapters)]
    answers = engine.run(asks)
    engine.close()
    assert engine.scheduler.num_preemptions > 0
    assert engine.num_cached_tokens > 0
    # peft puts its layers into the model that it is given.
    assert_only_ties(PeftOracle(deepcopy(hf_model), adapters).differences(answers))
    base = {answer.prompt: answer.tokens for answer in answers if answer.adapter is None}
    changed = [answer for answer in answers if answer.adapter and answer.tokens != base[answer.prompt]]
    assert len(changed) > 0.75 * 80, "adapters that change nothing would hide a mistake"


@pytest.mark.timeout(1200)
def test_answers_are_pefts_with_all_that_adapters_may_change(
    model: LoadedModel, hf_model: PreTrainedModel, tmp_path: Path
) -> None:
    """DoRA, biases, LoRA on lm_head and added tokens in one batch with the base model."""
    kinds = {
        "dora": Kind(8, (*LINEAR, "lm_head"), options={"use_dora": True, "lora_alpha": 4}),
        "added": Kind(
            4, ("q_proj", "down_proj"), added_tokens=4, options={"lora_bias": True, "lora_alpha": 4}
        ),
    }
    folders = {
        name: save_kind(hf_model, tmp_path / name, kind, seed=i, strength=0.2)
        for i, (name, kind) in enumerate(kinds.items())
    }
    engine = EngineDriver(
        model,
        folders,
        num_blocks=100,
        num_rank_pages=3,
        limits=SchedulerLimits(max_num_seqs=20, max_num_batched_tokens=64),
    )
    added = model.config.vocab_size + 3
    asks = [
        Ask(name, (prompt[0], added, *prompt[2:]) if name == "added" else prompt, 12)
        for prompt in prompts(model)[1::7]
        for name in (None, *kinds)
    ]
    answers = engine.run(asks)
    engine.close()
    assert_only_ties(differences(hf_model, kinds, folders, answers))
    base = {answer.prompt: answer.tokens for answer in answers if answer.adapter is None}
    changed = [a for a in answers if a.adapter and a.tokens != base.get(a.prompt)]
    assert len(changed) > 0.75 * 2 * 3, "adapters that change nothing would hide a mistake"
