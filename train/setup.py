"""From a recipe to the objects of a run: target, data, draft, and what the manifest will say."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from domino_kit.chat_template import check_template_tokens
from domino_kit.checkpoint import resolve_folder
from domino_kit.config import DraftConfig
from domino_kit.contract import PROMPT_FACTS, check_allowed
from domino_kit.conversations import read_rows
from domino_kit.manifest import TargetIdentity, target_identity
from domino_kit.mask_token import resolve_mask_token
from domino_kit.modeling import DominoDraft
from domino_kit.target import (
    Target,
    TargetEnds,
    check_layer_ids,
    choose_device,
    choose_dtype,
    default_layer_ids,
    end_token_ids,
    load_target_model,
    load_tokenizer,
)
from domino_kit.target_config import read_end_tokens, read_target_config
from domino_kit.target_contract import (
    TargetFiles,
    check_loaded,
    compare_files,
    describe_prompts,
    target_files,
)
from domino_kit.target_ends import read_ends
from domino_kit.train.dataset import Sample, build_samples
from domino_kit.train.initialise import initialise
from domino_kit.train.recipe import DraftSection, Recipe


@dataclass(frozen=True)
class Run:
    """Everything that training needs, ready. ``target`` may be its ends only."""

    recipe: Recipe
    target: TargetEnds
    identity: TargetIdentity
    model: DominoDraft
    mask_token_source: str
    samples: list[Sample]
    validation: list[Sample]
    dropped: Counter[str]
    total_steps: int
    tokenizer: Any
    end_tokens: list[int]
    system_prompts: list[dict[str, Any]]
    allowed: tuple[str, ...] = ()

    @property
    def whole_target(self) -> Target | None:
        """The target that can be run, or ``None`` where only its ends are in process."""
        return self.target if isinstance(self.target, Target) else None

    @property
    def supervised_tokens(self) -> int:
        """Supervised tokens of all kept rows."""
        return sum(sum(sample.loss_mask) for sample in self.samples)

    @cached_property
    def data_hash(self) -> str:
        """SHA-256 over tokens and masks of all samples, in order."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(json.dumps([sample.input_ids, sample.loss_mask]).encode())
        return digest.hexdigest()


def build_run(recipe: Recipe, allow: Sequence[str] = ()) -> Run:
    """Load and check everything, cheapest first.

    ``allow`` names facts in which a draft to start from may differ. Raises ``ValueError`` in one
    sentence for whatever in the recipe, data or target is wrong.
    """
    device = choose_device(recipe.target.device)
    rows = read_rows(recipe.data.train, recipe.data.split, recipe.data.max_rows)
    held_out = []
    if recipe.data.validation is not None:
        held_out = read_rows(
            recipe.data.validation, recipe.data.split, recipe.output.validation_rows
        )
    tokenizer = load_tokenizer(recipe.target.name, recipe.target.trust_remote_code)
    target, target_config, end_tokens = open_target(recipe, tokenizer, device)
    config, source = build_config(recipe, target, tokenizer, end_tokens)
    check_template_tokens(tokenizer, rows[0], recipe.target.thinking)
    options: dict[str, Any] = {
        "thinking": recipe.target.thinking,
        "end_tokens": end_tokens,
        "max_length": recipe.data.max_length,
        "min_supervised": recipe.data.min_supervised,
    }
    samples, dropped = build_samples(rows, tokenizer, **options)
    validation = build_samples(held_out, tokenizer, **options)[0] if held_out else []
    identity = target_identity(recipe.target.name, target, tokenizer, recipe.target.thinking)
    allowed: tuple[str, ...] = ()
    if recipe.draft.init_from is not None:
        files = target_files(recipe.target.name, target_config, tokenizer)
        allowed = check_start(recipe.draft.init_from, files, identity, allow)
    model = DominoDraft(config)
    whole = target if isinstance(target, Target) else None
    initialise(model, whole, recipe.train.seed, recipe.draft.init, recipe.draft.init_from)
    return Run(
        recipe, target, identity, model.to(device), source, samples, validation, dropped,
        total_steps(recipe, len(samples)), tokenizer, end_tokens,
        describe_prompts(rows, tokenizer, recipe.target.thinking), allowed,
    )  # fmt: skip


def check_start(
    source: Path, files: TargetFiles, identity: TargetIdentity, allow: Sequence[str]
) -> tuple[str, ...]:
    """Compare the draft to start from with this run's target; returns what was allowed.

    Raises ``ValueError`` if it was trained for another target, except for the facts ``allow``.
    """
    contract, _, manifest = compare_files(resolve_folder(source), files)
    if manifest is not None:
        here = {"embedding": identity.embedding_hash, "head": identity.head_hash}
        check_loaded(contract, manifest.target, identity.name, here)
    contract.only_warn(PROMPT_FACTS)  # other prompts are a reason to go on training
    contract.allow(check_allowed(allow))
    try:
        contract.stop()
    except ValueError as error:
        raise ValueError(f"draft.init_from {source}: {error}") from None
    return tuple(contract.allowed)


