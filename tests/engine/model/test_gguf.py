"""GGUF files written here from a tiny model: the same logits come back, and damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from engine.model.gguf import GgufFile, parse_gguf_config
from engine.model.loading import ModelNotAvailable, UnsupportedModel, load_model
from tests.engine.model.test_families import LLAMA3_ROPE, YARN, last_logits
from tests.model_zoo import TINY_LLAMA, save_tiny_model

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    ends = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in ends:
        return ends[name]
    parts = name.split(".")
    return f"blk.{parts[2]}.{NAMES[parts[-2]]}.{parts[-1]}"


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    rope_factors: np.ndarray | None = None,
    yarn: dict[str, Any] | None = None,
    fields: dict[str, str] | None = None,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(TINY_LLAMA["num_hidden_layers"])
    writer.add_context_length(TINY_LLAMA["max_position_embeddings"])
    writer.add_embedding_length(TINY_LLAMA["hidden_size"])
    writer.add_feed_forward_length(TINY_LLAMA["intermediate_size"])
    writer.add_head_count(TINY_LLAMA["num_attention_heads"])
    writer.add_head_count_kv(TINY_LLAMA["num_key_value_heads"])
    writer.add_key_length(TINY_LLAMA["head_dim"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, TINY_LLAMA["vocab_size"]))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    if yarn is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn["factor"])
        writer.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(yarn["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(yarn["beta_slow"])
        writer.add_rope_scaling_yarn_ext_factor(yarn.get("ext_factor", 1.0))
    for name, value in (fields or {}).items():
        writer.add_string(name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            values = permuted(values, TINY_LLAMA["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            values = permuted(values, TINY_LLAMA["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(model: Any) -> np.ndarray:
    """What llama.cpp's converter writes: the unscaled frequency over the scaled one."""
    exponents = torch.arange(0, TINY_LLAMA["head_dim"], 2) / TINY_LLAMA["head_dim"]
    return ((10000.0**-exponents) / model.model.rotary_emb.inv_freq).numpy()


@pytest.mark.parametrize("variant", ["tied", "untied", "rope factors", "yarn", "qwen2"])
def test_logits_equal_the_model_that_was_written(variant: str, tmp_path: Path) -> None:
    factors, yarn = None, None
    architecture = "llama"
    if variant == "qwen2":
        architecture = "qwen2"
        expected_model = save_tiny_model(
            tmp_path / "hf", model_class=Qwen2ForCausalLM, config_class=Qwen2Config
        )
    elif variant == "rope factors":
        expected_model = save_tiny_model(tmp_path / "hf", rope_parameters=LLAMA3_ROPE)
        factors = llama3_factors(expected_model)
    elif variant == "yarn":
        yarn = {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}
        expected_model = save_tiny_model(tmp_path / "hf", rope_parameters=yarn)
    else:
        expected_model = save_tiny_model(tmp_path / "hf", tie_word_embeddings=variant == "tied")
    path = tmp_path / "model.gguf"
    write_gguf(path, expected_model, architecture, rope_factors=factors, yarn=yarn)
    model = load_model(str(path), dtype="float32", device="cpu", max_model_len=None)
    prompt = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = expected_model(prompt[None]).logits[0, -1:]
    torch.testing.assert_close(last_logits(model, prompt.tolist(), chunk=64), expected, atol=2e-4, rtol=1e-4)
    assert model.config.eos_token_ids == (2, 5)
    assert model.config.tie_word_embeddings == (variant != "untied")


def test_unknown_architecture_and_rope_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "hf")
    write_gguf(tmp_path / "a.gguf", model, "gemma3")
    with pytest.raises(UnsupportedModel, match="gemma3"):
        parse_gguf_config(GgufFile(tmp_path / "a.gguf"), max_model_len=None)
    write_gguf(tmp_path / "b.gguf", model, "llama", fields={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModel, match="longrope"):
        parse_gguf_config(GgufFile(tmp_path / "b.gguf"), max_model_len=None)


def test_a_yarn_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "hf")
    yarn = {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "ext_factor": 0.5}
    write_gguf(tmp_path / "model.gguf", model, "llama", yarn=yarn)
    with pytest.raises(UnsupportedModel, match=r"yarn_ext_factor of 0\.5"):
        parse_gguf_config(GgufFile(tmp_path / "model.gguf"), max_model_len=None)


def test_a_bias_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "hf", attention_bias=True)
    write_gguf(tmp_path / "model.gguf", model, "llama")
    with pytest.raises(UnsupportedModel, match="bias on q_proj"):
        parse_gguf_config(GgufFile(tmp_path / "model.gguf"), max_model_len=None)


def test_damage_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", save_tiny_model(tmp_path / "hf"), "llama")
    contents = (tmp_path / "whole.gguf").read_bytes()
    for size, named in ((len(contents) - 5000, "cut short"), (600, "header cannot be read"), (30, "header")):
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(contents[:size])
        with pytest.raises(ModelNotAvailable, match=named):
            load_model(str(path), dtype="float32", device="cpu", max_model_len=None)
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + contents[4:])
    with pytest.raises(ModelNotAvailable, match="not a GGUF file"):
        load_model(str(tmp_path / "other.gguf"), dtype="float32", device="cpu", max_model_len=None)
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelNotAvailable, match="not a GGUF file"):
        load_model(str(tmp_path / "empty.gguf"), dtype="float32", device="cpu", max_model_len=None)
