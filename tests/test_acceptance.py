"""Runs, chains and every definition of acceptance length, on data small enough to check by hand."""

import random

import pytest

from domino_kit import acceptance
from domino_kit.acceptance import Acceptance

RUNS = [3, 2, 1, 0]
"""Four steps of three proposals each: 6 drafts accepted of 12."""


def naive_chain(proposals: list[list[int]], answer: list[int]) -> list[int]:
    """Decode token by token: compare, commit, and stop with the text."""
    runs: list[int] = []
    written = answer[:1]
    while written != answer:
        run = 0
        for token in proposals[len(written) - 1]:
            if len(written) == len(answer) or token != answer[len(written)]:
                break
            written.append(token)
            run += 1
        runs.append(run)
        if written != answer:
            written.append(answer[len(written)])
    return runs


def test_histogram() -> None:
    """One count for each possible run, 0 to the number of proposals."""
    assert acceptance.histogram(RUNS, 3) == [1, 1, 1, 1]
    assert acceptance.histogram([2, 2, 0], 4) == [1, 0, 2, 0, 0]
    assert acceptance.histogram([], 2) == [0, 0, 0]


def test_histogram_refuses_impossible_runs() -> None:
    """A run beyond the number of proposals is an error and never a wrong count."""
    for run in (4, -1):
        with pytest.raises(ValueError, match=f"run of {run}"):
            acceptance.histogram([run], 3)


def test_example_by_every_definition() -> None:
    """Runs 3, 2, 1, 0 have mean 1.5: each published definition, spelled out."""
    stats = Acceptance.of(RUNS, 3)
    assert stats.num_proposals == 3
    assert stats.verify_steps == 4
    assert stats.accepted_drafts == 6
    assert stats.accepted_drafts_per_step == 6 / 4
    assert stats.accept_length == 6 / 4 + 1
    assert stats.accept_rate == 6 / 12
    assert acceptance.vllm_accept_length(6, 4) == 2.5
    # 6 accepted + 4 bonus + the prefill's token, over 4 steps.
    assert acceptance.sglang_accept_length(11, 4) == 2.75
    assert acceptance.per_response_accept_length([[3, 2], [1, 0]]) == (3.5 + 1.5) / 2
    assert acceptance.per_response_accept_length([[3, 2, 1], [0]]) == (3.0 + 1.0) / 2


def test_example_marginal_and_conditional() -> None:
    """Shares by position: marginal over all steps, conditional over steps that got there."""
    stats = Acceptance.of(RUNS, 3)
    assert stats.marginal == [3 / 4, 2 / 4, 1 / 4]
    assert stats.conditional == [3 / 4, 2 / 3, 1 / 2]
    assert sum(stats.marginal) == stats.accepted_drafts_per_step


def test_speculators_product_differs_from_the_count() -> None:
    """The product of accuracies: 1.5 from conditional ones of these runs, 1.219 from marginal."""
    stats = Acceptance.of(RUNS, 3)
    conditional = [share for share in stats.conditional if share is not None]
    assert acceptance.speculators_eal(conditional) == pytest.approx(1.5)
    # .75 + .75·.5 + .75·.5·.25
    assert acceptance.speculators_eal(stats.marginal) == pytest.approx(1.21875)


def test_marginal_and_conditional_brute_force() -> None:
    """Both equal a loop over the single runs."""
    rng = random.Random(0)
    for proposals in (1, 3, 7):
        runs = [rng.randint(0, proposals) for _ in range(40)]
        stats = Acceptance.of(runs, proposals)
        for position in range(1, proposals + 1):
            reached = [run for run in runs if run >= position - 1]
            accepted = [run for run in runs if run >= position]
            assert stats.marginal[position - 1] == len(accepted) / len(runs)
            expected = len(accepted) / len(reached) if reached else None
            assert stats.conditional[position - 1] == expected


def test_conditional_none_where_never_reached() -> None:
    """A position that no step reached has no conditional share."""
    assert Acceptance.of([0, 1], 3).conditional == [0.5, 0.0, None]


def test_empty_statistics() -> None:
    """No steps (an answer of one token) give zeros, not a division by zero."""
    stats = Acceptance.of([], 3)
    assert (stats.accept_length, stats.accept_rate, stats.accepted_drafts_per_step) == (0, 0, 0)
    assert stats.marginal == [0, 0, 0] and stats.conditional == [None, None, None]
    assert acceptance.per_response_accept_length([[], []]) == 0
    assert acceptance.sglang_accept_length(1, 0) == acceptance.vllm_accept_length(0, 0) == 0


def test_per_response_skips_answers_without_steps() -> None:
    """An answer that the prefill finished takes no part in the mean."""
    assert acceptance.per_response_accept_length([[], [1]]) == 2.0


