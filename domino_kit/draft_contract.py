"""The contract over a draft's own files: config, names and shapes, weights, by the manifest."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_kit.checkpoint import canonical_name, check_shapes, expected_shapes, is_rotary
from domino_kit.config import DraftConfig, read_config
from domino_kit.contract import Contract
from domino_kit.fingerprint import (
    DRAFT_ROWS,
    json_hash,
    same_sums,
    slice_fingerprint,
    tensor_hash,
    tensor_slices,
)
from domino_kit.manifest import Manifest, read_manifest
from domino_kit.modeling import DominoDraft

OWN_NAMES = ("mask_token_id", "target_layer_ids", "shift_label", "block_size", "rope_theta")
"""Config fields that are facts of their own; a difference in any other is a ``draft_shape``."""

WITHOUT_EFFECT = ("bos_token_id", "eos_token_id")
WHY = {
    "mask_token_id": "the block would be filled with another token than in training",
    "shift_label": "every row would be read as the prediction of its neighbour",
    "block_size": "the block's rows see each other, so another length changes all of them",
    "rope_theta": "all rotary angles differ, the more the further from the start",
}


def check_draft(folder: Path) -> tuple[Contract, DraftConfig | None, Manifest | None]:
    """Compare a draft's files with each other; only headers and a few rows of weights are read.

    Nothing is raised for a wrong draft: whatever is wrong is a finding. The config is ``None`` if
    it cannot be read.
    """
    contract = Contract()
    manifest = _read_manifest(contract, folder)
    contract.looked_at("config")
    try:
        config = read_config(folder / "config.json")
    except ValueError as error:
        contract.error("config", str(error))
        return contract, None, manifest
    _check_spelling(contract, folder, manifest)
    _check_fields(contract, folder, config, manifest)
    _check_weights(contract, folder, config, manifest)
    return contract, config, manifest


def _read_manifest(contract: Contract, folder: Path) -> Manifest | None:
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        contract.error("manifest", str(error))
        return None
    if manifest is None:
        contract.could_not("manifest", "the draft has none, so it was trained by another tool")
    else:
        contract.looked_at("manifest")
        if manifest.gate is None:
            contract.could_not("gate", "the check was not run on this checkpoint")
        else:
            contract.looked_at("gate")
            if manifest.gate_lacks is not None:
                contract.could_not("gate", manifest.gate_lacks)
            if manifest.gate != "passed":
                contract.error(
                    "gate", f"{folder} did not pass training's own check; {manifest.gate}"
                )
    return manifest


def _check_spelling(contract: Contract, folder: Path, manifest: Manifest | None) -> None:
    """A base in ``rope_parameters`` alone is not seen by readers of older transformers."""
    contract.looked_at("rope_spelling")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if raw.get("rope_theta") is not None:
        return
    found = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("rope_theta")
    message = (
        f"{folder / 'config.json'} has the RoPE base {found} only inside rope_parameters, where "
        "readers built on transformers 4 do not look: they would take 10000. Add "
        f'"rope_theta": {found} at the top level (domino import writes both).'
    )
    if manifest is not None:  # written with both: another tool has rewritten it since
        contract.error("rope_spelling", message)
    else:
        contract.warning("rope_spelling", message)


def _check_fields(
    contract: Contract, folder: Path, config: DraftConfig, manifest: Manifest | None
) -> None:
    """Every field of config.json against what was trained."""
    if manifest is None:
        for name in (*OWN_NAMES, "draft_shape"):
            contract.could_not(name, "without a manifest nothing says what was trained")
        return
    found = config.model_dump(mode="json")
    wanted = manifest.draft or {
        "mask_token_id": manifest.mask_token_id,
        "target_layer_ids": manifest.target_layer_ids,
        "shift_label": manifest.shift_label,
        "block_size": manifest.block_size,
        "rope_theta": manifest.rope["rope_theta"],
    }
    contract.looked_at(*OWN_NAMES, *(["draft_shape"] if manifest.draft else []))
    for field, value in wanted.items():
        if field in WITHOUT_EFFECT or found.get(field) == value:
            continue
        name = field if field in OWN_NAMES else "draft_shape"
        why = WHY.get(field, "the draft would compute something else")
        if field == "target_layer_ids":
            why = explain_layer_ids(found[field], value)
        contract.error(
            name,
            f"{folder / 'config.json'}: {field} is {found.get(field)}, but the draft was trained "
            f"with {value}: {why}. Restore {value}.",
        )


def explain_layer_ids(found: Sequence[int], wanted: Sequence[int]) -> str:
    """What a difference between two lists of layers looks like."""
    if sorted(found) == sorted(wanted):
        return "the same layers in another order, so fc would read each one as another"
    shifts = {a - b for a, b in zip(found, wanted, strict=False)}
    if len(found) == len(wanted) and shifts in ({1}, {-1}):
        return (
            f"all off by one (by {shifts.pop():+d}), as between tools that number a layer's output "
            "i and those that number it i + 1"
        )
    return "the draft would read other layers"


def stored_shapes(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Lazy slices and shapes of a draft's tensors under their canonical names.

    Raises ``ValueError`` for an unreadable file or a tensor that is there twice.
    """
    slices: dict[str, Any] = {}
    for raw, stored in tensor_slices(folder):
        name = canonical_name(raw)
        if is_rotary(name):
            continue
        if name in slices:
            raise ValueError(f"{folder}: tensor {name!r} is there twice (as {raw!r}).")
        slices[name] = stored
    return slices, {name: tuple(stored.get_shape()) for name, stored in slices.items()}


