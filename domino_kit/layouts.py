"""How other tools lay out a draft's config.json and name its tensors, and what that is here."""

from collections.abc import Mapping
from typing import Any

from domino_kit.checkpoint import HEAD_PREFIXES, canonical_name
from domino_kit.config import (
    ARCHITECTURE,
    NESTED_FIELDS,
    DraftConfig,
    check_architecture,
    parse_config,
)

FORMATS = ("sglang", "specforge", "automodel", "vllm-speculators")

Flat = dict[str, Any]
"""Fields of a config.json by dotted path, such as ``dflash_config.emb_dim``."""

NESTED = {name: f"dflash_config.{name}" for name in NESTED_FIELDS}
"""Our path of each field that a draft has besides an ordinary model."""

DFLASH_PATHS = {
    **NESTED,
    "dflash_config.block_size": "block_size",
    "dflash_config.num_target_layers": "num_target_layers",
    "target_num_hidden_layers": "num_target_layers",
    "torch_dtype": "dtype",
}
"""Our path of every path that a member of the DFlash family writes elsewhere."""

SPECULATORS_PATHS = {
    "dflash_config.projector_type": "speculators_model_type",
    "dflash_config.target_layer_ids": "aux_hidden_state_layer_ids",
    "dflash_config.shift_label": "sample_from_anchor",
    "dflash_config.mask_token_id": "mask_token_id",
    "dflash_config.pure_draft_prefix_len": "pure_draft_prefix_len",
    "dflash_config.gru_hidden_dim": "gru_hidden_dim",
    "dflash_config.emb_dim": "logits_correction_emb_dim",
    **{name: name for name in ("architectures", "dtype", "block_size", "num_target_layers")},
}
"""The speculators path of ours; all others lie in ``transformer_layer_config``."""

LAYER_CONFIG = "transformer_layer_config."
HEAD_FOLDER = "logits_correction."
OWN_BY_TARGET = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)
"""Frozen copies of the target's tensors that a speculators checkpoint holds."""
PRUNED_VOCABULARY = ("d2t", "t2d")

# Fields without meaning for the draft itself, beside those that config.py ignores.
DROPPED = {
    "num_context_layers", "target_hidden_size", "speculators_version", "speculators_config",
    "sliding_window_non_causal", "auf", "max_anchors",
}  # fmt: skip

FLAGS = {
    "block_size": "--block-size",
    "num_target_layers": "--num-target-layers",
    "target_layer_ids": "--target-layer-ids",
    "mask_token_id": "--mask-token-id",
    "shift_label": "--shift-label or --no-shift-label",
    "pure_draft_prefix_len": "--pure-draft-prefix-len",
}
"""What a source may leave out and only its user knows, and the option that supplies it."""

ONE_UP = "this layout numbers the output of layer i as i + 1"


def flatten(raw: Mapping[str, Any], prefix: str = "") -> Flat:
    """A config's fields by dotted path; a list is a value, an empty object says nothing.

    Raises ``ValueError`` for a name with a dot, which no tool writes.
    """
    flat: Flat = {}
    for key, value in raw.items():
        if "." in key:
            raise ValueError(f"unknown field {prefix + key!r}.")
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Flat) -> dict[str, Any]:
    """The nested form of what :func:`flatten` gives."""
    raw: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        place = raw
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return raw


def detect_layout(raw: Mapping[str, Any]) -> str:
    """Which tool's layout a config.json has: a name for people, and ``speculators`` for code."""
    if "speculators_model_type" in raw:
        return "speculators"
    if raw.get("model_type") == "domino":
        return "verl-speco"
    if raw.get("architectures") == ["DominoDraftModel"]:
        return "specforge"
    return "automodel" if raw.get("architectures") == ["Qwen3DFlashDraftModel"] else "dflash"


# -- reading -------------------------------------------------------------------------------------


def our_path(path: str, layout: str) -> str:
    """Where a field of a source's config.json stands in ours."""
    if layout != "speculators":
        return DFLASH_PATHS.get(path, path)
    inverse = {theirs: ours for ours, theirs in SPECULATORS_PATHS.items()}
    return {**NESTED, **inverse}.get(path, path.removeprefix(LAYER_CONFIG))


