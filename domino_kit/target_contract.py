"""The contract over a target's files and the way prompts are written for it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_kit.chat_template import render
from domino_kit.config import DraftConfig
from domino_kit.contract import Contract
from domino_kit.conversations import Row
from domino_kit.draft_contract import check_draft
from domino_kit.fingerprint import json_hash, model_folder, target_fingerprints, tensor_slices
from domino_kit.manifest import (
    Manifest,
    TargetIdentity,
    config_facts,
    template_hash,
)
from domino_kit.target import load_tokenizer
from domino_kit.target_config import read_end_tokens, read_target_config

RECORDED_PROMPTS = 5
"""The most common system prompts of the training rows are kept in the manifest."""

MARK = "‹user›"
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_target_layers": "num_hidden_layers",
}
"""Fields of a draft's config, and the target's that they must equal."""


@dataclass(frozen=True)
class TargetFiles:
    """What is known of a target without loading its weights.

    ``text_config`` is an object as :mod:`~domino_kit.target_config` reads it; ``tokenizer`` is
    ``None`` (and ``no_tokenizer`` says why) if it cannot be read.
    """

    name: str
    folder: Path | None
    text_config: Any
    tied: bool
    tokenizer: Any
    no_tokenizer: str
    end_tokens: list[int]


def read_target_files(name: str, trust_remote_code: bool) -> TargetFiles:
    """Config and tokenizer of a target; raises ``ValueError`` in one sentence without a config."""
    config = read_target_config(name, trust_remote_code)
    return target_files(name, config, *read_tokenizer(name, trust_remote_code))


def read_tokenizer(name: str, trust_remote_code: bool) -> tuple[Any, str]:
    """A target's tokenizer, or ``None`` and why it cannot be read."""
    try:
        return load_tokenizer(name, trust_remote_code), ""
    except ValueError as error:
        return None, str(error)


def target_files(name: str, config: Any, tokenizer: Any, no_tokenizer: str = "") -> TargetFiles:
    """The same from a config and a tokenizer that are loaded already."""
    ends = [] if tokenizer is None else read_end_tokens(name, config, tokenizer)
    text = config.get_text_config()
    tied = bool(getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))
    return TargetFiles(name, model_folder(name), text, tied, tokenizer, no_tokenizer, ends)


def compare_files(
    draft: Path, target: TargetFiles
) -> tuple[Contract, DraftConfig | None, Manifest | None]:
    """The whole static contract of a draft and a target: no weights are loaded."""
    contract, config, manifest = check_draft(draft)
    if config is not None:
        check_target(contract, config, manifest, target)
    return contract, config, manifest


def check_target(
    contract: Contract, config: DraftConfig, manifest: Manifest | None, target: TargetFiles
) -> None:
    """Compare a target's files with what a draft was trained for.

    Config, a few rows of each tensor, tokenizer and chat template; nothing is raised for a
    difference.
    """
    _check_files(contract, manifest, target)
    _check_config(contract, config, manifest, target)
    _check_mask(contract, config, target)
    _check_last_layer(contract, config, manifest)
    longest = getattr(target.text_config, "max_position_embeddings", None)
    if longest is not None and longest > config.max_position_embeddings:
        contract.error(
            "context_length",
            f"target {target.name!r} reaches {longest} positions, but the draft ends at "
            f"{config.max_position_embeddings} (max_position_embeddings): beyond, it was never "
            f"trained. Serve with -- --context-length {config.max_position_embeddings}.",
        )
    contract.looked_at("context_length")
    _check_tokenizer(contract, manifest, target)


def _check_config(
    contract: Contract, config: DraftConfig, manifest: Manifest | None, target: TargetFiles
) -> None:
    contract.looked_at("target_config")
    for ours, theirs in SIZES.items():
        found, wanted = getattr(target.text_config, theirs, None), getattr(config, ours)
        if found != wanted:
            contract.error(
                "target_config",
                f"target {target.name!r} has {theirs} {found}, but the draft was made for "
                f"{wanted}; give the draft's own target with --target.",
            )
            return
    if manifest is None or not manifest.target.config:
        contract.could_not("target_config", "only sizes: the target's config was not recorded")
        return
    trained = json.loads(json.dumps(manifest.target.config))
    found = json.loads(json.dumps(config_facts(target.text_config), default=str))
    different = [key for key in trained if key in found and trained[key] != found[key]]
    if different:
        shown = "; ".join(f"{key} is {found[key]}, was {trained[key]}" for key in different[:3])
        contract.error(
            "target_config",
            f"target {target.name!r} computes something else than in training ({shown}), so its "
            "features differ. Use the config it was trained with.",
        )


