"""Replay against the decode loop: the same accepted run at every step, for every prompt."""

import itertools

import pytest

from domino_kit.decoding import generate
from domino_kit.replay import KnownAnswer, replay
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
