"""Replay against the decode loop: the same accepted run at every step, for every prompt."""

import itertools

import pytest
import torch

from domino_kit.acceptance import leading_run
from domino_kit.decoding import generate
from domino_kit.replay import (
    KnownAnswer,
    block_rows,
    known_runs,
    project,
    propose_at,
    replay,
)
from tests.tiny import random_prompts, tiny_draft, tiny_target

FLAGS = list(itertools.product([True, False], [True, False]))


@pytest.mark.parametrize(("shift_label", "use_head"), FLAGS)
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_replay_equals_decode(shift_label: bool, use_head: bool, block_size: int) -> None:
    target = tiny_target(vocab=12)
    model = tiny_draft(shift_label, block_size=block_size, vocab_size=12)
    prompts = random_prompts(9, vocab=12)
    plain = generate(target, None, prompts, 40, [7])
    texts = [KnownAnswer(p, a.tokens) for p, a in zip(prompts, plain, strict=True)]
    assert {len(text.answer) for text in texts} != {40}, "some answers must end by themselves"
    decoded = generate(target, model, prompts, 40, [7], use_head=use_head)
    runs = replay(target, model, texts, use_head=use_head, batch_size=4, chunk_anchors=5)
    assert runs == [answer.accepted_runs for answer in decoded]
    assert any(run for answer in runs for run in answer), "some drafts must be accepted"


@pytest.mark.parametrize("chunk_anchors", [1, 3, 1000])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_chunks_and_batches_do_not_matter(chunk_anchors: int, batch_size: int) -> None:
    target, model = tiny_target(), tiny_draft()
    texts = [KnownAnswer(prompt, prompt[::-1] * 2) for prompt in random_prompts(5)]
    sizes = {"batch_size": batch_size, "chunk_anchors": chunk_anchors}
    assert replay(target, model, texts, **sizes) == replay(target, model, texts)


@pytest.mark.parametrize("num_proposals", [1, 2, 4])
def test_other_numbers_of_proposals(num_proposals: int) -> None:
    target, model = tiny_target(), tiny_draft()
    prompts = random_prompts(4)
    plain = generate(target, None, prompts, 20, [])
    texts = [KnownAnswer(p, a.tokens) for p, a in zip(prompts, plain, strict=True)]
    decoded = generate(target, model, prompts, 20, [], num_proposals=num_proposals)
    runs = replay(target, model, texts, num_proposals=num_proposals)
    assert runs == [answer.accepted_runs for answer in decoded]


def test_a_one_token_answer_takes_no_step() -> None:
    assert replay(tiny_target(), tiny_draft(), [KnownAnswer([3, 4], [5])]) == [[]]


def test_one_pass_drafts_wherever_many_texts_stand() -> None:
    """Texts of all lengths together, each finishing at its own time, and in the caller's order."""
    target, model = tiny_target(vocab=12), tiny_draft(vocab_size=12)
    prompts = random_prompts(40, vocab=12)
    plain = generate(target, None, prompts, 25, [])
    lengths = [1 + place * 7 % 25 for place in range(40)]
    texts = [KnownAnswer(p, a.tokens[:n]) for p, a, n in zip(prompts, plain, lengths, strict=True)]
    together = replay(target, model, texts, batch_size=40)
    assert together == [replay(target, model, [text])[0] for text in texts]


@pytest.mark.parametrize("use_head", [True, False])
@pytest.mark.parametrize("shift_label", [True, False])
def test_known_runs_are_those_of_free_running_proposals(shift_label: bool, use_head: bool) -> None:
    """At every position, also of a text that the target would not write."""
    target = tiny_target(vocab=6)
    model = tiny_draft(shift_label, vocab_size=6, block_size=5)
    text = KnownAnswer([2, 3, 4], torch.randint(6, (60,), generator=torch.Generator()).tolist())
    ids = torch.tensor([text.tokens])
    context = project(model, target.encode(ids, torch.ones_like(ids)).features)
    anchors, ends = torch.arange(3, 62), torch.tensor([62])
    free = propose_at(target, model, context, ids[0], anchors, 4, use_head=use_head)
    hidden = block_rows(target, model, context, ids, anchors[None])
    found = known_runs(target, model, hidden, ids, anchors[None], ends, 4, use_head)
    wanted = [
        leading_run(proposals, text.tokens[anchor + 1 :])
        for anchor, proposals in zip(anchors.tolist(), free.tolist(), strict=True)
    ]
    assert found[0].tolist() == wanted
    assert len(set(wanted)) > 2
