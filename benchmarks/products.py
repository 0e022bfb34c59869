"""Products of a few rows with a weight on a CPU: `F.linear` against `domino_kit/products.py`."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from domino_kit.manifest import library_versions
from domino_kit.products import product

SHAPES = ((49152, 576, 2), (3072, 576, 30), (576, 1536, 30), (960, 576, 30), (49152, 128, 4))
"""Rows and columns of a weight, and how many different ones: more than the caches hold."""


def milliseconds(call: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor],
                 repeats: int) -> float:  # fmt: skip
    """Median time of one product, over all weights in turn."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for weight in weights:
            call(weight)
        times.append((time.perf_counter() - started) / len(weights))
    return 1e3 * statistics.median(times[1:])


@click.command()
@click.option("--rows", default="1,2,3,4,6,8,16", show_default=True)
@click.option("--repeats", default=15, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(rows: str, repeats: int, output: Path | None) -> None:
    """Measure both in turn and print one table."""
    found = []
    with torch.no_grad():
        for height, width, copies in SHAPES:
            weights = [torch.randn(height, width) for _ in range(copies)]
            for count in map(int, rows.split(",")):
                x = torch.randn(count, width)
                found.append(
                    {
                        "shape": f"{height} x {width}",
                        "rows": count,
                        "linear_ms": milliseconds(lambda w, x=x: F.linear(x, w), weights, repeats),
                        "product_ms": milliseconds(lambda w, x=x: product(x, w), weights, repeats),
                    }
                )
    table = Table()
    for name in ("weight", "rows", "F.linear ms", "product ms", "times"):
        table.add_column(name, justify="right")
    for row in found:
        ratio = row["linear_ms"] / row["product_ms"]
        table.add_row(row["shape"], str(row["rows"]), f"{row['linear_ms']:.3f}",
                      f"{row['product_ms']:.3f}", f"{ratio:.2f}")  # fmt: skip
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps({"rows": found, "libraries": library_versions()}, indent=1))


if __name__ == "__main__":
    main()
