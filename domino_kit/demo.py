"""The demo: two drafts for a small real chat model, trained, compared and served on a CPU.

Like cli.py, this stands above train, eval and serve: it only calls what their commands call.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import domino_kit
from domino_kit.demo_target import ensure_demo_target
from domino_kit.eval.options import Options
from domino_kit.eval.run import run_evaluation
from domino_kit.serve.plan import ServeOptions, free_port, plan_serve
from domino_kit.serve.server import Server
from domino_kit.train.feature_source import open_source
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
START_SECONDS = 600.0
QUESTION = "Write a letter of resignation for a night baker."


def run_demo(output: Path, seed: int, steps: int | None, limit: int | None) -> int:
    """Train ``dflash`` and ``domino`` below ``output``, compare them; returns the exit status."""
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
        with open_source(run, source) as source:  # in process: the second draft may use it too
            if not train_run(run, ["domino", "demo", f"--seed={seed}"], quiet=False, source=source):
                return 130
    console.print("\n[bold]held-out prompts[/bold], none of them seen in training")
    status = finish(output, limit, console)
    console.print(f"demo finished in {(time.monotonic() - started) / 60:.1f} minutes: {output}")
    return status


def finish(output: Path, limit: int | None, console: Console) -> int:
    """Compare the drafts, serve Domino's and ask the server; without SGLang only compare."""
    try:
        plan = plan_serve(
            ServeOptions(str(output / "domino"), port=free_port(), device="cpu",
                         extra=("--log-level", "warning")),
            os.environ,
        )  # fmt: skip
    except ValueError as error:
        console.print(f"not served: {error}", markup=False, highlight=False, soft_wrap=True)
        return compare(output, limit, None)
    console.print("starting a real SGLang server with the Domino draft")
    with Server(plan.command, plan.environment, plan.host, plan.port, log=None) as server:
        server.wait_ready(START_SECONDS)
        status = compare(output, limit, server.url)
        console.print("\na chat completion, streamed through the openai client:")
        stream_completion(server.url)
    print_modes(json.loads((output / "report.json").read_text())["runs"], console)
    return status


def stream_completion(url: str) -> None:
    """Ask the running server as any application would, and print the answer as it comes."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_NEW_TOKENS,
        temperature=0,
        stream=True,
    )
    print(f"> {QUESTION}")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def print_modes(runs: list[dict[str, Any]], console: Console) -> None:
    """The Domino draft's numbers side by side: replay, decode, served."""
    own = [run for run in runs if run["head"] == "domino"]
    table = Table(title="the same draft, three ways", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for run in own:
        table.add_column(run["mode"], justify="right")
    rows = {
        "acceptance length": [f"{run['accept_length']:.3f}" for run in own],
        "verify steps": [str(run["verify_steps"]) for run in own],
        "steps by accepted drafts": [" ".join(map(str, run["histogram"])) for run in own],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def compare(output: Path, limit: int | None, url: str | None) -> int:
    """Replay and decode the held-out prompts with each draft, and with Domino's head off.

    With ``url``, the server of the Domino draft answers them too.
    """
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
            engine="hf" if url is None else "both",
            url=url,
            concurrency=(BATCH_SIZE,),
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
