"""Training options at equal steps: small drafts for the demo target, replayed on held-out prompts."""

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from domino_kit.acceptance import Acceptance
from domino_kit.chat_template import prompt_ids
from domino_kit.decoding import generate
from domino_kit.demo import HELD_OUT, MAX_NEW_TOKENS, RECIPE, TRAINING_DATA
from domino_kit.demo_target import ensure_demo_target
from domino_kit.eval.prompt_set import read_prompts
from domino_kit.manifest import library_versions
from domino_kit.modeling import DominoDraft
from domino_kit.replay import KnownAnswer, replay
from domino_kit.train.dataset import RowStream
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.initialise import initialise
from domino_kit.train.loop import train_step, update
from domino_kit.train.recipe import read_recipe
from domino_kit.train.setup import Run, build_run

VARIANTS: dict[str, list[str]] = {
    "default": [],
    "dpace": ["position_weights=dpace"],
    "dpace, by blocks": ["position_weights=dpace", "dpace_divide_by=blocks"],
    "forward_kl": ["distill=forward_kl"],
    "half forward_kl": ["distill=forward_kl", "distill_mix=0.5"],
    "0.9 total_variation": ["distill=total_variation", "distill_mix=0.9"],
    "visible_prefix 0.5": ["visible_prefix=0.5"],
}
"""Each with what it changes in section train."""


def known_texts(run: Run, limit: int) -> list[KnownAnswer]:
    """The target's own greedy answers to prompts that training has not seen."""
    prompts = [
        prompt_ids(run.tokenizer, p.messages, None) for p in read_prompts(str(HELD_OUT), limit)
    ]
    answers = []
    for start in range(0, len(prompts), 8):
        batch = prompts[start : start + 8]
        answers += generate(run.target, None, batch, MAX_NEW_TOKENS, run.end_tokens)
    return [KnownAnswer(p, a.tokens) for p, a in zip(prompts, answers, strict=True)]


def accept_length(run: Run, texts: list[KnownAnswer]) -> float:
    """Acceptance length, with bonus, of the trained draft over all texts."""
    run.model.eval()
    with torch.no_grad():
        runs = replay(run.target, run.model, texts)
    steps = [each for text in runs for each in text]
    return Acceptance.of(steps, run.model.config.num_proposals).accept_length


class Bench:
    """The same rows, steps and prompts for every draft; the target encodes and answers once."""

    def __init__(self, steps: int, rows: int, anchors: int, limit: int) -> None:
        self.limit = limit
        self.changes = [
            f"target.name={ensure_demo_target()}", "target.device=cpu", "target.dtype=float32",
            f"data.train={TRAINING_DATA}", f"data.max_rows={rows}", "train.threads=1",
            f"train.steps={steps}", f"train.num_anchors={anchors}", "output.folder=unused",
        ]  # fmt: skip
        self.first: Run | None = None
        self.source: FeatureSource | None = None
        self.texts: list[KnownAnswer] = []

    def start(self, changes: list[str]) -> Run:
        """A fresh draft for a recipe; target, rows and answers are those of the first one."""
        recipe = read_recipe(RECIPE, changes)
        if self.first is None:
            self.first = build_run(recipe)
            encode = encode_row(self.first.target)
            self.source = FeatureSource(encode, recipe.train.feature_cache_mb)
            self.texts = known_texts(self.first, self.limit)
        model = DominoDraft(self.first.model.config)
        initialise(model, self.first.target, recipe.train.seed, recipe.draft.init, None)
        return replace(self.first, recipe=recipe, model=model)

    def measure(self, variant: str, seed: int) -> dict[str, Any]:
        """Train one draft and replay it."""
        options = [f"train.{change}" for change in VARIANTS[variant]]
        run = self.start([*self.changes, *options, f"train.seed={seed}"])
        assert self.source is not None
        train = run.recipe.train
        optimizer = torch.optim.AdamW(
            run.model.parameters(), betas=train.betas, weight_decay=train.weight_decay
        )
        stream, size = RowStream(run.samples, seed), run.recipe.step_rows
        run.model.train()
        started = time.monotonic()
        for step in range(run.total_steps):
            sums = train_step(run, self.source, stream.rows(step * size, (step + 1) * size), step)
            update(run, optimizer, sums, step)
        seconds = time.monotonic() - started
        found = accept_length(run, self.texts)
        return {
            "variant": variant, "changes": VARIANTS[variant], "seed": seed, "steps": train.steps,
            "accept_length": found, "train_seconds": seconds,
        }  # fmt: skip


def show(found: list[dict[str, Any]]) -> None:
    """One line a variant: mean and spread over seeds, and the difference from the default by seed."""
    plain = {row["seed"]: row["accept_length"] for row in found if row["variant"] == "default"}
    table = Table("variant", "seeds", "accept length", "spread", "against default", "s a step")
    for name in VARIANTS:
        rows = [row for row in found if row["variant"] == name]
        if not rows:
            continue
        values = [row["accept_length"] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        gains = [row["accept_length"] - plain[row["seed"]] for row in rows if row["seed"] in plain]
        pace = statistics.mean(row["train_seconds"] / row["steps"] for row in rows)
        each = " ".join(f"{gain:+.3f}" for gain in gains)
        mean = f"{statistics.mean(values):.3f}"
        table.add_row(name, str(len(rows)), mean, f"{spread:.3f}", each, f"{pace:.2f}")
    Console(width=110).print(table)


@click.command()
@click.option("--seeds", default="1,2,3", show_default=True)
@click.option("--steps", default=50, show_default=True)
@click.option("--rows", default=96, show_default=True, help="Rows of training data.")
@click.option("--anchors", default=6, show_default=True, help="Blocks a row.")
@click.option("--prompts", default=8, show_default=True, help="Held-out prompts, at most 24.")
@click.option("--quick", is_flag=True, help="One seed, 4 steps, 2 prompts: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    seeds: str, steps: int, rows: int, anchors: int, prompts: int, quick: bool, output: Path | None
) -> None:
    """Measure every variant for each seed in turn; the JSON is written after every draft."""
    torch.set_num_threads(1)
    if quick:
        seeds, steps, rows, anchors, prompts = "1", 4, 16, 4, 2
    found: list[dict[str, Any]] = []
    bench = Bench(steps, rows, anchors, prompts)
    sizes = {"rows": rows, "anchors": anchors, "prompts": prompts}
    for seed in map(int, seeds.split(",")):
        for variant in VARIANTS:
            found.append(bench.measure(variant, seed) | sizes)
            print(json.dumps(found[-1]), flush=True)
            if output is not None:
                result = {"libraries": library_versions(), "runs": found}
                output.write_text(json.dumps(result, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
