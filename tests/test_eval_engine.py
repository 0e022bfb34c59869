"""`domino eval-acceptance --engine`: its refusals, counts of a cut step, and one real measurement."""

import json
from pathlib import Path
from typing import Any

import pytest

from domino_kit.eval.engine import Level, sweep, without_draft
from domino_kit.eval.lengths import length_rows
from domino_kit.eval.report import disagreements
from domino_kit.eval.served import ServedAnswer
from tests.command import domino, refused


def answer(pieces: list[int], histogram: list[int], **fields: Any) -> ServedAnswer:
    """A served answer of as many tokens as its pieces hold."""
    return ServedAnswer(
        tokens=list(range(sum(pieces))),
        arrivals=[0.1 * (place + 1) for place in range(len(pieces))],
        pieces=pieces,
        histogram=histogram,
        verify_steps=sum(histogram),
        **fields,
    )


def test_an_answer_that_ends_with_a_step_is_counted_as_it_is() -> None:
    whole = answer([1, 3, 1, 4], [1, 0, 1, 1])
    assert whole.surplus == 0
    assert whole.accepted_runs == [2, 0, 3]
    assert whole.cut_histogram(3) == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("kept", "run", "wanted"),
    [(1, 1, [1, 1, 1, 0]), (2, 2, [1, 0, 2, 0]), (3, 3, [1, 0, 1, 1])],
)
def test_drafts_beyond_a_cut_do_not_count(kept: int, run: int, wanted: list[int]) -> None:
    """The engine accepted 3 drafts in the last step, of which only ``kept`` tokens were wanted."""
    cut = answer([1, 3, 1, kept], [1, 0, 1, 1])
    assert cut.surplus == 4 - kept
    assert cut.accepted_runs == [2, 0, run]
    assert cut.cut_histogram(3) == wanted


def test_merged_pieces_leave_the_histogram() -> None:
    merged = answer([1, 4, 4], [1, 0, 1, 1])
    assert merged.accepted_runs is None
    assert merged.cut_histogram(3) == [1, 0, 1, 1]
    # Surplus 3: only a step with 3 drafts can have produced it.
    assert answer([1, 4, 1], [1, 0, 1, 1]).cut_histogram(3) == [1, 1, 1, 0]
    # Surplus 1: a step with 2 drafts or one with 3.
    assert answer([1, 4, 3], [1, 0, 1, 1]).cut_histogram(3) is None


def test_a_prompt_computed_twice_gives_one_token_more() -> None:
    again = answer([1, 3, 2, 4], [1, 0, 1, 1], prefills=2)
    assert again.surplus == 0
    assert again.accepted_runs is None
    assert again.cut_histogram(3) is None


def test_times_of_an_answer() -> None:
    assert answer([1, 3, 1, 4], [1, 0, 1, 1]).first_token_seconds == pytest.approx(0.1)
    assert answer([1, 3, 1, 4], [1, 0, 1, 1]).token_seconds == pytest.approx(0.3 / 8)


def test_the_sweep_says_where_speculation_stops_paying() -> None:
    def level(count: int, seconds: float) -> Level:
        return Level(count, [answer([1, 3], [0, 0, 1])], seconds)

    found = sweep([level(1, 1.0), level(4, 1.0)], [level(1, 2.0), level(4, 0.5)])
    assert [row["ratio"] for row in found["levels"]] == [2.0, 0.5]
    assert found["stops_paying_at"] == 4
    assert sweep([level(1, 1.0)], None)["stops_paying_at"] is None


def test_the_baseline_is_the_same_command_without_its_draft() -> None:
    command = ["python", "-m", "x", "--model-path", "m", "--speculative-algorithm", "DOMINO",
               "--speculative-domino-candidate-pool-size", "0", "--port", "3", "--disable-cuda-graph",
               "--speculative-draft-model-path=d", "--log-level", "info"]  # fmt: skip
    assert without_draft(command) == [
        "python", "-m", "x", "--model-path", "m", "--port", "3", "--disable-cuda-graph",
        "--log-level", "info",
    ]  # fmt: skip


