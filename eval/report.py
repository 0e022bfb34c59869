"""The report of a measurement: table on the terminal, JSON file, picture."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from domino_kit.checkpoint import write_whole
from domino_kit.eval.positions import CAUSES, RULE

DEFINITIONS = {
    "accept_length": "mean accepted drafts a verify step + 1 (with bonus token)",
    "accepted_drafts_per_step": "mean accepted drafts a verify step (without bonus token)",
    "accept_rate": "accepted by proposed drafts",
    "last step": "drafts beyond an end token or max_new_tokens are not counted",
    "num_proposals": "drafts a step; block_size counts the anchor too",
    "positions, lengths": "steps by their anchor's position, or by the prompt's length; steps that "
    "could reach the end of their answer are left out",
    "verdict": RULE,
}


def print_report(report: dict[str, Any], console: Console) -> None:
    """The runs as a table, acceptance by category, and whether greedy decoding was lossless."""
    first = report["runs"][0]
    prompts, proposals = len(first["prompts"]), first["num_proposals"]
    console.print(
        f"target {Path(report['target']).name}: {prompts} prompts, {proposals} proposals a step"
    )
    table = _table()
    for name in ("draft", "head", "mode", "accept\nlength", "drafts\na step", "accept\nrate",
                 "verify\nsteps", "tok/s", "plain\ntok/s"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("draft", "head", "mode") else "right")
    for run in report["runs"]:
        speed = run["tokens_per_second"]
        table.add_row(
            run["draft"],
            run["head"],
            run["mode"],
            f"{run['accept_length']:.3f}",
            f"{run['accepted_drafts_per_step']:.3f}",
            f"{run['accept_rate']:.1%}",
            str(run["verify_steps"]),
            _number(speed),
            _number(run["baseline_tokens_per_second"] if speed is not None else None),
        )
    console.print(table)
    _print_positions(report, console)
    _print_categories(report, console)
    if "lengths" in report["runs"][0]:
        _print_lengths(report, console)
    _print_places(report, console)
    _print_verdicts(report, console)
    if "sweep" in report:
        _print_sweep(report["sweep"], console)
    console.print("accept length = accepted drafts a step + 1 (the bonus token counts)")
    console.print(agreement(report))


def _number(value: float | None) -> str:
    return _decimals(value, 1)


def _decimals(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _print_sweep(sweep: dict[str, Any], console: Console) -> None:
    """Served speed by concurrency, with and without the draft."""
    console.print("served, medians over requests (plain: the same server without the draft):")
    table = _table()
    for name in ("requests\nat once", "tok/s", "plain\ntok/s", "times", "first token\nms",
                 "plain", "next token\nms", "plain"):  # fmt: skip
        table.add_column(name, justify="right")
    for level in sweep["levels"]:
        served, plain = level["served"], level.get("plain", {})
        ratio = level.get("ratio")
        table.add_row(
            str(level["concurrency"]),
            _number(served["tokens_per_second"]),
            _number(plain.get("tokens_per_second")),
            "" if ratio is None else f"{ratio:.2f}",
            _number(served["first_token_ms"]),
            _number(plain.get("first_token_ms")),
            _number(served["inter_token_ms"]),
            _number(plain.get("inter_token_ms")),
        )
    console.print(table)
    if any("ratio" in level for level in sweep["levels"]):
        at = sweep["stops_paying_at"]
        most = sweep["levels"][-1]["concurrency"]
        console.print(
            f"speculation pays at every measured concurrency, up to {most}"
            if at is None
            else f"speculation stops paying at {at} requests at once"
        )


def _table() -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _print_positions(report: dict[str, Any], console: Console) -> None:
    """Steps by accepted drafts, and each draft position's acceptance given all before it."""
    shown = _one_mode(report)
    console.print("steps by accepted drafts, and acceptance of that draft given all before it:")
    table = _table()
    table.add_column("draft")
    table.add_column("head")
    for place in range(shown[0]["num_proposals"] + 1):
        table.add_column(str(place), justify="right")
    for run in shown:
        rates = [None, *run["conditional_acceptance"]]
        cells = [
            str(count) if rate is None else f"{count}\n{rate:.0%}"
            for count, rate in zip(run["histogram"], rates, strict=True)
        ]
        table.add_row(run["draft"], run["head"], *cells)
    console.print(table)


def _print_categories(report: dict[str, Any], console: Console) -> None:
    names = list(report["runs"][0]["categories"])
    if len(names) < 2:
        return
    console.print("accept length by category:")
    table = _table()
    table.add_column("category")
    shown = _one_mode(report)
    for run in shown:
        table.add_column(f"{run['draft']}\nhead {run['head']}", justify="right")
    for name in names:
        table.add_row(name, *(f"{run['categories'][name]['accept_length']:.3f}" for run in shown))
    console.print(table)


def _print_lengths(report: dict[str, Any], console: Console) -> None:
    """Acceptance of the same questions in longer and longer contexts."""
    console.print("accept length of the same questions in longer contexts:")
    shown = _one_mode(report)
    table = _table()
    for name in ("length", "prompts", "mean\ntokens"):
        table.add_column(name, justify="right")
    for run in shown:
        for name in (f"{run['draft']}\nhead {run['head']}", "times the\nfirst", "steps"):
            table.add_column(name, justify="right")
    for place, first in enumerate(shown[0]["lengths"]["rows"]):
        cells = [str(first["length"]), str(first["prompts"]), f"{first['prompt_tokens']:.0f}"]
        for run in shown:
            row = run["lengths"]["rows"][place]
            cells += [
                _decimals(row["accept_length"], 3),
                _decimals(row["ratio"], 2),
                str(row["verify_steps"]),
            ]
        table.add_row(*cells)
    console.print(table)


