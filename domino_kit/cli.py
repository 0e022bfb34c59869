"""The `domino` command: one click group, one short function a command."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

DEFAULT_LENGTHS = "powers of two"


ALLOW = click.option(
    "--allow", multiple=True, metavar="FACT",
    help="Accept a fact that differs from training, by its name in the error; repeatable.",
)  # fmt: skip


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
    source, changes = _recipe_and_changes(recipe, overrides)
    if nproc_per_node > 1:
        if options["dry_run"]:
            raise ValueError("--dry-run tries one process; leave --nproc-per-node out.")
        from domino_kit.train.launch import launch
        from domino_kit.train.recipe import read_recipe

        read_recipe(source, changes)  # a mistake is better said once than by every process
        raise SystemExit(launch(nproc_per_node, _without_count(sys.argv[2:])))
    from domino_kit.train.processes import joined_processes
    from domino_kit.train.run import run_training

    def run() -> int:
        with joined_processes() as processes:
            finished = run_training(
                source, changes, command=sys.argv, processes=processes, **options
            )
        return 0 if finished else 130

    raise SystemExit(_status(run))


def _without_count(arguments: Sequence[str]) -> list[str]:
    """A command's words without --nproc-per-node and its value."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith("--nproc-per-node"):
            kept.append(word)
        skip = word == "--nproc-per-node"
    return kept


@domino.command("prepare-features")
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
    from domino_kit.train.prepare_features import run_prepare_features

    source, changes = _recipe_and_changes(recipe, overrides)
    raise SystemExit(_status(lambda: run_prepare_features(source, changes, output, **options)))


def _recipe_and_changes(
    recipe: str | None, overrides: Sequence[str]
) -> tuple[str | None, list[str]]:
    """A recipe's file or name, and the overrides; without one, everything is an override."""
    if recipe is None:
        raise ValueError(
            "give a recipe, for example: domino train recipe.yaml output.folder=runs/a"
        )
    if "=" in recipe:
        return None, [recipe, *overrides]
    return recipe, list(overrides)


def _whole_numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers from 1, separated by commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,4,16.")
    return tuple(map(int, parts))