def parse_layout(raw: dict[str, Any], given: Mapping[str, Any]) -> DraftConfig:
    """The config that a ``config.json`` of any layout describes.

    ``given`` supplies fields of :data:`FLAGS` that the source lacks, in our terms. Raises
    ``ValueError`` naming the field: one that is missing, that contradicts ``given`` or itself, is
    unknown, or cannot be served.
    """
    layout = detect_layout(raw)
    for name in ("dflash_config", "transformer_layer_config"):
        if not isinstance(raw.get(name, {}), dict):
            raise ValueError(f"{name} is {raw[name]!r}, not an object.")
    if layout == "speculators":
        if raw["speculators_model_type"] not in ("dflash", "domino"):
            raise ValueError(
                f"speculators_model_type is {raw['speculators_model_type']!r}; only 'domino' and "
                "'dflash' describe a draft of this kind."
            )
    else:
        check_architecture(raw)
    flat, origin = _in_our_terms(raw, layout)
    _refuse_pruned(flat)
    if layout == "speculators":
        _finish_speculators(flat)
    elif layout in ("specforge", "verl-speco") and flat.get(NESTED["projector_type"]) is None:
        flat[NESTED["projector_type"]] = "domino"  # those tools' class implies it
    _supply(flat, origin, given)
    return parse_config(unflatten(flat))


def _in_our_terms(raw: dict[str, Any], layout: str) -> tuple[Flat, dict[str, str]]:
    """A source's fields under our paths with our values, and the path that each came from."""
    flat: Flat = {}
    origin: dict[str, str] = {}
    whole = flatten(raw)
    for path, value in whole.items():
        if path.split(".")[0] in DROPPED:
            continue
        place = our_path(path, layout)
        value = _our_value(path, value)
        before = flat.get(place)
        if before is None:
            flat[place], origin[place] = value, path
        elif value is None or (type(before), before) == (type(value), value):
            continue
        elif place.split(".")[-1] in DraftConfig.model_fields:
            raise ValueError(
                f"{origin[place]} is {before!r} but {path}, which means the same, is {value!r}; "
                "correct the file to what was used in training."
            )
    _check_dropped(whole, flat)
    return flat, origin


def _our_value(path: str, value: Any) -> Any:
    if path == "speculators_model_type":
        return value if value == "domino" else None
    if path == "projector_type" and value == "dflash":
        return "none"
    if path == "aux_hidden_state_layer_ids" and isinstance(value, list):
        if 0 in value:
            raise ValueError(
                f"{path} {value} has 0, the embedding's output; a draft can read outputs of layers "
                "only, which this layout numbers from 1."
            )
        return [i - 1 if type(i) is int else i for i in value]
    return value


def _check_dropped(whole: Flat, flat: Flat) -> None:
    """Fields that repeat another one must agree with it before they are dropped."""
    width, ids = flat.get("hidden_size"), flat.get(NESTED["target_layer_ids"])
    count = len(ids) if isinstance(ids, list) else None
    for name, wanted in (("target_hidden_size", width), ("num_context_layers", count)):
        if None not in (whole.get(name), wanted) and whole[name] != wanted:
            raise ValueError(
                f"{name} is {whole[name]!r}, but the file's other fields say {wanted}; a draft is "
                "as wide as its target and reads target_layer_ids, so correct the file."
            )


def _refuse_pruned(flat: Flat) -> None:
    found, whole = flat.get("draft_vocab_size"), flat.get("vocab_size")
    if None not in (found, whole) and found != whole:
        raise ValueError(
            f"draft_vocab_size is {found} but vocab_size {whole}: this draft chooses from a pruned "
            "vocabulary, which SGLang cannot serve; train it with the target's whole vocabulary."
        )


def _finish_speculators(flat: Flat) -> None:
    """What the DFlash family says and speculators leaves to its class."""
    flat["architectures"] = [ARCHITECTURE]
    if flat.get(NESTED["projector_type"]) in (None, "none"):
        # Written as unused defaults even for a draft without a head.
        for name in ("pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"):
            flat.pop(NESTED[name], None)


