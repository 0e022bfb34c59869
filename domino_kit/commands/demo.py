"""`domino demo`."""

from pathlib import Path

import click

from domino_kit.commands.common import exit_status, new_folder


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/demo"),
              callback=new_folder, help="Folder for everything; must not exist yet.")  # fmt: skip
@click.option("--seed", type=int, default=42, help="Of weights, data order and anchors.")
@click.option("--steps", type=click.IntRange(2), help="Shorten the training (for a quick look).")
@click.option("--prompts", "limit", type=click.IntRange(1), help="Use fewer held-out prompts.")
def demo(output: Path, seed: int, steps: int | None, limit: int | None) -> None:
    """Train a DFlash and a Domino draft for a small chat model and compare them, on a CPU."""
    from domino_kit.demo import run_demo

    raise SystemExit(exit_status(lambda: run_demo(output, seed, steps, limit)))
