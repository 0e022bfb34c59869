"""The `domino` command: one click group, one short function a command."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

RECIPE_FOLDER = Path(__file__).resolve().parent / "train" / "recipes"


class RecipeCommand(click.Command):
    """`domino train`, whose help lists the recipe's options; they are read only when asked for."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add every option of the recipe with its default."""
        from domino_kit.train.recipe import describe_options

        formatter.write("\nRecipe options (in the YAML file, or as section.key=value):\n\n")
        formatter.write(describe_options())


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="domino-kit", prog_name="domino")
def domino() -> None:
    """Train Domino drafts for speculative decoding, serve them, and measure what they give."""


@domino.command(cls=RecipeCommand)
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option(
    "--dry-run", is_flag=True, help="Build and check everything, write a checkpoint, stop."
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def train(recipe: str | None, overrides: tuple[str, ...], dry_run: bool, quiet: bool) -> None:
    """Train a draft from RECIPE (a YAML file or a bundled recipe's name) and key=value OVERRIDES."""
    from domino_kit.train.run import run_training

    path, changes = _recipe_path(recipe, overrides)
    finished = run_training(path, changes, dry_run=dry_run, quiet=quiet, command=sys.argv)
    if not finished:
        raise SystemExit(130)


def _recipe_path(recipe: str | None, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe's file: a path, or a bundled name; without one, everything is an override."""
    if recipe is None:
        raise ValueError(
            "give a recipe, for example: domino train recipe.yaml output.folder=runs/a"
        )
    if "=" in recipe:
        return None, [recipe, *overrides]
    bundled = RECIPE_FOLDER / f"{recipe}.yaml"
    if not Path(recipe).exists() and bundled.exists():
        return bundled, list(overrides)
    if not Path(recipe).exists():
        names = ", ".join(sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml")))
        raise ValueError(f"recipe {recipe!r} does not exist; bundled recipes are {names}.")
    return Path(recipe), list(overrides)


def _whole_numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers from 1, separated by commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,4,16.")
    return tuple(map(int, parts))


@domino.command("eval-acceptance")
@click.option("--draft", required=True, metavar="FOLDER", help="Draft checkpoint to measure.")
@click.option("--target", metavar="NAME", help="Target model; default: the one in the manifest.")
@click.option("--compare", multiple=True, metavar="FOLDER|off",
              help="Another draft, or `off`: the same without its head; repeatable.")  # fmt: skip
@click.option("--prompts", required=True, metavar="FILE|BENCHMARK[=FILE]",
              help="JSONL or parquet, or gsm8k, humaneval, mt-bench, alpaca, math500.")  # fmt: skip
@click.option("--mode", type=click.Choice(["replay", "decode", "both"]), default="both",
              help="Replay the target's answers, decode them, or both.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Use only the first prompts.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, help="Tokens an answer.")
@click.option(
    "--num-proposals", type=click.IntRange(1), help="Drafts a step; default: block size - 1."
)
@click.option("--batch-size", type=click.IntRange(1), default=1, help="Answers decoded together.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="0 is off.")
@click.option("--proposals", type=click.Choice(["greedy", "sampled"]), default="greedy",
              help="How the draft proposes at a temperature.")  # fmt: skip
@click.option("--seed", type=int, default=0, help="Of sampled answers.")
@click.option("--thinking/--no-thinking", default=None, help="Thinking mode; default: as trained.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
              help="Compute type; auto: float32 on CPU, bfloat16 on GPU.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own model code.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Report as PNG.")
@click.option("--min-accept-length", type=float, help="Exit 1 if the draft is below this.")
@click.option("--engine", type=click.Choice(["hf", "sglang", "both"]), default="hf",
              help="Plain PyTorch, a real server, or both compared step by step.")  # fmt: skip
@click.option("--url", help="A running server with the draft; default: start one.")
@click.option("--baseline-url", help="A server without a draft, beside --url.")
@click.option("--concurrency", default="1", callback=_whole_numbers, metavar="N,N,…",
              help="Requests at once, for the served speeds.")  # fmt: skip
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG FLAGS]")
def eval_acceptance(**options: Any) -> None:
    """Measure acceptance length, with plain decoding beside it in the same run.

    With --engine sglang or both, a server is started (flags after -- go to SGLang) or --url asked.

    Exit status: 0; 1 if an answer or a run differs, the acceptance is too low or a server fails;
    2 on bad input.
    """
    from domino_kit.eval.run import Options, run_evaluation

    raise SystemExit(_served(lambda: run_evaluation(Options(**options))))


@domino.command()
@click.option("--draft", required=True, metavar="FOLDER", help="Draft checkpoint to serve.")
@click.option("--target", metavar="NAME", help="Target model; default: the one in the manifest.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=30000, help="Port to listen on.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
              default="auto", help="auto: float32 on CPU, bfloat16 on GPU.")  # fmt: skip
@click.option("--print-command", is_flag=True, help="Print SGLang's command line and stop.")
@click.option("--check-tokens", type=click.IntRange(0), default=64,
              help="Length of the greedy answers after the start; 0 asks nothing.")  # fmt: skip
@click.option("--check-prompts", metavar="FILE", help="Ask these prompts instead of built-in ones.")
@click.option("--start-timeout", type=click.FloatRange(1), default=1800, metavar="SECONDS",
              help="How long the server may take to start.")  # fmt: skip
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG FLAGS]")
def serve(
    print_command: bool,
    check_tokens: int,
    check_prompts: str | None,
    start_timeout: float,
    **options: Any,
) -> None:
    """Serve a draft with its target through SGLang; everything after -- goes to SGLang.

    Exit status: 0 when stopped by Ctrl-C or SIGTERM; 1 if the server failed; 2 on bad input.
    """
    from domino_kit.serve.plan import ServeOptions
    from domino_kit.serve.run import Confirm, run_serve

    raise SystemExit(
        run_serve(
            ServeOptions(**options),
            Confirm(check_tokens, check_prompts),
            start_seconds=start_timeout,
            print_command=print_command,
        )
    )


@domino.command()
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("runs/demo"),
              help="Folder for everything it makes; must not exist yet.")  # fmt: skip
@click.option("--seed", type=int, default=42, help="Of weights, data order and anchors.")
@click.option("--steps", type=click.IntRange(2), help="Shorten the training (for a quick look).")
@click.option("--prompts", "limit", type=click.IntRange(1), help="Use fewer held-out prompts.")
def demo(output: Path, seed: int, steps: int | None, limit: int | None) -> None:
    """Train a DFlash and a Domino draft for a small chat model and compare them, on a CPU."""
    from domino_kit.demo import run_demo

    raise SystemExit(_served(lambda: run_demo(output, seed, steps, limit)))


def _served(run: Callable[[], int]) -> int:
    """The exit status of ``run``: 1, with one line, if a server that it needs fails."""
    from domino_kit.serve.server import ServerError

    try:
        return run()
    except ServerError as error:
        click.echo(f"Error: {error}", err=True)
        return 1


def main() -> None:
    """Entry point: a user's mistake is one line and exit status 2.

    Set DOMINO_TRACEBACK=1 to see where an error was raised.
    """
    try:
        domino.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ValueError, OSError) as error:
        if os.environ.get("DOMINO_TRACEBACK"):
            raise
        click.echo(f"Error: {_one_line(error)}", err=True)
        sys.exit(2)


def _one_line(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
