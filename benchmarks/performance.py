"""Runs the benchmarks of cost one after another, and writes what they showed to docs/performance.md."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import fill
from typing import Any

import click

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
Row = dict[str, Any]

SECTIONS: dict[str, tuple[str, str]] = {
    "objective": (
        "The objective",
        "Both losses of a step and their gradients. `plain` keeps the logits of all rows, "
        "`chunked_checkpoint` computes them again in the backward pass, `fused` takes loss and "
        "gradient of a chunk together (`train/objective.py`). Chunks are of the same rows in both. "
        "The roofline is the time of the matrix products alone.",
    ),
    "attention": (
        "Attention of the blocks",
        "All blocks over one context: with the mask `[N*K, S+N*K]`, and by groups of blocks that "
        "read only what they see (`domino_kit/block_attention.py`).",
    ),
    "train_step": (
        "A whole training step",
        "Draft, objective and backward pass, features given, with the fast paths off and on. The "
        "dense mask's cost grows with the square of the anchors, so the gain does with their number.",
    ),
    "rollout": (
        "The rollout",
        "Greedy proposals of a block from its hidden rows: SGLang's `domino_greedy_rollout` and "
        "ours (`domino_kit/rollout.py`), the same tokens at every batch size. The roofline is the "
        "product that gives the base logits. With random weights no correction can be spared, and "
        "from 16 requests on both spend their time in the same products of the same library: there "
        "the two are equal but for noise.",
    ),
    "replay": (
        "Replay",
        "Acceptance on the same answers, by decoding and by replaying them; the accepted runs are "
        "equal. No replay can be faster than the target's passes over the texts, which are timed "
        "alone: their ratio to decoding is the most that any replay could gain here. Decoding waits "
        "for the memory, which feeds every weight to a few rows; replay is bound by arithmetic: one "
        "row of the target, of its output head and of the projector for each token, and a block's "
        "rows of the draft for each step. So it gains more the longer the block that decoding "
        "verifies: 6 is what the demo trains, 16 what published drafts use (the same weights, to "
        "show the cost). A profile of this shape, functions of `domino_kit/replay.py` timed from "
        "outside on the same machine, shows why it is not ten times. Block 6: of 5.3 s the target's "
        "passes took 2.9, the draft's blocks 0.5, the output head 1.4 (3,082 rows in 52 products), "
        "the corrections 0.3; a tenth of decoding leaves 1.2 s beside the target's passes, less than "
        "the output head takes. Block 16: of 7.3 s 2.9, 1.2, 2.2 (4,705 rows in 55 products) and "
        "0.6. With 16 texts there are that many rows where one for each of 1,536 tokens would do, "
        "since products of few rows run far below the machine's speed: more texts at once need fewer. "
        "With all 24 prompts (`--limit 24 --block 16 --batches 1 --repeats 1`) decoding took 91.95 s "
        "and replay 9.273, 9.9 times less.",
    ),
    "scaling": (
        "Scaling",
        "The cost of a step while one size grows, and the exponent fitted to it: 1 is linear.",
    ),
}


REDUCED: dict[str, list[str]] = {
    "objective": ["--repeats", "2"],
    "attention": ["--repeats", "2"],
    "train_step": ["--repeats", "1"],
    "rollout": ["--repeats", "4"],
    "replay": ["--limit=16", "--block=6", "--block=16", "--batches=1", "--repeats=1"],
    "scaling": ["--repeats", "2"],
}
"""What keeps all of it under a quarter of an hour on two cores."""


def options(name: str, draft: str, quick: bool) -> list[str]:
    """A benchmark's options; the small mode uses no trained draft."""
    if quick:
        return ["--quick"]
    return REDUCED.get(name, []) + (["--draft", draft] if name in ("rollout", "replay") else [])


