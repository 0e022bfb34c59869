"""The report of `domino check`: on the terminal, as JSON, and as a page to look at."""

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from domino_kit.checkpoint import write_whole
from domino_kit.contract import Finding
from domino_kit.eval.report import write_json
from domino_kit.manifest import library_versions
from domino_kit.parity import StageResult, rule
from domino_kit.trace import STAGES

if TYPE_CHECKING:
    from domino_kit.eval.check import Outcome


def print_contract(outcome: "Outcome", console: Console) -> None:
    """What the files, and a server, say: differences first, then what could not be compared."""
    contract = outcome.contract
    console.print(f"draft {outcome.draft}, target {outcome.target or 'not given'}")
    console.print(
        f"contract: {len(contract.checked)} facts compared, {len(contract.errors)} differ, "
        f"{len(contract.warnings)} warnings, {len(contract.unchecked)} could not be compared"
    )
    for finding in contract.errors:
        console.print(f"  MISMATCH {finding.name}: {finding.message}")
    for finding in contract.warnings:
        allowed = " (allowed)" if finding.name in contract.allowed else ""
        console.print(f"  warning {finding.name}{allowed}: {finding.message}")
    for line in contract.unchecked:
        console.print(f"  not compared {line}")


def print_stages(outcome: "Outcome", console: Console, *, static: bool) -> None:
    """The table of stages, what is wrong and why, and the verdict in the last line."""
    if outcome.traces is not None:
        for tolerance in dict.fromkeys(each for _, each in outcome.traces.paths.values()):
            console.print(f"stages against the training graph: {rule(tolerance)}")
        console.print(_table(outcome.stages))
    for note in outcome.notes:
        console.print(f"note: {note}")
    if outcome.steps:
        console.print(
            f"acceptance length {outcome.steps['accept_length']:.2f} over "
            f"{outcome.steps['verify_steps']} steps (bonus token counted)"
        )
    if outcome.lengths:
        console.print("acceptance of the same questions in longer contexts (replay):")
        console.print(_lengths_table(outcome.lengths))
    console.print(verdict(outcome, static=static))


def verdict(outcome: "Outcome", *, static: bool = False) -> str:
    """One line: what is wrong first, or that nothing is."""
    finding = deciding(outcome)
    if finding is not None:
        return f"NOT AS TRAINED: contract, {finding.name}: {finding.message}"
    if outcome.cause is not None:
        cause = outcome.cause
        return f"NOT AS TRAINED: {cause.stage} ({cause.path}), {cause.name}: {cause.text}"
    if static or outcome.traces is None:
        return "as trained, by its files; stages were not run"
    names = ", ".join(outcome.traces.paths)
    return f"as trained: {names} agree with the training graph at every stage"


def deciding(outcome: "Outcome") -> Finding | None:
    """The finding of the contract that decides, unless a stage says more."""
    errors = outcome.contract.blocking
    if not errors and outcome.cause is None:
        errors = outcome.contract.errors
    return errors[0] if errors else None


