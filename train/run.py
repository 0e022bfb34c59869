"""`domino train`: check the recipe, build the run, train it or only try it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from domino_kit.train.feature_source import open_source
from domino_kit.train.features import FeatureSource
from domino_kit.train.gate import WITHOUT_TARGET, check_checkpoint
from domino_kit.train.loop import train
from domino_kit.train.memory import describe_run, kept_share
from domino_kit.train.processes import Processes
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.report import METRICS_NAME, write_checkpoint
from domino_kit.train.setup import Run, build_run
from domino_kit.train.target_facts import describe_expected, describe_target
from domino_kit.train.timing import describe_time
from domino_kit.train.tracking import load_tracker


def run_training(
    recipe_source: Path | str | None,
    overrides: list[str],
    *,
    dry_run: bool,
    quiet: bool,
    command: list[str],
    allow: Sequence[str] = (),
    resume: bool = False,
    processes: Processes | None = None,
) -> bool:
    """Train from a recipe, a file or a bundled name; false if interrupted (and saved).

    Raises ``ValueError`` in one sentence for anything wrong in recipe, data or target, and
    ``ParityError`` if a checkpoint does not do what the training graph does.
    """
    here = processes or Processes()
    recipe = read_recipe(recipe_source, overrides)
    if dry_run:
        folder = recipe.output.folder
        tried = folder.with_name(f"{folder.name}-dry-run")
        recipe = recipe.model_copy(
            update={"output": recipe.output.model_copy(update={"folder": tried})}
        )
        shutil.rmtree(tried, ignore_errors=True)
    check_output(recipe, resume)
    check_processes(recipe, here)
    load_tracker(recipe)  # whether it is there is better known before hours of loading
    console = Console(stderr=True, quiet=(quiet and not dry_run) or not here.first, markup=False)
    if dry_run and recipe.features.backend == "hf" and (said := describe_target(recipe)):
        console.print(said, highlight=False, soft_wrap=True)
    run = here.together(lambda: build_run(recipe, allow))
    assert run is not None
    console.print(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip())
    expected = run.recipe.target.expected
    for line in [*describe_expected(expected, run.target.text_config), *describe_run(run)]:
        console.print(line, highlight=False, soft_wrap=True)
    if run.whole_target is None:
        console.print(f"check of checkpoints: {WITHOUT_TARGET}", highlight=False, soft_wrap=True)
    if dry_run:
        try_run(run, command, console)
        return True
    return train_run(run, command, quiet=quiet, processes=here, resumed=resume)


def try_run(run: Run, command: list[str], console: Console) -> None:
    """Measure a micro-batch, write a checkpoint of the first weights and check it.

    Raises ``ValueError`` if features or memory do not do, ``ParityError`` as training does.
    """
    with open_source(run) as source:
        for line in describe_time(run, source.encode, kept_share(run)):
            console.print(line, highlight=False, soft_wrap=True)
        written = write_checkpoint(run, 0, command, {}, 0.0)
        check_checkpoint(run, written, source)
    console.print(
        f"dry run: {written} loads, and drafts as the training graph does; nothing was trained"
    )


def train_run(
    run: Run,
    command: list[str],
    *,
    quiet: bool,
    source: FeatureSource | None = None,
    processes: Processes | None = None,
    resumed: bool = False,
) -> bool:
    """Train a built run and say where the draft lies; false if it was interrupted."""
    here = processes or Processes()
    done = train(run, command, quiet=quiet, source=source, processes=here, resumed=resumed)
    if here.first:
        console = Console(stderr=True, markup=False)
        console.print(f"draft: {run.recipe.output.folder} (step {done} of {run.total_steps})")
    return done == run.total_steps


def check_output(recipe: Recipe, resume: bool) -> None:
    """Raise ``ValueError`` unless the run's folder is new, or with ``resume`` that of a run."""
    folder = recipe.output.folder
    if not folder.exists():
        return
    if not resume:
        raise ValueError(
            f"output.folder {folder} already exists; add --resume to go on from its newest "
            "checkpoint, choose another one, or remove it first."
        )
    if not (folder / METRICS_NAME).exists():
        raise ValueError(
            f"output.folder {folder} is not the folder of a training run (it has no "
            f"{METRICS_NAME}), so there is nothing to go on from; choose another one."
        )


def check_processes(recipe: Recipe, processes: Processes) -> None:
    """Raise ``ValueError`` if there are more processes than rows in a step."""
    if processes.count > recipe.step_rows:
        raise ValueError(
            f"{processes.count} processes cannot share the {recipe.step_rows} rows of a step; raise "
            f"train.batch_size (now {recipe.train.batch_size}) or train.accumulation (now "
            f"{recipe.train.accumulation}), or start fewer processes."
        )
    features = recipe.features
    if processes.count > 1 and features.backend == "sglang" and features.url is None:
        raise ValueError(
            "each of several processes would start a feature server of its own; start one with the "
            "command in docs/features.md and give its address as features.url."
        )