def _layer_ids(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
    """Numbers from 0, separated by commas."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 1,9,17.")
    return [int(part) for part in parts]


@domino.command("export")
@click.option("--draft", required=True, metavar="FOLDER", help="Draft checkpoint to convert.")
@click.option("--format", "form", required=True, help="The tool to write for.",
              type=click.Choice(["sglang", "specforge", "automodel", "vllm-speculators"]))  # fmt: skip
@click.option("--output", required=True, type=click.Path(path_type=Path),
              help="Folder to write; must not exist yet.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["keep", "bfloat16", "float32"]), default="keep",
              help="Type of the written weights.")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
def export_command(draft: str, form: str, output: Path, dtype: str, report: Path | None) -> None:
    """Write a draft as another tool's checkpoint, and say what changed."""
    from domino_kit.interop import export_draft

    click.echo("\n".join(export_draft(draft, form, output, dtype, report).lines()))


@domino.command("import")
@click.argument("source", metavar="FOLDER")
@click.option("--output", required=True, type=click.Path(path_type=Path),
              help="Folder to write; must not exist yet.")  # fmt: skip
@click.option("--shift-label/--no-shift-label", default=None,
              help="Row k predicts token k + 1, or token k.")  # fmt: skip
@click.option("--pure-draft-prefix-len", type=click.IntRange(0), help="Uncorrected drafts.")
@click.option("--mask-token-id", type=click.IntRange(0), help="The token for 'not drafted yet'.")
@click.option("--block-size", type=click.IntRange(2), help="Rows of a block, anchor included.")
@click.option("--num-target-layers", type=click.IntRange(1), help="Depth of the target.")
@click.option("--target-layer-ids", callback=_layer_ids, metavar="I,I,…",
              help="Captured layers; i is the output of layer i, from 0.")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
def import_command(source: str, output: Path, report: Path | None, **given: Any) -> None:
    """Write another tool's draft as a checkpoint of this toolkit, and say what changed.

    The options that describe the draft only supply what its config.json does not say.
    """
    from domino_kit.interop import import_draft

    known = {name: value for name, value in given.items() if value is not None}
    click.echo("\n".join(import_draft(source, output, known, report).lines()))


def _lengths(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """None without the flag, nothing for the flag alone, else its numbers."""
    if value is None:
        return None
    return () if value == DEFAULT_LENGTHS else _whole_numbers(context, parameter, value)


@domino.command("eval-acceptance")
@click.option("--draft", required=True, metavar="FOLDER", help="Draft checkpoint to measure.")
@click.option("--target", metavar="NAME", help="Target model; default: the one in the manifest.")
@click.option("--compare", multiple=True, metavar="FOLDER|off",
              help="Another draft, or `off`: the same without its head; repeatable.")  # fmt: skip
@click.option("--prompts", required=True, metavar="FILE|BENCHMARK[=FILE]",
              help="JSONL or parquet, or gsm8k, humaneval, mt-bench, alpaca, math500.")  # fmt: skip
@click.option("--mode", type=click.Choice(["replay", "decode", "both"]), default="both",
              help="Replay the target's answers, decode them, or both.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1),
              help="Use only the first prompts (with --lengths, default 8).")  # fmt: skip
@click.option("--lengths", is_flag=False, flag_value=DEFAULT_LENGTHS, callback=_lengths,
              metavar="[N,N,…]", help="Ask the same questions after notes that make prompts of so "
              "many tokens; alone: powers of two up to the context.")  # fmt: skip
@click.option("--bucket", type=click.IntRange(1), metavar="N",
              help="Positions in a row of acceptance by position; default: powers of two.")  # fmt: skip
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
@ALLOW
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

    raise SystemExit(_status(lambda: run_evaluation(Options(**options))))


@domino.command()
@click.option("--draft", required=True, metavar="FOLDER", help="Draft checkpoint to check.")
@click.option("--target", metavar="NAME", help="Target model; default: the one in the manifest.")
@click.option("--engine", type=click.Choice(["hf", "sglang", "both"]), default="hf",
              help="Plain PyTorch only, or also a real server (both: the same).")  # fmt: skip
@click.option("--prompts", metavar="FILE|BENCHMARK[=FILE]",
              help="Ask these instead of built-in prompts, as in eval-acceptance.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Use only the first prompts; default: 4.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=32, help="Tokens an answer.")
@click.option("--static", is_flag=True, help="Compare files only: seconds, no weights loaded.")
@click.option("--thinking/--no-thinking", default=None, help="Thinking mode; default: as trained.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
              help="Compute type; auto: float32 on CPU, bfloat16 on GPU.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own model code.")
@click.option("--url", help="A running server with the draft and the probe; default: start one.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Report as HTML.")
@click.option("--lengths", is_flag=False, flag_value=DEFAULT_LENGTHS, callback=_lengths,
              metavar="[N,N,…]",
              help="Also acceptance in longer contexts, as in eval-acceptance.")  # fmt: skip
@ALLOW
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG FLAGS]")
def check(**options: Any) -> None:
    """Prove that a draft is served as it was trained, or name the stage that differs, and why.

    First the files (config, weights, target, tokenizer, template against the manifest), then every
    stage of a draft-verify step: recorded in training, training graph, replay, decode, server.

    Exit status: 0 as trained; 1 a mismatch; 2 it could not be checked.
    """
    from domino_kit.eval.check import CheckOptions, run_check

    raise SystemExit(run_check(CheckOptions(**options)))


@domino.command()
@click.option("--prompts", metavar="FILE|HUB",
              help="Conversations to answer: JSONL, parquet or a hub data set.")  # fmt: skip
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
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
              help="Compute type; auto: float32 on CPU, bfloat16 on GPU.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Run the target's own model code.")
@click.option("--show-mask", type=click.IntRange(1), metavar="N",
              help="Print the first N rows of the output, what is learnt marked.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG FLAGS]")
def prepare(show_mask: int | None, **options: Any) -> None:
    """Let the target itself answer prompts: the rows that a draft learns from.

    Every user turn is answered in order; each answer is a row. Run again, it goes on where it
    stopped. Sampled answers of --engine hf depend on the seed alone.

    Exit status: 0; 1 if a server fails; 2 on bad input.
    """
    from domino_kit.train.prepare import PrepareOptions, run_prepare

    chosen = PrepareOptions(**options, show_mask=show_mask or 0)
    raise SystemExit(_status(lambda: run_prepare(chosen)))


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
@ALLOW
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

    raise SystemExit(_status(lambda: run_demo(output, seed, steps, limit)))


def _status(run: Callable[[], int]) -> int:
    """The exit status of ``run``: 1, with one line, if a server fails or a draft differs."""
    from domino_kit.parity import ParityError
    from domino_kit.serve.server import ServerError

    try:
        return run()
    except (ServerError, ParityError) as error:
        click.echo(f"Error: {error}", err=True)
        return 1


def main(command: click.Command = domino, name: str | None = None) -> None:
    """Entry point: a user's mistake is one line and exit status 2.

    Set DOMINO_TRACEBACK=1 to see where an error was raised.
    """
    try:
        command.main(prog_name=name, standalone_mode=False)
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