def _table(stages: list[StageResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("stage", "worst path", "steps", "absolute", "relative", "from", ""):
        table.add_column(name, justify="left" if name in ("stage", "worst path", "") else "right")
    for row in by_stage(stages):
        worst = row[0]
        table.add_row(
            worst.stage,
            worst.path,
            str(sum(each.steps for each in row)),
            f"{worst.worst.absolute:.2g}",
            f"{worst.worst.relative:.2g}",
            "" if worst.worst.place is None else str(worst.worst.place),
            "agrees" if worst.agrees else "DIFFERS",
        )
    return table


def _lengths_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("length", "mean tokens", "steps", "accept length", "times the first"):
        table.add_column(name, justify="right")
    for row in rows:
        known = row["accept_length"] is not None and row["ratio"] is not None
        table.add_row(
            str(row["length"]),
            f"{row['prompt_tokens']:.0f}",
            str(row["verify_steps"]),
            f"{row['accept_length']:.3f}" if known else "",
            f"{row['ratio']:.2f}" if known else "",
        )
    return table


def by_stage(stages: list[StageResult]) -> list[list[StageResult]]:
    """Results grouped by stage, in order; in each group what differs or differs most comes first."""
    groups = [[each for each in stages if each.stage == stage] for stage in STAGES]
    return [
        sorted(group, key=lambda each: (each.agrees, -each.worst.relative))
        for group in groups
        if group
    ]


def to_json(outcome: "Outcome") -> dict[str, Any]:
    """Everything for programs."""
    cause, finding = outcome.cause, deciding(outcome)
    stage, name, said = (cause.stage, cause.name, cause.sentence) if cause else (None, None, None)
    if finding is not None:
        stage, name, said = "contract", finding.name, finding.message
    return {
        "verdict": "mismatch" if outcome.mismatch else "as trained",
        "stage": stage,
        "cause": name,
        "explanation": said,
        "draft": str(outcome.draft),
        "target": outcome.target,
        "contract": outcome.contract.to_json(),
        "stages": [
            {
                "stage": each.stage,
                "path": each.path,
                "steps": each.steps,
                "absolute": each.worst.absolute,
                "relative": each.worst.relative,
                "from": each.worst.place,
                "agrees": each.agrees,
            }
            for each in outcome.stages
        ],
        "runs": outcome.traces.runs if outcome.traces else {},
        "acceptance": outcome.steps,
        "lengths": outcome.lengths,
        "notes": outcome.notes,
        "libraries": library_versions(),
    }


def write_reports(outcome: "Outcome", output: Path | None, page: Path | None) -> None:
    """Write JSON and page, each whole or not at all."""
    report = to_json(outcome)
    if output is not None:
        write_json(report, output)
    if page is not None:
        write_whole(page, render_page(report, verdict(outcome)))


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
td, th { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b00020; font-weight: 600 } .good { color: #146c2e }
.bar { background: #ddd; height: .6rem; width: 10rem } .bar div { background: #146c2e; height: 100% }
.bar.off div { background: #b00020 }
"""


def render_page(report: dict[str, Any], line: str) -> str:
    """The report as one HTML file without scripts or outside references."""
    good = report["verdict"] == "as trained"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>domino check: {report['verdict']}</title><style>{STYLE}</style>",
        f"<h1 class='{'good' if good else 'bad'}'>{html.escape(line)}</h1>",
        f"<p>draft <code>{html.escape(report['draft'])}</code>, target "
        f"<code>{html.escape(str(report['target']))}</code></p>",
        _page_contract(report["contract"]),
        _page_stages(report["stages"]),
        *(f"<p>{html.escape(note)}</p>" for note in report["notes"]),
        "</html>\n",
    ]
    return "\n".join(parts)


def _page_contract(contract: dict[str, Any]) -> str:
    rows = [
        f"<tr><td class='{'bad' if each['severity'] == 'error' else ''}'>{each['name']}</td>"
        f"<td>{html.escape(each['message'])}</td></tr>"
        for each in contract["findings"]
    ]
    unchecked = "".join(f"<li>{html.escape(line)}</li>" for line in contract["unchecked"])
    return (
        f"<h2>Contract</h2><p>Compared: {', '.join(contract['checked'])}.</p>"
        f"<table>{''.join(rows)}</table>"
        + (f"<p>Could not be compared:</p><ul>{unchecked}</ul>" if unchecked else "")
    )


def _page_stages(stages: list[dict[str, Any]]) -> str:
    """A table with a bar for each difference: the longer, the more digits are lost."""
    if not stages:
        return ""
    rows = []
    for each in stages:
        digits = 0.0 if each["relative"] <= 0 else max(0.0, 8 + _log10(each["relative"]))
        width = min(100.0, 100 * digits / 8)
        off = "" if each["agrees"] else " off"
        place = "" if each["from"] is None else each["from"]
        rows.append(
            f"<tr><td>{each['stage']}</td><td>{each['path']}</td>"
            f"<td class='number'>{each['absolute']:.2g}</td>"
            f"<td class='number'>{each['relative']:.2g}</td><td class='number'>{place}</td>"
            f"<td><div class='bar{off}'><div style='width:{width:.0f}%'></div></div></td>"
            f"<td class='{'good' if each['agrees'] else 'bad'}'>"
            f"{'agrees' if each['agrees'] else 'differs'}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("stage", "path", "absolute", "relative", "from", "digits lost of 8", "")
    )
    return f"<h2>Stages</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _log10(value: float) -> float:
    return math.log10(value) if value < float("inf") else 0.0
