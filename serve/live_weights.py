"""The contract inside the scheduler, weights: the draft's against its files, the target's matrices."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_kit.contract import Contract
from domino_kit.draft_contract import stored_shapes
from domino_kit.fingerprint import DRAFT_ROWS, sampled_rows, tensor_fingerprint
from domino_kit.manifest import Manifest, read_manifest

ROUNDED = 0.2
"""Rows that differ by less than this part of their norm are the same ones, rounded."""


def served_tensors(model: Any) -> dict[str, Tensor]:
    """The draft's live weights under their names in a checkpoint; views of what SGLang fused."""
    tensors = dict(model.named_parameters())
    for place, layer in enumerate(model.layers):
        attention = layer.self_attn
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        _split(
            tensors, f"layers.{place}.self_attn.", "qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes
        )
        _split(tensors, f"layers.{place}.mlp.", "gate_up_proj", ("gate_proj", "up_proj"), None)
    return tensors


def _split(
    tensors: dict[str, Tensor],
    prefix: str,
    fused: str,
    names: tuple[str, ...],
    sizes: list[int] | None,
) -> None:
    weight = tensors.pop(f"{prefix}{fused}.weight", None)
    if weight is None:  # quantised: held in another form under other names
        return
    parts = weight.split(sizes or len(weight) // len(names))
    for name, rows in zip(names, parts, strict=True):
        tensors[f"{prefix}{name}.weight"] = rows


def check_draft_weights(contract: Contract, model: Any, folder: Path) -> None:
    """A few rows of every tensor of the files against the parameters that serve."""
    try:
        stored, shapes = stored_shapes(folder)
    except ValueError as error:
        contract.could_not("draft_weights", str(error))
        return
    contract.looked_at("draft_weights")
    live = served_tensors(model)
    different: dict[str, str] = {}
    for name, shape in shapes.items():
        found = _unpadded(live.get(name), shape)
        if found is None:
            different[name] = "missing, or of another shape"
            continue
        places = sampled_rows(shape[0], DRAFT_ROWS)
        wanted = torch.stack([stored[name][place : place + 1][0] for place in places])
        rows = found[torch.tensor(places, device=found.device)].detach().cpu()
        if not torch.equal(rows, wanted.to(rows.dtype)):
            near = _nearly(rows, wanted)
            different[name] = "rounded or quantised on load" if near else "other weights"
    if different:
        shown = ", ".join(list(different)[:3]) + (" …" if len(different) > 3 else "")
        contract.error(
            "draft_weights",
            f"{len(different)} of {len(shapes)} tensors are not served as {folder} has them: "
            f"{shown}: {' and '.join(sorted(set(different.values())))}.",
        )


def _unpadded(found: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The weight without SGLang's padding (an MLP's width, on a CPU), which must be zero."""
    if found is None or found.dim() != len(shape):
        return None
    core = found[tuple(slice(size) for size in shape)]
    padded = found.shape != core.shape
    if tuple(core.shape) != shape or (padded and found.count_nonzero() != core.count_nonzero()):
        return None
    return core


def _nearly(rows: Tensor, wanted: Tensor) -> bool:
    """Whether rows (the values of a vector together) are the wanted ones up to rounding."""
    size = wanted.float().norm(dim=-1)
    return bool(((rows.float() - wanted.float()).norm(dim=-1) < ROUNDED * size).all())


def check_target_matrices(contract: Contract, runner: Any, folder: Path) -> None:
    """The target's embedding and output head against the manifest's fingerprints."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        contract.could_not("embedding", str(error))
        contract.could_not("head_weights", str(error))
        return
    model, rows = runner.model, int(runner.model_config.vocab_size)
    embedding = model.get_input_embeddings()
    _check_matrix(contract, "embedding", embedding, rows, manifest)
    _check_matrix(contract, "head_weights", getattr(model, "lm_head", None), rows, manifest)


def _check_matrix(
    contract: Contract, name: str, module: Any, rows: int, manifest: Manifest | None
) -> None:
    """SGLang pads the vocabulary; only its own ``rows`` were fingerprinted."""
    field, words = {
        "embedding": ("embedding_rows", "input embedding"),
        "head_weights": ("head_rows", "output head"),
    }[name]
    recorded = None if manifest is None else getattr(manifest.target, field)
    weight = getattr(module, "weight", None)
    if recorded is None:
        contract.could_not(name, f"nothing says what the target's {words} was in training")
    elif weight is None or weight.dtype not in (torch.float32, torch.bfloat16):
        kind = "quantised" if weight is None else str(weight.dtype)
        contract.could_not(name, f"the served one is {kind}, and fingerprints are of bfloat16")
    else:
        contract.looked_at(name)
        if tensor_fingerprint(weight[:rows]) != recorded:
            contract.error(
                name,
                f"the {words} of the served target is not the one that the draft was trained "
                "with; serve that target, or train a draft for this one.",
            )
