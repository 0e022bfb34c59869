"""Served speed and the cost of a draft-verify cycle, by block size, against a plain server.

For each block size, a server with the draft and one without run side by side and are asked the
same prompts in turn.
A draft's weights do not depend on its block, so one draft serves them all; only at the block that
it was trained with does its acceptance mean anything.
"""

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from domino_kit.acceptance import Acceptance
from domino_kit.chat_template import prompt_ids
from domino_kit.config import resolve_folder
from domino_kit.eval.engine import without_draft
from domino_kit.eval.prompt_set import read_prompts
from domino_kit.eval.served import ServedAnswer, ask_all
from domino_kit.manifest import library_versions, read_manifest
from domino_kit.serve.plan import ServeOptions, ServePlan, free_port, plan_serve
from domino_kit.serve.server import Server
from domino_kit.target import load_tokenizer

START_SECONDS = 600
Repeats = list[tuple[list[ServedAnswer], float]]


def with_block(draft: Path, block: int, folder: Path) -> Path:
    """The same draft with another block size in its config."""
    copy = folder / f"block-{block}"
    shutil.copytree(draft, copy)
    config = json.loads((copy / "config.json").read_text())
    config["block_size"] = block
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def measure(
    plan: ServePlan, prompts: list[list[int]], tokens: int, counts: list[int], repeats: int
) -> dict[int, tuple[Repeats, Repeats]]:
    """Answers and seconds with and without the draft, by concurrency.

    Both servers run beside each other and are asked in turn, so that whatever else the machine
    does falls on both; an idle one sleeps.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    plain = without_draft(plan.command)
    other = free_port()
    plain[plain.index("--port") + 1] = str(other)
    with (
        Server(plan.command, plan.environment, plan.host, plan.port, log=None) as drafted,
        Server(plain, plan.environment, plan.host, other, log=None) as undrafted,
    ):
        found: dict[int, tuple[Repeats, Repeats]] = {count: ([], []) for count in counts}
        for server in (drafted, undrafted):
            server.wait_ready(START_SECONDS)
            ask_all(server.url, prompts[:1], sampling, 1)
        for count in counts:
            for _ in range(repeats):
                for server, kept in zip((drafted, undrafted), found[count], strict=True):
                    kept.append(ask_all(server.url, prompts, sampling, count))
        return found


def step_ms(measured: Repeats) -> float:
    """Milliseconds of one step of requests asked one at a time, in the median repeat."""
    return 1e3 * statistics.median(
        seconds / sum(a.verify_steps or len(a.tokens) - 1 for a in answers)
        for answers, seconds in measured
    )


def speed(measured: Repeats) -> float:
    """Tokens per second of the median repeat."""
    return statistics.median(
        sum(len(a.tokens) for a in answers) / seconds for answers, seconds in measured
    )


def accept_length(measured: Repeats, proposals: int) -> float:
    """With the bonus token, over all requests whose last step is known."""
    counts = [a.cut_histogram(proposals) for a in measured[0][0]]
    known = [each for each in counts if each is not None]
    return Acceptance(tuple(map(sum, zip(*known, strict=True)))).accept_length


@click.command()
@click.option("--draft", required=True, help="A draft, such as runs/demo/domino.")
@click.option("--blocks", default="4,6,8,16", show_default=True)
@click.option("--concurrency", default="1,8", show_default=True)
@click.option("--prompts", "source", default="eval/prompts/demo_heldout.jsonl", show_default=True)
@click.option("--limit", default=8, show_default=True, help="Prompts.")
@click.option("--tokens", default=96, show_default=True, help="Of each answer.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    draft: str, blocks: str, concurrency: str, source: str, limit: int, tokens: int, repeats: int,
    output: Path | None,
) -> None:  # fmt: skip
    """Measure and print one table."""
    folder = resolve_folder(draft)
    manifest = read_manifest(folder)
    if manifest is None:
        raise click.ClickException(f"{draft} has no manifest that names its target.")
    tokenizer = load_tokenizer(manifest.target.name, False)
    prompts = [prompt_ids(tokenizer, p.messages, manifest.target.thinking)
               for p in read_prompts(source, limit)]  # fmt: skip
    counts = [int(each) for each in concurrency.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for block in [int(each) for each in blocks.split(",")]:
            served = with_block(folder, block, Path(temporary))
            plan = plan_serve(ServeOptions(str(served), port=free_port(), device="cpu"), {})
            measured = measure(plan, prompts, tokens, counts, repeats)
            for count, (found, plain) in measured.items():
                rows.append(
                    {
                        "block": block,
                        "concurrency": count,
                        "tokens_per_second": speed(found),
                        "plain_tokens_per_second": speed(plain),
                        "accept_length": accept_length(found, block - 1),
                        "cycle_ms": step_ms(found) if count == 1 else None,
                        "plain_step_ms": step_ms(plain) if count == 1 else None,
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr)
    _print(rows, folder)
    if output is not None:
        output.write_text(json.dumps({"rows": rows, "libraries": library_versions()}, indent=1))


def _print(rows: list[dict[str, Any]], draft: Path) -> None:
    table = Table(title=f"{draft}: served on this machine")
    for name in ("block", "at once", "tok/s", "plain", "times", "accept length", "cycle ms",
                 "plain step ms", "cycle cost"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["block"]),
            str(row["concurrency"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / row['plain_tokens_per_second']:.2f}",
            f"{row['accept_length']:.2f}",
            *(
                (
                    f"{row['cycle_ms']:.1f}",
                    f"{row['plain_step_ms']:.1f}",
                    f"{row['cycle_ms'] / row['plain_step_ms']:.2f}",
                )
                if row["cycle_ms"] is not None
                else ("", "", "")
            ),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
