"""`domino prepare`, `domino prepare-features` and `domino train`: from prompts to a draft."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from domino_kit.commands.common import ALLOW, DEVICE, DTYPE, SGLANG_FLAGS, TRUST, exit_status


@click.command()
@click.option("--prompts", metavar="FILE|HUB",
              help="Conversations to answer: JSONL, parquet or a hub data set.")  # fmt: skip
@click.option("--split", help="Split of a hub data set; default: train.")
@click.option("--subset", help="Subset (configuration) of a hub data set.")
@click.option("--target", metavar="NAME", help="The model that answers.")
@click.option("--output", required=True, type=click.Path(path_type=Path, dir_okay=False),
              metavar="FILE.jsonl",
              help="Rows for data.train; a file that is there is gone on with.")  # fmt: skip
@click.option("--engine", type=click.Choice(["hf", "sglang"]),
              help="transformers here, or a server; default: hf, with --url sglang.")  # fmt: skip
@click.option("--url", multiple=True,
              help="An OpenAI-compatible server that runs already; repeatable.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1), metavar="N",
              help="Conversations at once on a server; default: 16.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(1), default=1024, help="Tokens an answer.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="0 is off.")
@click.option("--seed", type=int, default=0, help="Of sampled answers.")
@click.option("--thinking/--no-thinking", default=None,
              help="Thinking mode; default: the template's own.")  # fmt: skip
@click.option("--system", metavar="TEXT", help="System prompt where a conversation has none.")
@click.option("--limit", type=click.IntRange(1), help="Use only the first prompts.")
@click.option("--held-out", type=click.FloatRange(0, 1, max_open=True), default=0.0,
              show_default=False, metavar="FRACTION", help="Share of prompts to hold out.")  # fmt: skip
@click.option("--held-out-output", type=click.Path(path_type=Path, dir_okay=False),
              metavar="FILE.jsonl", help="Where their rows go, for data.validation.")  # fmt: skip
@DEVICE
@DTYPE
@TRUST
@click.option("--show-mask", type=click.IntRange(1), metavar="N",
              help="Print the first N rows of the output, what is learnt marked.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@SGLANG_FLAGS
def prepare(show_mask: int | None, **options: Any) -> None:
    """Let the target itself answer prompts: the rows that a draft learns from.

    Every user turn is answered in order; each answer is a row. Run again, it goes on where it
    stopped. Sampled answers of --engine hf depend on the seed alone.

    Exit status: 0; 1 if a server fails; 2 on bad input.
    """
    from domino_kit.train.prepare_options import PrepareOptions

    chosen = PrepareOptions(**options, show_mask=show_mask or 0)
    from domino_kit.train.prepare import run_prepare

    raise SystemExit(exit_status(lambda: run_prepare(chosen)))


@click.command("prepare-features")
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--output", required=True, type=click.Path(path_type=Path, file_okay=False),
              help="Folder to write, or to go on with.")  # fmt: skip
@click.option("--engine", type=click.Choice(["hf", "sglang"]),
              help="What computes the features; default: features.backend, or hf.")  # fmt: skip
@click.option("--hidden/--no-hidden", default=None,
              help="Keep last hidden rows too; default: if training needs them.")  # fmt: skip
@click.option("--shard-mb", type=click.IntRange(1), default=512, help="About the size of a file.")
@click.option("--quiet", is_flag=True, help="Say nothing.")
def prepare_features(
    recipe: str | None, overrides: tuple[str, ...], output: Path, **options: Any
) -> None:
    """Write the target features of a recipe's rows to files, for features.backend=cached.

    Says first how much it will write, and stops if the disk is too small. Started again, it goes on
    where it was interrupted.
    """
    source, changes = _checked_recipe(recipe, overrides)
    from domino_kit.train.prepare_features import run_prepare_features

    raise SystemExit(exit_status(lambda: run_prepare_features(source, changes, output, **options)))


class RecipeCommand(click.Command):
    """`domino train`, whose help lists the recipe's options; they are read only when asked for."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add every option of the recipe with its default."""
        from domino_kit.train.recipe import describe_options
        from domino_kit.train.recipe_files import bundled_names, preset_names

        formatter.write(f"\nBundled recipes: {', '.join(bundled_names())}; each also with ")
        formatter.write(f"-{', -'.join(preset_names())} behind (docs/recipes.md).\n")
        formatter.write("\nRecipe options (in the YAML file, or as section.key=value):\n\n")
        formatter.write(describe_options())


@click.command(cls=RecipeCommand)
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--dry-run", is_flag=True, help="Build and check everything, write a checkpoint, stop."
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in output.folder.")
@click.option(
    "--nproc-per-node", type=click.IntRange(1), default=1,
    help="Processes on this machine; for several machines use torchrun -m domino_kit.train.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress bar.")
@ALLOW
def train(
    recipe: str | None, overrides: tuple[str, ...], nproc_per_node: int, **options: Any
) -> None:
    """Train a draft from RECIPE (a YAML file or a bundled recipe's name) and key=value OVERRIDES.

    Exit status: 0; 1 if a checkpoint is not what was trained; 2 on bad input; 130 if interrupted.
    """
    source, changes = _checked_recipe(recipe, overrides)
    if nproc_per_node > 1:
        if options["dry_run"]:
            raise ValueError("--dry-run tries one process; leave --nproc-per-node out.")
        from domino_kit.train.launch import launch

        raise SystemExit(launch(nproc_per_node, _without_count(sys.argv[2:])))
    from domino_kit.train.processes import joined_processes
    from domino_kit.train.run import run_training

    def run() -> int:
        with joined_processes() as processes:
            finished = run_training(
                source, changes, command=sys.argv, processes=processes, **options
            )
        return 0 if finished else 130

    raise SystemExit(exit_status(run))


def _without_count(arguments: Sequence[str]) -> list[str]:
    """A command's words without --nproc-per-node and its value."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith("--nproc-per-node"):
            kept.append(word)
        skip = word == "--nproc-per-node"
    return kept


def _checked_recipe(recipe: str | None, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe's file or name and the overrides, read once for the mistakes in them.

    They are better said at once than after everything is imported, and once than by every process.
    Without a recipe everything is an override.
    """
    from domino_kit.train.recipe import read_recipe

    if recipe is None:
        raise ValueError(
            "give a recipe, for example: domino train recipe.yaml output.folder=runs/a"
        )
    if "=" in recipe:
        source, changes = None, [recipe, *overrides]
    else:
        source, changes = recipe, list(overrides)
    read_recipe(source, changes)
    return source, changes
