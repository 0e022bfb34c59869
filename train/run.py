"""`domino train`: check the recipe, build the run, train it or only try it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from domino_kit.train.dataset import collate
from domino_kit.train.feature_source import open_source
from domino_kit.train.features import FeatureSource
from domino_kit.train.gate import check_checkpoint
from domino_kit.train.loop import train
from domino_kit.train.memory import describe_run
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.report import write_checkpoint
from domino_kit.train.setup import Run, build_run


def run_training(
    path: Path | None,
    overrides: list[str],
    *,
    dry_run: bool,
    quiet: bool,
    command: list[str],
    allow: Sequence[str] = (),
) -> bool:
    """Train from a recipe; false if it was interrupted (a checkpoint is then saved).

    Raises ``ValueError`` in one sentence for anything wrong in recipe, data or target, and
    ``ParityError`` if a checkpoint does not do what the training graph does.
    """
    recipe = read_recipe(path, overrides)
    if dry_run:
        folder = recipe.output.folder
        tried = folder.with_name(f"{folder.name}-dry-run")
        recipe = recipe.model_copy(
            update={"output": recipe.output.model_copy(update={"folder": tried})}
        )
        shutil.rmtree(tried, ignore_errors=True)
    check_output(recipe)
    run = build_run(recipe, allow)
    console = Console(stderr=True, quiet=quiet and not dry_run, markup=False)
    console.print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip())
    for line in describe_run(run):
        console.print(line, highlight=False)
    if dry_run:
        with open_source(run) as source:
            source(collate(run.samples[:1], run.target.device))
        written = write_checkpoint(run, 0, command, {}, 0.0)
        check_checkpoint(run, written)
        console.print(
            f"dry run: {written} loads, and drafts as the training graph does; nothing was trained"
        )
        return True
    return train_run(run, command, quiet=quiet)


def train_run(
    run: Run, command: list[str], *, quiet: bool, source: FeatureSource | None = None
) -> bool:
    """Train a built run and say where the draft lies; false if it was interrupted."""
    steps_done = train(run, command, quiet=quiet, source=source)
    console = Console(stderr=True, markup=False)
    console.print(f"draft: {run.recipe.output.folder} (step {steps_done} of {run.total_steps})")
    return steps_done == run.total_steps


def check_output(recipe: Recipe) -> None:
    """Raise ``ValueError`` if the run's folder exists already: nothing is ever overwritten."""
    folder = recipe.output.folder
    if folder.exists():
        raise ValueError(
            f"output.folder {folder} already exists; choose another one or remove it first."
        )