def weights_identity(folder: Path) -> str:
    """One hash for a few rows of every tensor: which checkpoint's weights a folder has.

    Raises ``ValueError`` for unreadable weights.
    """
    slices, _ = stored_shapes(folder)
    return json_hash({name: slice_fingerprint(each, DRAFT_ROWS) for name, each in slices.items()})


def _check_weights(
    contract: Contract, folder: Path, config: DraftConfig, manifest: Manifest | None
) -> None:
    """Names and shapes against the config, rows of values against the manifest."""
    contract.looked_at("tensors")
    try:
        slices, shapes = stored_shapes(folder)
        check_shapes(folder, config, expected_shapes(config), shapes)
    except ValueError as error:
        contract.error("tensors", str(error))
        return
    if manifest is None or not manifest.weights:
        contract.could_not("weights", "no fingerprints were recorded in training")
        return
    contract.looked_at("weights")
    different = [
        name
        for name, stored in slices.items()
        if slice_fingerprint(stored, DRAFT_ROWS) != manifest.weights.get(name)
    ]
    if different:
        contract.error("weights", _explain_weights(folder, slices, different, manifest))


def check_loaded_weights(
    contract: Contract, folder: Path, manifest: Manifest, model: DominoDraft
) -> None:
    """Every value of a loaded draft, where :func:`check_draft` looks at a few rows only."""
    if not manifest.weight_hashes:
        contract.could_not("weights", "only a few rows: no whole hashes were recorded in training")
        return
    contract.looked_at("weights")
    different = [
        name
        for name, tensor in model.state_dict().items()
        if tensor_hash(tensor) != manifest.weight_hashes.get(name)
    ]
    if different:
        tensors = dict(model.state_dict())
        contract.error("weights", _explain_weights(folder, tensors, different, manifest))


def _explain_weights(
    folder: Path, slices: dict[str, Any], different: list[str], manifest: Manifest
) -> str:
    shown = ", ".join(different[:3]) + (" …" if len(different) > 3 else "")
    if len(different) == len(slices):
        return (
            f"{folder}: no tensor is the one that was trained: the weights are another run's. Copy "
            "weights, config and manifest of one checkpoint together."
        )
    name = different[0]
    sums = manifest.weight_sums.get(name)
    moved = len(different) == 1 and sums is not None and same_sums(slices[name][:], sums)
    what = (
        "the same values in another order (transposed, or rows permuted)"
        if moved
        else "other values (another run's, rounded or edited)"
    )
    return (
        f"{folder}: {len(different)} of {len(slices)} tensors are not those that were trained: "
        f"{shown} has {what}. Copy the weights again from the checkpoint that was trained."
    )
