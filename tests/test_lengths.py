"""Acceptance by position and by length of the context: arithmetic, long prompts, and the command."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from domino_kit.eval.lengths import (
    build_long_prompts,
    choose_questions,
    default_lengths,
    length_rows,
    longest_prompt,
    sweep_lengths,
)
from domino_kit.eval.positions import bucket_of, positions_table, verdict, whole_steps
from domino_kit.eval.prompt_set import Prompt
from domino_kit.target import load_tokenizer
from tests.command import domino, refused
from tests.serving import Pair, trained_pair
from tests.tiny_chat import tiny_tokenizer, write_jsonl

PROPOSALS = 3
TEXTS = ("say 1, then tell me of the cat", "name a dog\n\nand a sea", "say 3 of the sun", "a moon?")


def ask(text: str) -> Prompt:
    return Prompt(text[:5], "all", [{"role": "user", "content": text}])


PROMPTS = [ask(text) for text in TEXTS]


# -- positions -----------------------------------------------------------------------------------


def labelled_steps(prompt: int, runs: list[int]) -> list[tuple[int, int]]:
    """The steps that count, read off a text in which every token is labelled."""
    labels = ["prompt"] * prompt
    for run in runs:
        labels += ["anchor", *["draft"] * run]
    labels.append("last")
    steps = []
    for place, label in enumerate(labels):
        following = labels[place + 1 : place + 1 + PROPOSALS]
        if label == "anchor" and len(following) == PROPOSALS and "last" not in following:
            stop = (i for i, each in enumerate(following) if each != "draft")
            steps.append((place, next(stop, PROPOSALS)))
    return steps


@pytest.mark.parametrize("bucket", [None, 1, 50])
def test_the_table_equals_a_walk_over_labelled_tokens(bucket: int | None) -> None:
    rng = random.Random(5)
    answers = [
        (rng.randint(1, 300), [rng.randint(0, PROPOSALS) for _ in range(rng.randint(0, 40))])
        for _ in range(60)
    ]
    table = positions_table([*answers, (9, None)], PROPOSALS, bucket)
    steps = [step for prompt, runs in answers for step in labelled_steps(prompt, runs)]
    for row in table["buckets"]:
        inside = [run for place, run in steps if row["from"] <= place <= row["to"]]
        assert row["verify_steps"] == len(inside)
        assert row["accept_length"] == pytest.approx(1 + sum(inside) / len(inside))
    borders = [(row["from"], row["to"]) for row in table["buckets"]]
    assert all(high < low for (_, high), (low, _) in zip(borders, borders[1:], strict=False))
    assert sum(row["verify_steps"] for row in table["buckets"]) == len(steps)
    assert table["left_out_steps"] == sum(len(runs) for _, runs in answers) - len(steps)
    assert table["left_out_prompts"] == 1


def test_no_counted_step_was_cut_by_the_end_of_its_answer() -> None:
    rng = random.Random(6)
    for _ in range(200):
        wished = [rng.randint(0, PROPOSALS) for _ in range(60)]
        left, runs = rng.randint(0, 80), []
        while left > 0:  # as decoding with a limit: a step's last tokens may be too many
            runs.append(min(wished[len(runs)], left))
            left -= wished[len(runs) - 1] + 1
        counted = [run for _, run in whole_steps(7, runs, PROPOSALS)]
        assert counted == wished[: len(counted)]
        assert len(runs) - len(counted) <= PROPOSALS + 1


def test_buckets_are_powers_of_two_or_equally_wide() -> None:
    assert [bucket_of(place, None) for place in (0, 63, 64, 127, 128, 4095)] == [
        (0, 63), (0, 63), (64, 127), (64, 127), (128, 255), (2048, 4095),
    ]  # fmt: skip
    assert [bucket_of(place, 100) for place in (0, 99, 100)] == [(0, 99), (0, 99), (100, 199)]


def row(first: int, steps: int, length: float, error: float = 0.01) -> dict[str, Any]:
    return {"from": first, "to": first + 9, "verify_steps": steps, "accept_length": length,
            "standard_error": error}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(0, 90, 2.0), row(10, 30, 3.0), row(20, 30, 2.4)], ["20%", "10-19", "20-29"]),
        ([row(0, 30, 3.0), row(10, 30, 2.0), row(20, 30, 1.5)], ["50%", "0-9", "20-29"]),
        ([row(0, 30, 3.0), row(10, 30, 2.6)], None),  # by less than 15 %
        ([row(0, 30, 3.0), row(10, 29, 1.0)], None),  # too few steps
        ([row(0, 29, 3.0), row(10, 30, 1.0)], None),
        ([row(0, 30, 3.0, 0.2), row(10, 30, 2.2, 0.2)], None),  # 2.8 standard errors
        ([row(0, 30, 2.0), row(10, 30, 3.0)], None),  # it rises
    ],
)
def test_the_verdict_follows_its_rule(rows: list[dict[str, Any]], words: list[str] | None) -> None:
    said = verdict(rows)
    assert (said is None) == (words is None)
    for word in words or []:
        assert said is not None and word in said


# -- long prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [90, 128, 1000])
def test_long_prompts_fill_their_length_and_end_with_the_question(length: int) -> None:
    tokenizer = tiny_tokenizer()
    longest_word = max(len(word) for text in TEXTS for word in text.split()) + len("\n\n")
    found = build_long_prompts(tokenizer, PROMPTS, None, length, 3)
    assert found == build_long_prompts(tokenizer, PROMPTS, None, length, 3)
    assert len(found) == 3
    for ids, text, others in zip(found, TEXTS, (TEXTS[1:], TEXTS[2:], TEXTS[3:]), strict=False):
        assert length - longest_word <= len(ids) <= length
        said = tokenizer.decode(ids)
        assert said.endswith(f"{text}<|im_end|>\n<|im_start|>assistant\n")
        assert said.startswith(f"<|im_start|>user\nSome notes:\n\n{others[0][:8]}")


def test_earlier_turns_stay_and_text_without_spaces_is_cut() -> None:
    talk = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and now?"},
    ]
    prompts = [Prompt("talk", "all", talk), ask("一" * 500)]
    (ids,) = build_long_prompts(tiny_tokenizer(), prompts, None, 400, 1)
    said = tiny_tokenizer().decode(ids)
    assert 340 < len(ids) <= 400
    assert said.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert said.count("The question:") == 1 and "一" * 80 in said


def test_the_same_questions_are_asked_at_every_length() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [ask("x" * 90), *PROMPTS]
    lengths, ordered, count = choose_questions(tokenizer, prompts, None, [300, 80, 300], 2, 400)
    assert (lengths, count) == ([80, 300], 2)
    assert ordered == [*PROMPTS[:2], prompts[0], *PROMPTS[2:]]
    assert choose_questions(tokenizer, prompts, None, [], 9, 400)[0] == [128, 256, 400]
    assert default_lengths(20, 300) == [64, 128, 256, 300]
    assert default_lengths(64, 256) == [64, 128, 256]


def test_what_cannot_be_asked_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="--lengths 401 is too long"):
        choose_questions(tokenizer, PROMPTS, None, [100, 401], 2, 400)
    with pytest.raises(ValueError, match=r"no prompt fits in a context of 20 tokens.* has 26"):
        choose_questions(tokenizer, PROMPTS, None, [20], 2, 400)
    with pytest.raises(ValueError, match="other prompts' texts"):
        build_long_prompts(tokenizer, PROMPTS[:1], None, 100, 1)
    with pytest.raises(ValueError, match="alone has"):
        build_long_prompts(tokenizer, PROMPTS, None, 40, 1)
    with pytest.raises(ValueError, match="512 positions"):
        longest_prompt(512, 508, 4)


def test_a_row_for_each_length() -> None:
    short, long = [3, 3, 3, 3, 3, 0], [0, 0, 0, 3, 0, 0, 0, 0]
    rows = length_rows([8, 16], [(7, short), (8, None), (15, long), (16, long)], PROPOSALS)
    assert [each["prompts"] for each in rows] == [1, 2]
    assert [each["prompt_tokens"] for each in rows] == [7.5, 15.5]
    assert [each["verify_steps"] for each in rows] == [5, 10]
    assert [each["accept_length"] for each in rows] == [4.0, 1.6]
    assert [each["ratio"] for each in rows] == [1.0, 0.4]
    empty = length_rows([8, 16], [(7, [0]), (15, long)], PROPOSALS)
    assert empty[0]["accept_length"] is None and empty[1]["ratio"] is None


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that was trained on texts of at most 72 tokens."""
    return trained_pair(tmp_path_factory.mktemp("lengths"), steps=100)