def _check_files(contract: Contract, manifest: Manifest | None, target: TargetFiles) -> None:
    """A few rows of every tensor of the target."""
    names = _stored_names(contract, target)
    if names is None or target.folder is None:
        return
    contract.looked_at("head")
    if not target.tied and not any(name.endswith("lm_head.weight") for name in names):
        contract.error(
            "head",
            f"target {target.name!r} says tie_word_embeddings false, but its files hold no "
            "lm_head.weight: its output head would be random. Set tie_word_embeddings to true, or "
            "add the tensor.",
        )
    if manifest is None or not manifest.target.weights:
        contract.could_not("target_weights", "no fingerprints were recorded in training")
        return
    found, trained = target_fingerprints(target.folder), manifest.target.weights
    if found.keys() != trained.keys():
        contract.could_not("target_weights", "the files store tensors under other names now")
        return
    contract.looked_at("target_weights")
    different = [group for group in trained if found[group] != trained[group]]
    if different:
        contract.error(
            "target_weights",
            f"the weights of target {target.name!r} are not those in training: "
            f"{len(different)} of {len(trained)} parts differ ({', '.join(different[:3])}"
            f"{' …' if len(different) > 3 else ''}). It was fine-tuned, merged or replaced "
            "afterwards; use the target that the draft was trained for, or train a draft for this.",
        )


def _stored_names(contract: Contract, target: TargetFiles) -> set[str] | None:
    """Names of the target's tensors, or ``None``, and a note, where they cannot be read."""
    if target.folder is None:
        contract.could_not("target_weights", f"{target.name!r} is not on this machine yet")
        return None
    try:
        return {name for name, _ in tensor_slices(target.folder)}
    except ValueError:
        contract.could_not("target_weights", f"{target.folder} has no readable safetensors files")
        return None


def _check_mask(contract: Contract, config: DraftConfig, target: TargetFiles) -> None:
    if target.tokenizer is None:
        contract.could_not("mask_special", target.no_tokenizer)
        return
    contract.looked_at("mask_special")
    mask, tokenizer = config.mask_token_id, target.tokenizer
    kind = None
    if mask in target.end_tokens or mask == tokenizer.eos_token_id:
        kind = "an end token"
    elif mask == tokenizer.pad_token_id:
        kind = "the padding token"
    if kind is not None:
        contract.error(
            "mask_special",
            f"mask_token_id {mask} is {kind} of target {target.name!r}: tools fall back to it where "
            "none is set, and its embedding means something else. Train with a spare token.",
        )
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own != mask:
        contract.error(
            "mask_special",
            f"mask_token_id is {mask}, but the tokenizer of {target.name!r} has a mask token with "
            f"id {own}, which SGLang would take instead. Set mask_token_id to {own} and retrain.",
        )


def _check_last_layer(contract: Contract, config: DraftConfig, manifest: Manifest | None) -> None:
    contract.looked_at("last_layer")
    last = config.num_target_layers - 1
    if last not in config.target_layer_ids or (manifest and manifest.last_layer_norm):
        return
    contract.warning(
        "last_layer",
        f"the draft reads the last layer {last}, whose output tools take before or after the final "
        "norm, and nothing says which one was trained; SGLang takes it before.",
    )


def _check_tokenizer(contract: Contract, manifest: Manifest | None, target: TargetFiles) -> None:
    if manifest is None or target.tokenizer is None:
        why = target.no_tokenizer if manifest else "without a manifest nothing says what it was"
        for name in ("tokenizer", "chat_template"):
            contract.could_not(name, why)
        return
    contract.looked_at("tokenizer", "chat_template")
    trained = manifest.target
    if json_hash(target.tokenizer.get_vocab()) != trained.tokenizer_hash:
        contract.error(
            "tokenizer",
            f"the tokenizer vocabulary of target {target.name!r} is not the one this draft was "
            f"trained with ({trained.name!r}); use that tokenizer.",
        )
    if template_hash(target.tokenizer) != trained.chat_template_hash:
        contract.error(
            "chat_template",
            f"the chat template of target {target.name!r} is not the one in training, so prompts "
            "are written otherwise than the draft has seen; restore that template, or train anew.",
        )