@pytest.mark.parametrize(
    ("proposed", "truth", "run"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 9, 7], 1),
        ([4, 6, 7], [5, 6, 7], 0),
        ([5, 6, 7], [5], 1),
        ([5], [], 0),
        ([], [5], 0),
    ],
)
def test_leading_run(proposed: list[int], truth: list[int], run: int) -> None:
    """Only leading equal tokens count, and never beyond the end of the truth."""
    assert acceptance.leading_run(proposed, truth) == run


def walked(drafts: list[list[int]], answer: list[int]) -> list[int]:
    """The chain through an answer from what was drafted after each of its tokens."""
    anchors = range(len(answer) - 1)
    return acceptance.chain_walk(
        [acceptance.leading_run(drafts[place], answer[place + 1 :]) for place in anchors]
    )


@pytest.mark.parametrize("proposals", [1, 3, 4, 8])
def test_chain_walk_against_simulation(proposals: int) -> None:
    """The walk equals a token-by-token simulation on random proposals."""
    rng = random.Random(proposals)
    for length in (1, 2, 5, 30):
        for _ in range(20):
            answer = [rng.randint(0, 1) for _ in range(length)]
            drafts = [[rng.randint(0, 1) for _ in range(proposals)] for _ in range(length)]
            assert walked(drafts, answer) == naive_chain(drafts, answer)


def test_chain_walk_commits_the_whole_answer() -> None:
    """First token + runs + one bonus a step cover the answer; a cut last step has no bonus."""
    rng = random.Random(1)
    for _ in range(50):
        answer = [rng.randint(0, 1) for _ in range(17)]
        drafts = [[rng.randint(0, 1) for _ in range(3)] for _ in answer]
        runs = walked(drafts, answer)
        assert 1 + sum(runs) + len(runs) in (17, 18)


def test_last_step_counts_only_the_answer() -> None:
    """Right drafts beyond the end of the answer do not count: 5 tokens, block of 8 right drafts."""
    answer = [1, 2, 3, 4, 5]
    drafts = [[2, 3, 4, 5, 6, 7, 8], *[[0] * 7 for _ in range(4)]]
    assert walked(drafts, answer) == [4]


def test_last_answer_token_is_never_an_anchor() -> None:
    """One token needs no step; proposals after the last token are not read."""
    assert walked([[9]], [4]) == []
    assert walked([], []) == []
    assert walked([[0]], [4, 5]) == [0]


def test_chain_walk_jumps_by_run_plus_one() -> None:
    """Positions inside a jump are not anchors, whatever was proposed there."""
    answer = [1, 2, 3, 4, 5, 6]
    right = [[2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 8]]
    assert walked(right, answer) == [2, 2]
    broken = [right[0], [0, 0], [0, 0], right[3], [0, 0], [0, 0]]
    assert walked(broken, answer) == [2, 2]


@pytest.mark.parametrize(
    ("block", "shift_label", "convention", "most"),
    [
        (16, True, "engine", 15),
        (16, False, "engine", 15),
        (16, True, "authors", 16),
        (16, False, "authors", 15),
        (2, False, "engine", 1),
    ],
)
def test_proposal_conventions(block: int, shift_label: bool, convention: str, most: int) -> None:
    """Engines serve B - 1 drafts in both modes; the authors' loop B with shift_label."""
    assert acceptance.max_proposals(block, shift_label, convention) == most


def test_unknown_convention_refused() -> None:
    """Another name is an error that lists the known ones."""
    with pytest.raises(ValueError, match=r"'vllm'.*engine.*authors"):
        acceptance.max_proposals(4, True, "vllm")


def test_teacher_forced_maximum_is_block_plus_one() -> None:
    """All rows right: B + 1 with shift_label (B supervised rows), B without (row 0 is not)."""
    right = [[True] * 8]
    assert acceptance.teacher_forced_accept_length(right, [[True] * 8]) == 9
    assert acceptance.teacher_forced_accept_length(right, [[False] + [True] * 7]) == 8


def test_teacher_forced_brute_force() -> None:
    """Mean over blocks with a valid row of 1 + Σ valid_k Π (correct or not valid)."""
    rng = random.Random(3)
    for _ in range(30):
        correct = [[rng.random() < 0.6 for _ in range(5)] for _ in range(6)]
        valid = [[rng.random() < 0.7 for _ in range(5)] for _ in range(6)]
        valid[0] = [False] * 5
        lengths = []
        for block in range(6):
            if not any(valid[block]):
                continue
            length = 1
            for k in range(5):
                good = all(correct[block][j] or not valid[block][j] for j in range(k + 1))
                length += int(valid[block][k] and good)
            lengths.append(length)
        found = acceptance.teacher_forced_accept_length(correct, valid)
        assert found == pytest.approx(sum(lengths) / len(lengths))


def test_teacher_forced_without_valid_rows() -> None:
    """Nothing supervised gives 0, not an error."""
    assert acceptance.teacher_forced_accept_length([[True]], [[False]]) == 0.0