def run_script(name: str, chosen: list[str], folder: Path) -> tuple[str, list[Row]]:
    """What one benchmark printed, and its rows."""
    output = folder / f"{name}.json"
    words = [sys.executable, str(HERE / f"{name}.py"), *chosen, "--json", str(output)]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    click.echo(f"{name} ...", err=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"benchmarks/{name}.py ended with status {done.returncode}.")
    return done.stdout.rstrip(), json.loads(output.read_text())


def processor() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_page(printed: dict[str, str], chosen: dict[str, list[str]], path: Path) -> None:
    """The page: what was compared, and the tables as they were printed."""
    words = (
        "Written by `make bench`. Every table has its baseline in the same run; seconds are medians "
        "over repeats, memory is what a variant needed at its peak beyond its inputs and results. "
        f"The machine: {processor()}, {os.cpu_count()} cores."
    )
    parts = [
        f"# What training and measuring cost\n\n{fill(words, 112)}\n\n"
        "![cost of the objective, of attention and of a step](performance.png)\n"
    ]
    for name, text in printed.items():
        title, words = SECTIONS[name]
        command = " ".join(["python", f"benchmarks/{name}.py", *chosen[name]])
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## {title}\n\n{fill(words, 112)}\n\n`{command}`\n\n```\n{lines}\n```\n")
    path.write_text("\n".join(parts))


def write_picture(rows: dict[str, list[Row]], path: Path) -> None:
    """Objective and attention by variant, and how a step's cost grows, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    objective, attention, scaling = figure.subplots(1, 3)
    shape = rows["objective"][0]["shape"]
    shown = [row for row in rows["objective"] if row["shape"] == shape]
    objective.barh([row["variant"] for row in shown], [row["seconds"] for row in shown])
    objective.axvline(shown[0]["roofline_seconds"], color="black", label="products alone")
    objective.invert_yaxis()
    objective.set(title=f"objective, V {shape['V']}, D {shape['D']}", xlabel="seconds")
    objective.legend(fontsize="small")
    for variant, own in _by("variant", rows["attention"]).items():
        sizes, seconds = [row["shape"]["S"] for row in own], [row["seconds"] for row in own]
        attention.loglog(sizes, seconds, marker="o", label=variant)
    attention.set(title="attention of one layer", xlabel="context S", ylabel="seconds")
    for axis, own in _by("axis", rows["scaling"]).items():
        sizes = [row["shape"][axis] / own[0]["shape"][axis] for row in own]
        costs = [row["seconds"] / own[0]["seconds"] for row in own]
        label = f"{axis} (exponent {own[0]['exponent']:.2f})"
        scaling.loglog(sizes, costs, marker="o", label=label)
    scaling.set(title="one step", xlabel="size, times the smallest", ylabel="cost, times the least")
    attention.legend(fontsize="small")
    scaling.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _by(key: str, rows: list[Row]) -> dict[str, list[Row]]:
    """Rows grouped by one of their values, in the order of their first appearance."""
    return {
        value: [row for row in rows if row[key] == value]
        for value in dict.fromkeys(row[key] for row in rows)
    }


@click.command()
@click.option("--quick", is_flag=True, help="Small shapes: shows that everything runs.")
@click.option("--draft", default="runs/demo/domino", show_default=True,
              help="The trained draft of rollout and replay.")  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=DOCS)
def main(quick: bool, draft: str, output: Path) -> None:
    """Run all benchmarks; write performance.md and performance.png into a folder."""
    if not quick and not Path(draft).is_dir():
        raise click.UsageError(f"--draft {draft}: no such folder; `make demo` trains one.")
    chosen = {name: options(name, draft, quick) for name in SECTIONS}
    printed: dict[str, str] = {}
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SECTIONS:
            printed[name], rows[name] = run_script(name, chosen[name], Path(folder))
    output.mkdir(parents=True, exist_ok=True)
    write_picture(rows, output / "performance.png")
    write_page(printed, chosen, output / "performance.md")


if __name__ == "__main__":
    main()