def check_loaded(
    contract: Contract, trained: TargetIdentity, name: str, found: Mapping[str, str]
) -> None:
    """Compare the whole embedding and output head of a loaded target, by their ``matrix_hashes``."""
    contract.looked_at("embedding", "head")
    for fact, words in {"embedding": "embedding", "head": "output head"}.items():
        if getattr(trained, f"{fact}_hash") != found[fact]:
            contract.error(
                fact,
                f"the {words} of target {name!r} is not the one this draft was trained with "
                f"({trained.name!r}); use that target, or train a draft for this one.",
            )


# -- prompts -------------------------------------------------------------------------------------


def prompt_frame(tokenizer: Any, system: str | None, thinking: bool | None) -> str:
    """Everything around the user's text in a prompt: system prompt, headers, think tags."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": MARK})
    return render(tokenizer, messages, thinking, add_generation_prompt=True)


def _system(messages: Sequence[dict[str, Any]]) -> str | None:
    first = messages[0] if messages else {}
    return str(first["content"]) if first.get("role") == "system" else None


def describe_prompts(
    rows: Sequence[Row], tokenizer: Any, thinking: bool | None
) -> list[dict[str, Any]]:
    """The most common system prompts of training rows, with their share and the frame's hash.

    Rows of ready token ids say nothing and are left out.
    """
    counts = Counter(_system(row.messages) for row in rows if row.messages)
    total = sum(counts.values())
    return [
        {
            "system": system,
            "share": round(count / total, 4),
            "frame_hash": json_hash(prompt_frame(tokenizer, system, thinking)),
        }
        for system, count in counts.most_common(RECORDED_PROMPTS)
    ]


def check_prompts(
    contract: Contract,
    manifest: Manifest | None,
    tokenizer: Any,
    conversations: Sequence[Sequence[dict[str, Any]]],
    thinking: bool | None,
) -> None:
    """Compare thinking mode and system prompts with those of the training rows."""
    trained = None if manifest is None else manifest.data.get("system_prompts")
    if manifest is None or not trained or tokenizer is None:
        for name in ("thinking", "system_prompt"):
            contract.could_not(name, "nothing says how the training prompts were written")
        return
    contract.looked_at("thinking", "system_prompt")
    mode, usual = manifest.target.thinking, trained[0]["system"]
    here = prompt_frame(tokenizer, usual, thinking)
    if thinking != mode and here != prompt_frame(tokenizer, usual, mode):
        contract.error(
            "thinking",
            f"thinking is {_word(thinking)} here and was {_word(mode)} in training: the template "
            f"then writes prompts and answers otherwise. Use {_flag(mode)}.",
        )
    known = {each["system"] for each in trained}
    covered = sum(each["share"] for each in trained)
    strange = [_system(messages) for messages in conversations]
    strange = [system for system in strange if system not in known]
    if strange and covered > 0.99:
        contract.error(
            "system_prompt",
            f"{len(strange)} of {len(conversations)} prompts have {_quoted(strange[0])}, but in "
            f"training {trained[0]['share']:.0%} of the rows had {_quoted(usual)}; the draft has "
            "not seen such prompts. Ask with that system prompt, or add such rows and train.",
        )


def prompt_notes(manifest: Manifest | None, tokenizer: Any) -> list[str]:
    """What requests to a server must say so that their prompts are written as in training."""
    trained = None if manifest is None else manifest.data.get("system_prompts")
    if manifest is None or not trained or tokenizer is None:
        return []
    notes = []
    usual, mode = trained[0]["system"], manifest.target.thinking
    if usual is not None:
        notes.append(
            f"in training {trained[0]['share']:.0%} of the rows had {_quoted(usual)}; requests "
            "without it may be accepted less."
        )
    if mode is not None and prompt_frame(tokenizer, usual, mode) != prompt_frame(
        tokenizer, usual, None
    ):
        notes.append(
            f"the draft was trained with thinking {_word(mode)}, which is not the template's "
            'default: requests should say "chat_template_kwargs": {"enable_thinking": '
            f"{str(mode).lower()}}}."
        )
    return notes


def _word(thinking: bool | None) -> str:
    return {None: "the template's default", True: "on", False: "off"}[thinking]


def _flag(thinking: bool | None) -> str:
    return {None: "neither flag", True: "--thinking", False: "--no-thinking"}[thinking]


def _quoted(system: str | None) -> str:
    if system is None:
        return "no system prompt"
    return f"the system prompt {system[:60]!r}{'…' if len(system) > 60 else ''}"
