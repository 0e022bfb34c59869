"""The demo: two drafts for a small real chat model, trained and compared on a CPU.

Like cli.py, this stands above train and eval: it only calls what their commands call.
"""

import json
import time
from pathlib import Path

from rich.console import Console

import domino_kit
from domino_kit.demo_target import ensure_demo_target
from domino_kit.eval.run import Options, run_evaluation
from domino_kit.train.features import FeatureSource
from domino_kit.train.memory import describe_run
from domino_kit.train.recipe import read_recipe
from domino_kit.train.run import train_run
from domino_kit.train.setup import build_run

PACKAGE = Path(domino_kit.__file__).resolve().parent
RECIPE = PACKAGE / "train" / "recipes" / "demo.yaml"
TRAINING_DATA = PACKAGE / "train" / "demo" / "train.jsonl"
HELD_OUT = PACKAGE / "eval" / "prompts" / "demo_heldout.jsonl"
MAX_NEW_TOKENS = 96
BATCH_SIZE = 8


def run_demo(output: Path, seed: int, steps: int | None, limit: int | None) -> int:
    """Train ``dflash`` and ``domino`` below ``output``, compare them; returns the exit status.

    Raises ``ValueError`` if ``output`` exists.
    """
    if output.exists():
        raise ValueError(f"{output} already exists; remove it, or choose another with --output.")
    console = Console()
    started = time.monotonic()
    console.print("demo target: SmolLM2-135M-Instruct")
    target = ensure_demo_target()
    source: FeatureSource | None = None
    for name, projector in (("dflash", "none"), ("domino", "domino")):
        changes = [
            f"target.name={target}",
            f"draft.projector={projector}",
            f"data.train={TRAINING_DATA}",
            f"output.folder={output / name}",
            f"train.seed={seed}",
        ]
        if steps is not None:
            changes += [f"train.steps={steps}", f"train.regress_steps={steps // 4}"]
        recipe = read_recipe(RECIPE, changes)
        run = build_run(recipe)
        console.print(f"\n[bold]{name}[/bold]: the same data and steps for both drafts")
        for line in describe_run(run):
            console.print(line, highlight=False)
        source = source or FeatureSource(run.target, recipe.train.feature_cache_mb)
        if not train_run(run, ["domino", "demo", f"--seed={seed}"], quiet=False, source=source):
            return 130
    console.print("\n[bold]held-out prompts[/bold], none of them seen in training")
    status = compare(output, limit)
    console.print(f"demo finished in {(time.monotonic() - started) / 60:.1f} minutes: {output}")
    return status


def compare(output: Path, limit: int | None) -> int:
    """Replay and decode the held-out prompts with each draft, and with Domino's head off."""
    status = run_evaluation(
        Options(
            draft=str(output / "domino"),
            compare=("off", str(output / "dflash")),
            prompts=str(HELD_OUT),
            limit=limit,
            max_new_tokens=MAX_NEW_TOKENS,
            batch_size=BATCH_SIZE,
            device="cpu",
            dtype="float32",
            output=output / "report.json",
            picture=output / "report.png",
        )
    )
    runs = json.loads((output / "report.json").read_text())["runs"]
    lengths = {run["head"]: run["accept_length"] for run in runs if run["mode"] == "decode"}
    verdict = lengths["domino"] > max(lengths["off"], lengths["none"])
    Console().print(
        f"Domino {lengths['domino']:.3f}, its head off {lengths['off']:.3f}, DFlash "
        f"{lengths['none']:.3f}: the causal head {'helps' if verdict else 'does NOT help here'}"
    )
    return status