def test_the_command_sweeps_and_sees_the_fall_of_a_draft_trained_on_short_rows(
    pair: Pair, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    result = domino(
        "eval-acceptance", "--draft", pair.draft, "--prompts", data, "--mode", "replay",
        "--lengths", "64,384", "--limit", "2", "--max-new-tokens", "64", "--bucket", "128",
        "--output", tmp_path / "report.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (run,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    rows, buckets = run["lengths"]["rows"], run["positions"]["buckets"]
    assert [each["length"] for each in rows] == [64, 384]
    assert [each["prompts"] for each in rows] == [2, 2]
    assert 376 <= rows[1]["prompt_tokens"] <= 384
    assert {each["from"] for each in buckets} == {0, 256, 384}
    assert sum(each["verify_steps"] for each in rows) == sum(
        each["verify_steps"] for each in buckets
    )
    assert "contexts of 384 tokens" in run["lengths"]["verdict"]
    assert run["lengths"]["verdict"] in " ".join(result.stdout.split())
    assert "256-383" in result.stdout

    target, draft = pair.load()
    tokenizer = load_tokenizer(str(pair.target), False)
    prompts = [ask(text) for text in TEXTS]
    assert rows == sweep_lengths(
        target, draft, tokenizer, prompts, None, [64, 384], 2, 64, [3], lambda _: None
    )


def test_a_length_beyond_the_context_is_refused(pair: Pair, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])
    refused(
        domino("eval-acceptance", "--draft", pair.draft, "--prompts", data, "--lengths", "64,500"),
        "--lengths 500", "252 tokens",
    )  # fmt: skip
