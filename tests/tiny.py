"""Tiny random targets and drafts for tests: float32, on the CPU, with answers that vary."""

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from domino_kit.config import DraftConfig
from domino_kit.manifest import Manifest, TargetIdentity
from domino_kit.modeling import DominoDraft, init_weights
from domino_kit.target import Target

FAMILIES = ("qwen3", "llama", "qwen2", "qwen3_moe")
MASK = 1
"""A row of the tiny embedding that stands for "not drafted yet"."""


def tiny_model(
    family: str = "qwen3", *, seed: int = 0, vocab: int = 32, layers: int = 4, **fields: Any
) -> Any:
    """A random causal language model without end tokens; ``fields`` go to its config."""
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }
    if family in ("qwen3", "qwen3_moe", "llama"):
        values["head_dim"] = 8
    if family == "qwen3_moe":
        values.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config_class(**{**values, **fields})).eval()


def tiny_target(
    family: str = "qwen3",
    *,
    layer_ids: tuple[int, ...] = (0, 2),
    allow_last_layer: bool = False,
    **fields: Any,
) -> Target:
    """A frozen random target; ``fields`` as in :func:`tiny_model`."""
    return Target(tiny_model(family, **fields), list(layer_ids), allow_last_layer)


def tiny_config(
    shift_label: bool = True, *, projector: str = "domino", **fields: Any
) -> DraftConfig:
    """The config of a draft that fits :func:`tiny_target`."""
    head = {"gru_hidden_dim": 12, "emb_dim": 10} if projector == "domino" else {}
    values: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=32,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        block_size=4,
        num_target_layers=4,
        target_layer_ids=(0, 2),
        mask_token_id=MASK,
        projector_type=projector,
        shift_label=shift_label,
        **head,
    )
    return DraftConfig(**{**values, **fields})


def tiny_draft(
    shift_label: bool = True, *, projector: str = "domino", seed: int = 0, **fields: Any
) -> DominoDraft:
    """A random draft with weights large enough that context, block and head all matter."""
    model = DominoDraft(tiny_config(shift_label, projector=projector, **fields))
    generator = torch.Generator().manual_seed(seed)
    init_weights(model, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif not name.startswith("prefix_gru."):
                parameter.normal_(0.0, 0.2, generator=generator)
            if name == "embed_proj.2.weight":
                parameter.normal_(0.0, 2.0, generator=generator)
    return model.eval()


def manifest_for(name: str) -> Manifest:
    """A manifest that matters only for the target it names."""
    target = TargetIdentity(
        name=name, config_hash="", embedding_hash="", head_hash="", tokenizer_hash="",
        chat_template_hash=None, thinking=None,
    )  # fmt: skip
    return Manifest(
        toolkit_version="0", libraries={}, command=[], git_commit=None, seed=0, recipe={},
        target=target, mask_token_id=1, mask_token_source="", target_layer_ids=[0, 2],
        last_layer_norm=None, rope={"rope_theta": 10000.0}, shift_label=True, block_size=4,
        num_proposals=3,
        weights_dtype="float32", data={}, training={}, measured={},
    )  # fmt: skip


def rollout_case(
    shift_label: bool, block: int, batch: int
) -> tuple[DominoDraft, Target, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Draft, target, hidden rows and anchors, and the same as arguments of SGLang's rollout."""
    target = tiny_target(vocab=64)
    model = tiny_draft(shift_label, block_size=block, vocab_size=64)
    generator = torch.Generator().manual_seed(block)
    hidden = torch.randn(batch, block, 32, generator=generator)
    anchors = torch.randint(64, (batch,), generator=generator)
    arguments = {
        "draft_hidden": hidden,
        "bonus_tokens": anchors,
        "target_embedding": target.embedding,
        "lm_head_weight": target.head.weight,
        "prefix_gru": model.prefix_gru,
        "embed_proj": model.embed_proj,
        "vocab_size": 64,
        "shift_label": shift_label,
    }
    return model, target, hidden, anchors, arguments


def random_prompts(
    count: int, *, shortest: int = 2, longest: int = 12, vocab: int = 32, seed: int = 0
) -> list[list[int]]:
    """Prompts of different lengths, without the mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(MASK + 1, vocab, (length,), generator=generator).tolist()
        for length in lengths
    ]


def plain_greedy(
    model: Any, prompt: list[int], max_new_tokens: int, end_tokens: tuple[int, ...] = ()
) -> list[int]:
    """The answer of transformers' own ``generate``, end token included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(end_tokens) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
