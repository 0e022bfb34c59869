"""What an interrupted run needs to go on exactly: float32 weights, AdamW's moments, the step.

There is nothing else to keep. Data order, anchors and every other draw follow from seed, epoch and
sample (``train/dataset.py``); learning rate and λ from the step; features from the row alone. So no
random state of any process is stored, and the number of processes may change.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domino_kit.checkpoint import read_tensors
from domino_kit.manifest import Manifest, read_manifest
from domino_kit.train.setup import Run

STATE_NAME = "training_state.safetensors"
VERSION = "1"
KEPT_STATES = 2
"""Older checkpoints lose their state, which is three times as large as their float32 weights."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MAY_CHANGE = {
    "output", "train.threads", "train.chunk_mb", "train.feature_cache_mb", "target.device",
    "target.name", "target.expected", "target.load", "target.embedding_name", "target.head_name",
    "data.train", "data.validation", "data.provenance", "features",
}  # fmt: skip
"""Recipe keys that do not change what is learnt; target and data are compared by their content."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: ``step`` steps are done, in ``seconds``; ``measured`` as in a manifest.

    ``checked`` says that the gate has passed this checkpoint.
    """

    step: int
    checked: bool
    seconds: float
    measured: dict[str, float]


def save_state(folder: Path, run: Run, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write :data:`STATE_NAME` into a checkpoint that is still being made."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in run.model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach().cpu().contiguous()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value.detach().cpu().contiguous()
    facts = {
        "version": VERSION, "step": str(step), "total_steps": str(run.total_steps),
        "data": run.data_hash,
    }  # fmt: skip
    try:
        save_file(tensors, folder / STATE_NAME, metadata=facts)
    except SafetensorError as error:
        raise OSError(f"the state of {folder} could not be written: {error}") from None


def resume(run: Run, optimizer: torch.optim.Optimizer, notes: list[str]) -> Resumed | None:
    """Load the newest whole checkpoint of the run's folder; ``None`` if there is none.

    What is skipped is said in ``notes``. Raises ``ValueError`` if the newest one belongs to another
    run (the recipe, the target or the data differ), or if there are some and none is whole.
    """
    folder = run.recipe.output.folder
    found = checkpoints(folder)
    for path in found:
        try:
            manifest, facts, tensors = _read(path)
        except ValueError as error:
            notes.append(f"{path.name} is skipped: {error}")
            continue
        _check_same_run(path, run, manifest, facts)
        _restore(run, optimizer, tensors)
        seconds = float(manifest.training.get("seconds", 0.0))
        checked = manifest.gate == "passed"
        return Resumed(int(facts["step"]), checked, seconds, dict(manifest.measured))
    if found:
        raise ValueError(
            f"none of the {len(found)} checkpoints in {folder} can be gone on from: "
            f"{' '.join(notes)} Start another run in a new output.folder (draft.init_from takes "
            "the weights)."
        )
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The ``step-N`` folders of a run, newest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def remove_old(folder: Path, keep: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints, and the states of all but the newest two."""
    for place, path in enumerate(checkpoints(folder)):
        if keep is not None and place >= keep:
            shutil.rmtree(path)
        elif place >= KEPT_STATES:
            (path / STATE_NAME).unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing: folders that never took their name."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


# -- reading -------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[Manifest, dict[str, str], dict[str, Tensor]]:
    """Everything of one checkpoint; ``ValueError`` if it is torn, mixed or has no state."""
    manifest = read_manifest(path)
    if manifest is None:
        raise ValueError("it has no manifest.")
    if not (path / STATE_NAME).is_file():
        raise ValueError(f"it has no {STATE_NAME}.")
    try:
        with safe_open(path / STATE_NAME, framework="pt") as reader:
            facts = dict(reader.metadata() or {})
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{STATE_NAME} is not readable ({error}).") from None
    if facts.get("version") != VERSION:
        raise ValueError(
            f"{STATE_NAME} has version {facts.get('version')}, this toolkit reads {VERSION}."
        )
    for name, saved in read_tensors(path).items():
        own = tensors.get(f"model.{name}")
        if own is None or not torch.equal(own.to(saved.dtype), saved):
            raise ValueError(f"{STATE_NAME} and the weights are of different checkpoints ({name}).")
    return manifest, facts, tensors


def _check_same_run(path: Path, run: Run, manifest: Manifest, facts: dict[str, str]) -> None:
    """Raise ``ValueError`` naming what differs between the checkpoint and this run."""
    ours, theirs = _learning(run.recipe.model_dump(mode="json")), _learning(manifest.recipe)
    where = f"{path} cannot be gone on from"
    for key in sorted(set(ours) | set(theirs)):
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{where}: {key} was {theirs.get(key)!r} and is now {ours.get(key)!r}. Set it back, "
                "or start another run in a new output.folder (draft.init_from takes the weights)."
            )
    if facts["data"] != run.data_hash:
        raise ValueError(
            f"{where}: the rows of {run.recipe.data.train} are not those that it was trained on. "
            "Give the same file, tokenizer and template, or start another run."
        )
    identity = manifest.target
    for name in ("config_hash", "embedding_hash", "head_hash"):
        if getattr(identity, name) != getattr(run.identity, name):
            raise ValueError(
                f"{where}: target {run.identity.name!r} is not the one it was trained for "
                f"({name} differs from {identity.name!r})."
            )
    if facts["total_steps"] != str(run.total_steps):
        raise ValueError(
            f"{where}: the run had {facts['total_steps']} steps, and now {run.total_steps}."
        )


def _learning(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe's keys that change what is learnt."""
    return {
        f"{section}.{key}": value
        for section, values in recipe.items()
        if section not in MAY_CHANGE
        for key, value in values.items()
        if f"{section}.{key}" not in MAY_CHANGE
    }


def _restore(run: Run, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            state = optimizer.state[parameter]
            for moment in MOMENTS:
                value = tensors.get(f"{moment}.{name}")
                if value is not None:  # a parameter that never had a gradient has no moments
                    state[moment] = value.to(parameter.device if value.dim() else "cpu")