def _print_places(report: dict[str, Any], console: Console) -> None:
    """Acceptance by the position of a step's anchor in its text, where there is more than one row."""
    shown = _one_mode(report)
    tables = [
        {(row["from"], row["to"]): row for row in run["positions"]["buckets"]} for run in shown
    ]
    places = sorted({place for rows in tables for place in rows})
    if len(places) < 2:
        return
    console.print("accept length by position in the text, without the last steps of an answer:")
    table = _table()
    table.add_column("positions")
    for run in shown:
        table.add_column(f"{run['draft']}\nhead {run['head']}", justify="right")
        table.add_column("steps", justify="right")
    for first, last in places:
        found = [rows.get((first, last)) for rows in tables]
        cells = [
            ("", "") if row is None else (f"{row['accept_length']:.3f}", str(row["verify_steps"]))
            for row in found
        ]
        table.add_row(f"{first}-{last}", *(cell for pair in cells for cell in pair))
    console.print(table)


def _print_verdicts(report: dict[str, Any], console: Console) -> None:
    """Where acceptance falls, and what may be behind it."""
    said = [
        f"{run['draft']} (head {run['head']}): {run[key]['verdict']}"
        for run in _one_mode(report)
        for key in ("lengths", "positions")
        if run.get(key, {}).get("verdict") is not None
    ]
    for line in [*said, CAUSES] if said else []:
        console.print(line)


def _one_mode(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One run a candidate: the modes agree, so their first suffices."""
    first = report["runs"][0]["mode"]
    return [run for run in report["runs"] if run["mode"] == first]


def agreement(report: dict[str, Any]) -> str:
    """One line on what the modes and plain decoding say of each other."""
    lines = []
    if report["lossless"]["checked"]:
        different = report["lossless"]["different"]
        lines.append(
            "greedy answers equal plain decoding, token for token"
            if not different
            else f"ANSWERS DIFFER from plain decoding: {', '.join(different[:3])}"
        )
    apart = disagreements(report)
    modes = list(dict.fromkeys(run["mode"] for run in report["runs"]))
    if len(modes) > 1:
        names = f"{', '.join(modes[:-1])} and {modes[-1]}"
        lost = sum(run["uncounted_requests"] for run in report["runs"])
        if lost:
            names = f"({lost} served requests cannot be compared) {names}"
        lines.append(
            f"{names} accept the same run at every step"
            if not apart
            else f"{names} DISAGREE: {', '.join(apart[:3])}"
        )
    return "; ".join(lines)


def disagreements(report: dict[str, Any]) -> list[str]:
    """Prompts whose accepted runs differ between modes of the same candidate.

    Where an engine left the order of the runs open, their histograms are compared.
    """
    seen: dict[tuple[str, str, str], dict[str, Any]] = {}
    apart = []
    for run in report["runs"]:
        for prompt in run["prompts"]:
            first = seen.setdefault((run["draft"], run["head"], prompt["id"]), prompt)
            known = [each["accepted_runs"] for each in (first, prompt)]
            field = "histogram" if None in known else "accepted_runs"
            if prompt[field] is not None and first[field] != prompt[field]:
                apart.append(f"{run['draft']} (head {run['head']}): {prompt['id']}")
    return apart


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report whole or not at all."""
    write_whole(path, json.dumps(report, indent=1) + "\n")


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Acceptance length, histogram of runs and acceptance by draft position, as a PNG."""
    from matplotlib.figure import Figure

    shown = _one_mode(report)
    names = [f"{run['draft']}\nhead {run['head']}" for run in shown]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    length, runs, position = figure.subplots(1, 3)
    bars = length.bar(names, [run["accept_length"] for run in shown], color=_colours(shown))
    length.bar_label(bars, fmt="%.2f")
    length.set(title="acceptance length (with bonus)")
    length.margins(y=0.12)
    width = 0.8 / len(shown)
    for index, run in enumerate(shown):
        total = max(1, run["verify_steps"])
        left = (index - (len(shown) - 1) / 2) * width
        places = [k + left for k in range(len(run["histogram"]))]
        shares = [count / total for count in run["histogram"]]
        runs.bar(places, shares, width, color=_colours(shown)[index])
        conditional = run["conditional_acceptance"]
        position.plot(
            range(1, len(conditional) + 1),
            [float("nan") if value is None else value for value in conditional],
            marker="o", color=_colours(shown)[index], label=names[index].replace("\n", ", "),
        )  # fmt: skip
    runs.set(title="drafts accepted in a step", ylabel="share of steps")
    position.set(title="acceptance given all before", xlabel="draft position", ylim=(0, 1))
    position.legend(fontsize="small")
    figure.suptitle(
        f"{Path(report['target']).name}, {shown[0]['mode']}, {shown[0]['num_proposals']} proposals"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _colours(runs: list[dict[str, Any]]) -> list[str]:
    return [f"C{index}" for index in range(len(runs))]