def total_steps(recipe: Recipe, num_samples: int) -> int:
    """Optimizer steps of the whole run, the horizon of learning rate and λ."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    assert recipe.train.epochs is not None
    a_step = recipe.train.batch_size * recipe.train.accumulation
    return max(1, round(recipe.train.epochs * num_samples / a_step))


def open_target(recipe: Recipe, tokenizer: Any, device: str) -> tuple[TargetEnds, Any, list[int]]:
    """The target, whole or its ends as the recipe wants it, its config and its end tokens."""
    wanted = recipe.target
    dtype = choose_dtype(wanted.dtype, device)
    if wanted.load == "ends":
        config = read_target_config(wanted.name, wanted.trust_remote_code)
        ends = read_ends(
            wanted.name, config, feature_layers(recipe.draft, config.get_text_config()), dtype,
            device, embedding_name=wanted.embedding_name, head_name=wanted.head_name,
        )  # fmt: skip
        return ends, config, read_end_tokens(wanted.name, config, tokenizer)
    model = load_target_model(wanted.name, dtype, device, wanted.trust_remote_code)
    layers = feature_layers(recipe.draft, model.config.get_text_config())
    whole = Target(model, layers, recipe.draft.allow_last_layer)
    return whole, model.config, end_token_ids(model, tokenizer)


def num_layers(text: Any) -> int:
    """Layers of a target; ``ValueError`` if its text config does not say how many."""
    found = getattr(text, "num_hidden_layers", None)
    if found is None:
        raise ValueError(
            f"the target's config (model type {text.model_type!r}) has no num_hidden_layers, so its "
            "layers cannot be numbered; add the field to its config.json."
        )
    return int(found)


def feature_layers(draft: DraftSection, text: Any) -> list[int]:
    """The target layers to read, by name or evenly spread; ``ValueError`` if there are none such."""
    depth, layer_ids = num_layers(text), draft.target_layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(depth, draft.num_features or draft.num_layers)
    return check_layer_ids(layer_ids, depth, draft.allow_last_layer)


def build_config(
    recipe: Recipe, target: TargetEnds, tokenizer: Any, end_tokens: list[int]
) -> tuple[DraftConfig, str]:
    """The draft's config, as the recipe or else the target has it, and the source of its mask id.

    Raises ``ValueError`` naming the option for a value that neither has.
    """
    draft, text = recipe.draft, target.text_config
    mask_id, source = resolve_mask_token(
        draft.mask_token_id, tokenizer, text.model_type, target.vocab_size, end_tokens
    )
    has_head = draft.projector == "domino"
    config = DraftConfig(
        **_sizes(draft, text),
        hidden_size=target.hidden_size,
        num_hidden_layers=draft.num_layers,
        vocab_size=target.vocab_size,
        rms_norm_eps=float(_taken(draft, text, "rms_norm_eps")),
        rope_theta=float(_taken(draft, text, "rope_theta", rope_theta(text))),
        max_position_embeddings=int(_taken(draft, text, "max_position_embeddings")),
        block_size=draft.block_size,
        num_target_layers=num_layers(text),
        target_layer_ids=tuple(target.layer_ids),
        mask_token_id=mask_id,
        projector_type=draft.projector,
        shift_label=recipe.shift_label,
        gru_hidden_dim=draft.gru_hidden_dim if has_head else None,
        emb_dim=draft.emb_dim if has_head else None,
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=getattr(text, "eos_token_id", None),
    )
    return config, source


def _taken(draft: DraftSection, text: Any, field: str, found: Any = None) -> Any:
    """A value of the recipe, or ``found`` or else the field of the target's text config."""
    given = getattr(draft, field)
    if given is None:
        given = getattr(text, field, None) if found is None else found
    if given is None:
        raise ValueError(
            f"the target's config (model type {text.model_type!r}) has no {field}, which a draft "
            f"takes from it; set draft.{field}."
        )
    return given


def _sizes(draft: DraftSection, text: Any) -> dict[str, int]:
    own_head_dim = getattr(text, "head_dim", None)
    if own_head_dim is None and getattr(text, "num_attention_heads", None):
        own_head_dim = text.hidden_size // text.num_attention_heads
    fields = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {field: int(_taken(draft, text, field)) for field in fields}
    return {**sizes, "head_dim": int(_taken(draft, text, "head_dim", own_head_dim))}


def rope_theta(text: Any) -> float | None:
    """The target's RoPE base, from either of transformers' spellings; nothing else is copied."""
    parameters = getattr(text, "rope_parameters", None) or {}
    found = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    if found is None:
        nested = [
            v["rope_theta"]
            for v in parameters.values()
            if isinstance(v, dict) and "rope_theta" in v
        ]
        found = nested[0] if nested else None
    return found
