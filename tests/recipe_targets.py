"""The targets that recipes are for, without downloads: configs, empty models, small random copies."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from domino_kit.target import Target, TargetEnds
from domino_kit.target_config import JsonConfig
from domino_kit.target_ends import StoredEnds
from domino_kit.train.recipe import Recipe
from domino_kit.train.setup import feature_layers
from domino_kit.train.target_facts import empty_model
from tests.tiny_chat import PLAIN, THINKING, tiny_tokenizer

WIDTHS = 64
"""Hidden, MLP and expert widths and the number of experts of a small copy are divided by this."""
HEAD_WIDTHS = 32
"""Widths of heads are divided by this; layers, heads, layer types and vocabulary stay as they are."""

DIVIDED = {
    "hidden_size": WIDTHS, "intermediate_size": WIDTHS, "num_experts": WIDTHS,
    "moe_intermediate_size": WIDTHS, "shared_expert_intermediate_size": WIDTHS,
    "head_dim": HEAD_WIDTHS, "linear_key_head_dim": HEAD_WIDTHS,
    "linear_value_head_dim": HEAD_WIDTHS,
}  # fmt: skip


def target_config(expected: dict[str, Any], **fields: Any) -> Any:
    """A transformers config from the facts in a recipe; ``fields`` replace some."""
    facts = {**expected, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 3, **fields}
    kind, theta = facts.pop("model_type"), float(facts.pop("rope_theta"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "llama":
        rope |= {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    if kind.startswith("qwen3_5"):
        pairs = facts["head_dim"] // 8  # a quarter of the head is turned
        rope |= {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return AutoConfig.for_model(kind, rope_parameters=rope, **facts)


def empty_target(recipe: Recipe) -> TargetEnds:
    """A recipe's target in its real size on the meta device, whole or its ends, as bfloat16."""
    expected = recipe.target.expected
    if recipe.target.load == "ends":
        text = JsonConfig(expected)
        layers = feature_layers(recipe.draft, text)
        with torch.device("meta"):
            embedding = torch.nn.Embedding(text.vocab_size, text.hidden_size, dtype=torch.bfloat16)
            head = torch.nn.Linear(
                text.hidden_size, text.vocab_size, bias=False, dtype=torch.bfloat16
            )
        return StoredEnds(embedding, head, text, layers)
    model = empty_model(target_config(expected)).to(torch.bfloat16)
    return Target(model, feature_layers(recipe.draft, model.config.get_text_config()))


def small_config(expected: dict[str, Any]) -> Any:
    """The same with widths divided; two experts a token, and the rows of the vocabulary kept."""
    small = {key: expected[key] // by for key, by in DIVIDED.items() if key in expected}
    if "num_experts" in small:
        small["num_experts_per_tok"] = 2
    return target_config(expected, **small)


def save_small_target(folder: Path, expected: dict[str, Any]) -> Path:
    """A small random copy as a chat model's folder; of Qwen3.5 with a vision part, as published."""
    config = small_config(expected)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if config.model_type.startswith("qwen3_5"):
            vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
            whole = AutoConfig.for_model(
                config.model_type.removesuffix("_text"), text_config=config.to_dict(),
                vision_config={**vision, "out_hidden_size": config.hidden_size},
                tie_word_embeddings=config.tie_word_embeddings,
            )  # fmt: skip
            model = AutoModelForImageTextToText.from_config(whole)
        else:
            model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=3)
    model.save_pretrained(folder)
    tiny_tokenizer(PLAIN if config.model_type == "llama" else THINKING).save_pretrained(folder)
    return folder


def save_small_parts(folder: Path, recipe: Recipe) -> Path:
    """Of a recipe for a target's ends: a config of parts, two random matrices, no other weights."""
    text = {**recipe.target.expected, "rms_norm_eps": 1e-5, "eos_token_id": 3}
    text["hidden_size"] //= WIDTHS
    parts = {"text_config": text, "vision_config": {"hidden_size": 7}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3", **parts}))
    generator = torch.Generator().manual_seed(0)
    names = (recipe.target.embedding_name, recipe.target.head_name)
    shape = (text["vocab_size"], text["hidden_size"])
    weights = {str(name): torch.randn(shape, generator=generator) for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer(THINKING).save_pretrained(folder)
    return folder
