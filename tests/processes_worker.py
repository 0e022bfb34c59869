"""One process of tests/test_processes.py: a few optimizer steps, and what came of them."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from domino_kit.train.dataset import RowStream
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.loop import add_up, train_step, update
from domino_kit.train.processes import Processes, joined_processes
from domino_kit.train.recipe import read_recipe
from domino_kit.train.setup import build_run


def steps(changes: list[str], count: int, processes: Processes) -> dict[str, torch.Tensor]:
    """The gradients of the last step and the parameters after it."""
    run = build_run(read_recipe(None, changes))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.recipe.train.lr)
    source, stream = FeatureSource(encode_row(run.target), 100), RowStream(run.samples, 42)
    rows = run.recipe.step_rows
    found: dict[str, torch.Tensor] = {}
    for step in range(count):
        part = processes.share(stream.rows(step * rows, (step + 1) * rows))
        sums, _ = add_up(run, train_step(run, source, part, step), processes, stop=False)
        if step == count - 1:
            for name, parameter in run.model.named_parameters():
                assert parameter.grad is not None
                found[f"gradient.{name}"] = parameter.grad / sums.weight
        update(run, optimizer, sums, step)
    return found | {name: p.detach().clone() for name, p in run.model.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    with joined_processes() as here:
        for name, (changes, count) in cases.items():
            save_file(steps(changes, count, here), output / f"{name}-{here.rank}.safetensors")
