"""Cost of a training step by anchors, context and vocabulary, with the exponent of each."""

from pathlib import Path
from typing import Any

import click
import torch
from measure import Row, fitted_exponent, measure, show, write_rows
from train_step import fused, make_case

from domino_kit.modeling import DominoDraft

SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2, "gru_hidden_dim": 256,
    "emb_dim": 64,
}  # fmt: skip
STEPS: dict[str, tuple[int, ...]] = {
    "N": (64, 128, 256, 512), "S": (1024, 2048, 4096, 8192), "V": (8192, 16384, 32768, 65536),
}  # fmt: skip
MIDDLE = {"N": 128, "S": 2048, "V": 16384}
"""Where the other two stay."""


def sweep(axis: str, sizes: tuple[int, ...], middle: dict[str, int], repeats: int,
          device: str) -> list[Row]:  # fmt: skip
    """Rows along one axis, each with the exponent of the whole axis; all sizes run in turn."""
    steps, shapes = {}, {}
    for size in sizes:
        shape = middle | {axis: size}
        case = make_case(SIZES | {"vocab_size": shape["V"]}, shape["S"], shape["N"], device)
        steps[f"{axis} {size}"] = case.step(DominoDraft, fused(64))
        shapes[f"{axis} {size}"] = shape
    found = measure({}, steps, repeats)
    exponent = fitted_exponent(sizes, [row.seconds for row in found])
    for row in found:
        row.shape, row.variant = shapes[row.variant], "fast"
        row.more = {"axis": axis, "exponent": exponent}
    return found


@click.command()
@click.option("--repeats", default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Tiny shapes: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(repeats: int, quick: bool, output: Path | None) -> None:
    """Measure each axis; the cost of a step is linear where its exponent is at most 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, middle = STEPS, MIDDLE
    if quick:
        steps = {"N": (2, 4), "S": (32, 64), "V": (64, 128)}
        middle, repeats = {"N": 2, "S": 32, "V": 64}, 1
    found = []
    for axis, sizes in steps.items():
        found += sweep(axis, sizes, middle, repeats, device)
    show("training step without the target's pass", found, "")
    write_rows(output, found)


if __name__ == "__main__":
    main()
