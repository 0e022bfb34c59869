"""The report: agreement is really checked, equal proposals, a picture that can be opened."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from domino_kit.decoding import Sampling
from domino_kit.eval.measure import Candidate, Task, equal_proposals, measure
from domino_kit.eval.prompt_set import Prompt
from domino_kit.eval.report import (
    agreement,
    disagreements,
    print_report,
    write_json,
    write_picture,
)
from tests.tiny import random_prompts, tiny_draft, tiny_target


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    target = tiny_target(vocab=12)
    model = tiny_draft(vocab_size=12, block_size=4)
    ids = random_prompts(5, vocab=12)
    prompts = [Prompt(str(i), "even" if i % 2 == 0 else "odd", []) for i in range(5)]
    task = Task(prompts, ids, 20, [7], 3, 2, Sampling())
    candidates = [Candidate("a", model, target), Candidate("a", model, target, use_head=False)]
    result = measure(task, candidates, ["replay", "decode"], lambda _: None)
    return {"target": "tiny", "dtype": "float32", **result}


def test_modes_agree_and_answers_are_plain(report: dict[str, Any]) -> None:
    assert disagreements(report) == []
    assert report["lossless"] == {"checked": True, "different": []}
    assert "same run at every step" in agreement(report)


def test_one_different_run_is_named(report: dict[str, Any]) -> None:
    broken = copy.deepcopy(report)
    broken["runs"][1]["prompts"][3]["accepted_runs"][0] += 1
    assert disagreements(broken) == ["a (head domino): 3"]
    assert "DISAGREE" in agreement(broken)


def test_a_different_answer_is_named(report: dict[str, Any]) -> None:
    broken = {**report, "lossless": {"checked": True, "different": ["a: 2"]}}
    assert "ANSWERS DIFFER" in agreement(broken)


def test_categories_add_up(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        assert set(run["categories"]) == {"even", "odd"}
        steps = sum(part["verify_steps"] for part in run["categories"].values())
        assert steps == run["verify_steps"]


def test_the_table_shows_every_run(report: dict[str, Any]) -> None:
    text = io.StringIO()
    print_report(report, Console(file=text, width=160))
    for run in report["runs"]:
        assert f"{run['accept_length']:.3f}" in text.getvalue()


def test_picture_and_json(report: dict[str, Any], tmp_path: Path) -> None:
    write_picture(report, tmp_path / "deep" / "a.png")
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    write_json(report, tmp_path / "deep" / "a.json")
    assert [path.name for path in sorted((tmp_path / "deep").iterdir())] == ["a.json", "a.png"]


def test_comparisons_use_the_smaller_block(report: dict[str, Any]) -> None:
    target = tiny_target()
    small, large = (Candidate("x", tiny_draft(block_size=k), target) for k in (3, 6))
    assert equal_proposals([small, large], None) == 2
    assert equal_proposals([small, large], 1) == 1
    with pytest.raises(ValueError, match="allow 1 to 2"):
        equal_proposals([small, large], 3)