def test_disagreements_fall_back_to_histograms() -> None:
    def run(mode: str, runs: list[int] | None, histogram: list[int] | None) -> dict[str, Any]:
        prompt = {"id": "a", "accepted_runs": runs, "histogram": histogram}
        return {"draft": "d", "head": "domino", "mode": mode, "prompts": [prompt]}

    replayed = run("replay", [1, 0], [1, 1])
    assert disagreements({"runs": [replayed, run("served", None, [1, 1])]}) == []
    assert disagreements({"runs": [replayed, run("served", None, [2, 0])]}) == [
        "d (head domino): a"
    ]
    assert disagreements({"runs": [replayed, run("served", [0, 1], [1, 1])]}) != []
    assert disagreements({"runs": [replayed, run("served", None, None)]}) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:9"], ["--engine sglang"]),
        (["--", "--log-level", "info"], ["--engine sglang"]),
        (["--engine", "sglang", "--compare", "off"], ["--compare", "--engine"]),
        (["--engine", "both", "--num-proposals", "2"], ["--num-proposals", "draft-tokens"]),
        (["--engine", "both", "--", "--speculative-num-draft-tokens", "3"], ["block 3", "both"]),
        (["--engine", "both", "--", "--speculative-domino-candidate-pool-size", "8"], ["pool 8"]),
        (["--engine", "both", "--temperature", "1"], ["replay", "--mode decode"]),
        (["--engine", "sglang", "--baseline-url", "http://x"], ["--baseline-url", "--url"]),
        (["--engine", "sglang", "--url", "http://x", "--", "--tp", "1"], ["--url", "--"]),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    pytest.importorskip("sglang")
    from tests.serving import trained_pair
    from tests.tiny_chat import write_jsonl

    pair = trained_pair(tmp_path, steps=1)
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "say 3"}])
    refused(domino("eval-acceptance", "--draft", pair.draft, "--prompts", data, *flags), *words)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[bad", "nonsense"])
def test_a_url_without_a_server_is_one_line(tmp_path: Path, url: str) -> None:
    from tests.serving import trained_pair
    from tests.tiny_chat import write_jsonl

    pair = trained_pair(tmp_path, steps=1)
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "say 3"}])
    result = domino(
        "eval-acceptance", "--draft", pair.draft, "--prompts", data, "--engine", "sglang",
        "--url", url,
    )  # fmt: skip
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (
        result.stderr.strip().splitlines()[-1].startswith(f"Error: {url} is not an SGLang server")
    )


def test_concurrency_must_be_a_list_of_numbers() -> None:
    result = domino("eval-acceptance", "--draft", "x", "--prompts", "y", "--concurrency", "1,zero")
    assert result.returncode == 2
    assert "1,zero" in result.stderr


@pytest.mark.sglang
@pytest.mark.slow
def test_all_three_ways_agree_through_the_command(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    from tests.serving import trained_pair
    from tests.tiny_chat import write_jsonl

    pair = trained_pair(tmp_path)
    rows = [{"prompt": f"say {place}"} for place in range(6)]
    data = write_jsonl(tmp_path / "prompts.jsonl", rows)
    result = domino(
        "eval-acceptance", "--draft", pair.draft, "--prompts", data, "--engine", "both",
        "--max-new-tokens", "30", "--concurrency", "1,4", "--output", tmp_path / "report.json",
        "--lengths", "32,200", "--limit", "3", "--", "--log-level", "warning",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "replay, decode and served accept the same run at every step" in said
    assert "the same server without the draft" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert [run["mode"] for run in report["runs"]] == ["replay", "decode", "served"]
    by_length = [run["lengths"]["rows"] for run in report["runs"]]
    assert by_length[0] == by_length[1]
    # A prompt's served steps are unknown where the server merged pieces of its answer: the served
    # rows must then be replay's over the other prompts.
    replayed, served = report["runs"][0], report["runs"][2]
    tokens = [row["prompt_tokens"] for row in by_length[0] for _ in range(3)]
    runs = [
        None if theirs["accepted_runs"] is None else ours["accepted_runs"]
        for ours, theirs in zip(replayed["prompts"], served["prompts"], strict=True)
    ]
    pairs = list(zip(tokens, runs, strict=True))
    assert by_length[2] == length_rows([32, 200], pairs, replayed["num_proposals"])
    assert any(run is not None for run in runs)
    assert [row["prompts"] for row in by_length[0]] == [3, 3]
    assert [level["concurrency"] for level in report["sweep"]["levels"]] == [1, 4]
    assert all(level["ratio"] > 0 for level in report["sweep"]["levels"])
    assert report["libraries"]["sglang"] == "0.5.23"
    assert report["engine"]["draft"]["candidate_pool_size"] == 0