def _supply(flat: Flat, origin: dict[str, str], given: Mapping[str, Any]) -> None:
    """Put ``given`` fields in place; every field of :data:`FLAGS` must be there afterwards."""
    head = flat.get(NESTED["projector_type"]) == "domino"
    for name, flag in FLAGS.items():
        place = NESTED.get(name, name)
        found = flat.get(place)
        if name in given:
            value = given[name]
            if found is not None and (type(found), found) != (type(value), value):
                raise ValueError(
                    f"{flag} gives {name} {value!r}, but {origin[place]} says {found!r} in our "
                    "terms; leave the option out, since it only supplies what the file lacks."
                )
            flat[place] = value
        elif found is None and (head or name not in ("shift_label", "pure_draft_prefix_len")):
            raise ValueError(
                f"{name} is missing, and tools assume different values for it; give the one used in "
                f"training with {flag}."
            )


def our_tensor(name: str, layout: str) -> str | None:
    """Our name of a stored tensor, or ``None`` for one that a draft does not keep.

    Raises ``ValueError`` for the tables of a pruned vocabulary.
    """
    plain = canonical_name(name).removeprefix(HEAD_FOLDER)
    if plain in PRUNED_VOCABULARY:
        raise ValueError(
            f"tensor {name!r} maps a pruned draft vocabulary, which SGLang cannot serve; train the "
            "draft with the target's whole vocabulary."
        )
    return None if layout == "speculators" and plain in OWN_BY_TARGET else plain


# -- writing -------------------------------------------------------------------------------------


def their_path(path: str, form: str) -> str:
    """Where a field of our config.json stands in a format of :data:`FORMATS`."""
    if form != "vllm-speculators":
        return path
    return SPECULATORS_PATHS.get(path, LAYER_CONFIG + path)


def their_tensor(name: str, form: str) -> str:
    """The name of our tensor in a format of :data:`FORMATS`."""
    inside = form == "vllm-speculators" and name.startswith(HEAD_PREFIXES)
    return HEAD_FOLDER + name if inside else name


def write_layout(form: str, config: DraftConfig, dtype: str, target: str | None) -> dict[str, Any]:
    """The ``config.json`` of a format, for weights in ``dtype``; ``target`` is its name, if known."""
    raw = config.to_json(dtype)
    if form == "specforge" and config.has_head:
        raw["architectures"] = ["DominoDraftModel"]
    elif form == "automodel":
        raw["architectures"] = ["Qwen3DFlashDraftModel"]
        raw["dflash_config"] = {"block_size": config.block_size, **raw["dflash_config"]}
    elif form == "vllm-speculators":
        return _speculators(raw, config, target)
    return raw


def _speculators(ours: dict[str, Any], config: DraftConfig, target: str | None) -> dict[str, Any]:
    kind = "domino" if config.has_head else "dflash"
    flat = {their_path(path, "vllm-speculators"): value for path, value in flatten(ours).items()}
    # That runtime drafts one token more in the shifted mode, since row 0 predicts one too.
    tokens = config.block_size if config.shift_label else config.num_proposals
    flat |= {
        "architectures": ["DominoDraftModel" if config.has_head else ARCHITECTURE],
        "speculators_model_type": kind,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "sample_from_anchor": config.shift_label,
        "speculators_config.algorithm": kind,
        "speculators_config.proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": tokens}
        ],
        "speculators_config.default_proposal_method": "greedy",
        "speculators_config.verifier.name_or_path": target,
        "speculators_config.verifier.architectures": [],
    }
    return unflatten(flat)


def not_carried(form: str, target: str | None) -> list[str]:
    """What a checkpoint of this format has and an exported one lacks, in sentences."""
    if form == "specforge":
        return ["auto_map, which would name a model file that is not part of the checkpoint"]
    if form == "automodel":
        return ["dflash_meta.pt, the record of a training run of that tool"]
    if form == "vllm-speculators":
        copies = ["embed_tokens.weight and lm_head.weight, copies of the target's own tensors"]
        if target is None:
            copies.append("the target's name, which no manifest gives here")
        return copies
    return []
