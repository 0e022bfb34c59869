"""A draft's config.json as other tools write it, by hand, for the shape of ``tiny_draft(True)``."""

from collections.abc import Callable
from typing import Any

LAYERS: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "attention_bias": False, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
HEAD = {
    "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1,
    "gru_hidden_dim": 12, "emb_dim": 10,
}  # fmt: skip
BLOCK = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SPECFORGE: dict[str, Any] = {
    **LAYERS, "architectures": ["DominoDraftModel"], "auto_map": {"AutoModel": "domino.X"},
    "block_size": 4, "num_target_layers": 4, "rope_theta": 10000, "rope_scaling": None,
    "emb_dim": 10, "dflash_config": {**BLOCK, **HEAD}, "use_cache": True,
}  # fmt: skip
VERL_SPECO: dict[str, Any] = {
    **LAYERS, **BLOCK, **HEAD, "model_type": "domino", "architectures": ["DominoDraftModel"],
    "block_size": 4, "num_target_layers": 4, "target_num_hidden_layers": 4, "rope_theta": 10000.0,
    "num_context_layers": 2, "target_hidden_size": 32, "num_anchors": 512, "loss_decay_gamma": 7.0,
    "lambda_base_start": 1.0, "lambda_base_decay_steps": 2000,
}  # fmt: skip
AUTOMODEL: dict[str, Any] = {
    **LAYERS, **ROPE, "architectures": ["Qwen3DFlashDraftModel"], "block_size": 4,
    "num_target_layers": 4, "is_causal": False, "max_window_layers": 2, "pad_token_id": 0,
    "dflash_config": {"block_size": 4, **BLOCK, **HEAD},
}  # fmt: skip
MODEL_OPTIMIZER: dict[str, Any] = {
    **LAYERS, "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 4,
    "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "bfloat16", "emb_dim": 10,
    "initializer_range": 0.02, "dflash_config": {**BLOCK, **HEAD},
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DominoDraftModel"], "speculators_model_type": "domino",
    "speculators_version": "0.4", "block_size": 4, "draft_vocab_size": 32, "mask_token_id": 1,
    "aux_hidden_state_layer_ids": [1, 3], "sample_from_anchor": True, "gru_hidden_dim": 12,
    "logits_correction_emb_dim": 10, "pure_draft_prefix_len": 1, "lambda_base_start": 1.0,
    "lambda_base_decay_ratio": 0.5, "sliding_window_non_causal": False, "target_hidden_size": None,
    "tie_word_embeddings": False, "dtype": "bfloat16",
    "speculators_config": {
        "algorithm": "domino", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {**LAYERS, **ROPE, "tie_word_embeddings": True},
}  # fmt: skip
SPECULATORS_FLAT: dict[str, Any] = {
    **SPECULATORS, **HEAD, "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"],
}  # fmt: skip
del SPECULATORS_FLAT["sample_from_anchor"], SPECULATORS_FLAT["logits_correction_emb_dim"]


def head(prefix: str) -> Callable[[str], str]:
    """Renames the tensors of the head only."""
    return lambda name: prefix + name if name.startswith(("prefix_gru", "embed_proj")) else name


ALIASES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
SOURCES: dict[str, tuple[dict[str, Any], Callable[[str], str], str]] = {
    "specforge": (SPECFORGE, lambda name: name, "specforge"),
    "implied head": (
        {**SPECFORGE, "dflash_config": {**BLOCK, **HEAD, "projector_type": None}},
        lambda name: name,
        "specforge",
    ),
    "early specforge": (SPECFORGE, lambda n: f"draft_model.{head('logit_head.')(n)}", "specforge"),
    "verl-speco": (VERL_SPECO, lambda name: name, "verl-speco"),
    "automodel": (AUTOMODEL, lambda name: f"model.{name}", "automodel"),
    "model-optimizer": (MODEL_OPTIMIZER, lambda name: f"dflash_module.{name}", "dflash"),
    "encoder": (MODEL_OPTIMIZER, lambda name: ALIASES.get(name, name), "dflash"),
    "speculators": (SPECULATORS, head("logits_correction."), "speculators"),
    "speculators, flat": (SPECULATORS_FLAT, lambda name: name, "speculators"),
}
