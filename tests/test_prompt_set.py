"""Prompts for measuring: conversations, named benchmarks in local copies, clear refusals."""

from pathlib import Path
from typing import Any

import pytest

from domino_kit.eval.prompt_set import BENCHMARKS, read_prompts
from tests.tiny_chat import write_jsonl

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a"},
        {"prompt": "a", "completion": "b"},
    ],
)
def test_every_layout_gives_the_prompt_without_its_answer(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [record])
    (prompt,) = read_prompts(str(path), None)
    assert prompt.messages == [USER]


def test_ids_categories_and_the_limit(tmp_path: Path) -> None:
    rows = [{"id": f"x{i}", "category": "c", "prompt": "a"} for i in range(5)]
    prompts = read_prompts(str(write_jsonl(tmp_path / "p.jsonl", rows)), 3)
    assert [prompt.prompt_id for prompt in prompts] == ["x0", "x1", "x2"]
    assert {prompt.category for prompt in prompts} == {"c"}


def test_earlier_turns_are_kept(tmp_path: Path) -> None:
    turns = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns}])
    assert read_prompts(str(path), None)[0].messages == turns


@pytest.mark.parametrize(
    ("name", "record", "text", "category"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "1+1?", "gsm8k"),
        ("humaneval", {"task_id": "0", "prompt": "def f():"}, "def f():", "humaneval"),
        ("mt-bench", {"prompt": ["first", "second"], "category": "maths"}, "first", "maths"),
        ("alpaca", {"instruction": "Add", "input": "1 2", "output": "3"}, "Add\n1 2", "alpaca"),
        ("alpaca", {"instruction": "Add", "input": "", "output": "3"}, "Add", "alpaca"),
        ("math500", {"problem": "x=1", "subject": "Algebra"}, "x=1", "Algebra"),
    ],
)
def test_a_local_copy_of_a_benchmark(
    tmp_path: Path, name: str, record: dict[str, Any], text: str, category: str
) -> None:
    assert name in BENCHMARKS
    path = write_jsonl(tmp_path / "copy.jsonl", [record])
    (prompt,) = read_prompts(f"{name}={path}", None)
    assert prompt.messages == [{"role": "user", "content": text}]
    assert prompt.category == category


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": [{"role": "assistant", "content": "b"}]}], "p.jsonl:1 has no prompt"),
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], "p.jsonl:1 has no prompt"),
        ([{"question": "a"}], "p.jsonl:1 has fields"),
        ([7], "p.jsonl:1 is a int"),
    ],
)
def test_rows_without_a_prompt_are_named(tmp_path: Path, rows: list[Any], words: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(ValueError) as error:
        read_prompts(str(path), None)
    assert words in str(error.value)


def test_an_unknown_benchmark_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gsm8k, humaneval, mt-bench, alpaca, math500"):
        read_prompts("gms8k", None)
