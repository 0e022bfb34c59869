"""`domino export` and `domino import`: other tools' checkpoints."""

from pathlib import Path
from typing import Any

import click

from domino_kit.commands.common import DRAFT, NEW_FOLDER


def _layer_ids(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
    """Numbers from 0, separated by commas."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 1,9,17.")
    return [int(part) for part in parts]


@click.command("export")
@DRAFT
@click.option("--format", "form", required=True, help="The tool to write for.",
              type=click.Choice(["sglang", "specforge", "automodel", "vllm-speculators"]))  # fmt: skip
@NEW_FOLDER
@click.option("--dtype", type=click.Choice(["keep", "bfloat16", "float32"]), default="keep",
              help="Type of the written weights.")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
def export_command(draft: str, form: str, output: Path, dtype: str, report: Path | None) -> None:
    """Write a draft as another tool's checkpoint, and say what changed."""
    from domino_kit.interop import export_draft

    click.echo("\n".join(export_draft(draft, form, output, dtype, report).lines()))


@click.command("import")
@click.argument("source", metavar="FOLDER")
@NEW_FOLDER
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
