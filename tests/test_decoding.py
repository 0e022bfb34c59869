"""Draft, verify, accept: output equals the target's own, and runs equal those of a chain walk."""

import functools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from domino_kit import acceptance, decoding
from domino_kit.decoding import Proposal, Sampling
from domino_kit.kv_cache import DraftCache
from domino_kit.modeling import DominoDraft
from domino_kit.target import Target
from tests.tiny import FAMILIES, plain_greedy, random_prompts, tiny_draft, tiny_model, tiny_target

MODES = [True, False]
LENGTH = 128


@functools.cache
def shared_target(family: str = "qwen3") -> Target:
    return tiny_target(family)


@functools.cache
def plain_answers(
    family: str = "qwen3", count: int = 20, length: int = LENGTH
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of different lengths and the answers of transformers' own generate."""
    prompts = random_prompts(count)
    model = shared_target(family).model
    return prompts, [plain_greedy(model, prompt, length) for prompt in prompts]


def tokens(answers: list[decoding.Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def runs(answers: list[decoding.Answer]) -> list[list[int]]:
    return [answer.accepted_runs for answer in answers]


def cut(answer: list[int], end_tokens: list[int]) -> list[int]:
    """The answer up to its first end token."""
    for place, token in enumerate(answer):
        if token in end_tokens:
            return answer[: place + 1]
    return answer


class Oracle:
    """Stands in for ``decoding.draft``: proposes a known text, wrong at every ``wrong_every``-th.

    Rows of a batch are told apart by nothing, so it serves batches that finish together.
    """

    def __init__(self, texts: list[list[int]], wrong_every: int = 0) -> None:
        self.texts = texts
        self.wrong_every = wrong_every

    def __call__(
        self,
        _model: Any,
        _target: Any,
        anchor_tokens: torch.Tensor,
        anchors: torch.Tensor,
        _cache: Any,
        num_proposals: int,
        **_: Any,
    ) -> Proposal:
        assert len(anchors) == len(self.texts)
        rows = []
        for text, anchor, token in zip(
            self.texts, anchors.tolist(), anchor_tokens.tolist(), strict=True
        ):
            assert text[anchor] == token, "the anchor is a committed token of the text"
            following = [*text[anchor + 1 :], *[0] * num_proposals][:num_proposals]
            if self.wrong_every:
                following = [
                    (token + 1) % 32 if (anchor + 1 + i) % self.wrong_every == 0 else token
                    for i, token in enumerate(following)
                ]
            rows.append(following)
        return Proposal(torch.tensor(rows))


# -- greedy output is the target's own -------------------------------------------------------


def test_answers_vary() -> None:
    """The tiny target is worth testing with: answers differ and do not repeat one token."""
    _, answers = plain_answers()
    assert len({tuple(answer) for answer in answers}) > 10
    assert all(len(set(answer)) > 3 for answer in answers)


def test_plain_decoding_equals_transformers() -> None:
    """Without a draft: 20 prompts of different lengths in one batch, 128 tokens each."""
    prompts, expected = plain_answers()
    assert tokens(decoding.generate(shared_target(), None, prompts, LENGTH, [])) == expected


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_greedy_is_lossless(block: int, shift_label: bool) -> None:
    """A random draft changes no token: 20 prompts × 128 tokens, one batch of unequal lengths."""
    prompts, expected = plain_answers()
    model = tiny_draft(shift_label, block_size=block)
    answers = decoding.generate(shared_target(), model, prompts, LENGTH, [])
    assert tokens(answers) == expected
    assert sum(map(sum, runs(answers))) > 0, "some drafts are accepted"
    assert all(
        len(answer.accepted_runs) < LENGTH - 1 for answer in answers if sum(answer.accepted_runs)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift_label", MODES)
def test_greedy_is_lossless_for_every_family(family: str, shift_label: bool) -> None:
    """Llama, Qwen2, Qwen3 and Qwen3-MoE targets keep their own greedy answers."""
    prompts, expected = plain_answers(family, 5, 48)
    model = tiny_draft(shift_label, block_size=4)
    assert tokens(decoding.generate(shared_target(family), model, prompts, 48, [])) == expected


@pytest.mark.parametrize("projector", ["domino", "none"])
@pytest.mark.parametrize("use_head", [True, False])
def test_greedy_is_lossless_without_head(projector: str, use_head: bool) -> None:
    """Head on, head off, or no head at all: the answer is the target's."""
    prompts, expected = plain_answers(count=4, length=40)
    model = tiny_draft(False, projector=projector, block_size=8)
    answers = decoding.generate(shared_target(), model, prompts, 40, [], use_head=use_head)
    assert tokens(answers) == expected


@pytest.mark.parametrize("wrong_every", [2, 3, 5, 7])
@pytest.mark.parametrize("block", [2, 4, 16])
def test_greedy_is_lossless_with_a_fair_draft(
    block: int, wrong_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long and short runs mixed, rejected tokens leave no trace in either cache."""
    prompts, expected = plain_answers(count=6, length=64)
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    for text, prompt, answer in zip(texts, prompts, expected, strict=True):
        monkeypatch.setattr(decoding, "draft", Oracle([text], wrong_every))
        model = tiny_draft(block_size=block)
        found = decoding.generate(shared_target(), model, [prompt], 64, [])[0]
        assert found.tokens == answer
        assert max(found.accepted_runs) == min(block - 1, wrong_every - 1)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("block", [4, 16])
def test_max_new_tokens_inside_a_block(
    length: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit cuts inside an accepted block, to the token; only kept drafts count."""
    prompts, expected = plain_answers(count=1, length=64)
    monkeypatch.setattr(decoding, "draft", Oracle([prompts[0] + expected[0]]))
    model = tiny_draft(block_size=block)
    answer = decoding.generate(shared_target(), model, prompts, length, [])[0]
    assert answer.tokens == expected[0][:length]
    full, rest = divmod(length - 1, block)
    assert answer.accepted_runs == [block - 1] * full + ([rest] if rest else [])


@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_perfect_draft(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right has runs of K - 1 and the fewest steps; here a batch of four."""
    prompts, expected = plain_answers(count=4)
    texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    monkeypatch.setattr(decoding, "draft", Oracle(texts))
    model = tiny_draft(block_size=block)
    answers = decoding.generate(shared_target(), model, prompts, LENGTH, [])
    assert tokens(answers) == expected
    full, rest = divmod(LENGTH - 1, block)
    for answer in answers:
        assert answer.accepted_runs == [block - 1] * full + ([rest] if rest else [])


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_end_token_anywhere_in_a_block(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a perfect draft and block 4, an end token at any row ends the answer there."""
    prompts, expected = plain_answers()
    index = next(i for i, a in enumerate(expected) if a[place] not in a[:place])
    prompt, answer = prompts[index], expected[index]
    monkeypatch.setattr(decoding, "draft", Oracle([prompt + answer]))
    found = decoding.generate(
        shared_target(), tiny_draft(block_size=4), [prompt], LENGTH, [answer[place]]
    )[0]
    assert found.tokens == answer[: place + 1]
    full, rest = divmod(place, 4)
    assert found.accepted_runs == [3] * full + ([rest] if rest else [])


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", [2, 4, 8, 16])
def test_end_tokens_in_a_batch(block: int, shift_label: bool) -> None:
    """Answers of a batch that end at different places all equal transformers' own."""
    prompts, plain = plain_answers()
    end_tokens = [plain[0][9], plain[1][14]]
    expected = [cut(answer, end_tokens) for answer in plain]
    assert len({len(answer) for answer in expected}) > 3
    model = tiny_draft(shift_label, block_size=block)
    answers = decoding.generate(shared_target(), model, prompts, LENGTH, end_tokens)
    assert tokens(answers) == expected
    own = plain_greedy(shared_target().model, prompts[0], LENGTH, tuple(end_tokens))
    assert answers[0].tokens == own


def test_end_token_first() -> None:
    """An answer whose first token is an end token takes no step."""
    prompts, plain = plain_answers()
    answer = decoding.generate(shared_target(), tiny_draft(), prompts[:1], 9, [plain[0][0]])[0]
    assert (answer.tokens, answer.accepted_runs) == (plain[0][:1], [])


@pytest.mark.parametrize("shift_label", MODES)
def test_batch_equals_singles(shift_label: bool) -> None:
    """Eight prompts together give the same tokens and the same runs as one by one."""
    prompts, plain = plain_answers()
    model = tiny_draft(shift_label, block_size=8)
    ends = [plain[2][6]]
    together = decoding.generate(shared_target(), model, prompts[:8], 60, ends)
    single = [decoding.generate(shared_target(), model, [p], 60, ends)[0] for p in prompts[:8]]
    assert tokens(together) == tokens(single)
    assert runs(together) == runs(single)


def test_two_requests_after_each_other() -> None:
    """A second request, and the first one again, are not touched by what ran before."""
    prompts, expected = plain_answers()
    model = tiny_draft(block_size=8)
    for index in (0, 1, 0):
        found = decoding.generate(shared_target(), model, [prompts[index]], LENGTH, [])
        assert tokens(found) == [expected[index]]


def test_prompt_of_one_token() -> None:
    """The shortest prompt works, alone and beside a long one."""
    prompts = [[7], list(range(2, 30))]
    expected = [plain_greedy(shared_target().model, prompt, 30) for prompt in prompts]
    model = tiny_draft(block_size=8)
    assert tokens(decoding.generate(shared_target(), model, prompts, 30, [])) == expected
    assert tokens(decoding.generate(shared_target(), model, prompts[:1], 30, [])) == expected[:1]


def test_same_prompt_twice_in_a_batch() -> None:
    """Equal rows stay equal."""
    prompts, expected = plain_answers()
    answers = decoding.generate(shared_target(), tiny_draft(), [prompts[3]] * 3, 50, [])
    assert tokens(answers) == [expected[3][:50]] * 3
    assert runs(answers)[0] == runs(answers)[1] == runs(answers)[2]


# -- runs and numbers of proposals -----------------------------------------------------------


def offline_proposals(
    model: DominoDraft,
    target: Target,
    prompt: list[int],
    answer: list[int],
    num_proposals: int,
    use_head: bool,
) -> list[list[int]]:
    """Proposals after every answer token, each from a fresh cache of the whole text's features."""
    ids = torch.tensor([prompt + answer])
    features = target.encode(ids, torch.ones_like(ids)).features
    found = []
    with torch.no_grad():
        for place, token in enumerate(answer):
            anchor = len(prompt) + place
            cache = DraftCache(len(model.layers), anchor)
            span = torch.arange(anchor)[None]
            cache.write(model.context_kv(features[:, :anchor], span), span)
            proposal = decoding.draft(
                model,
                target,
                torch.tensor([token]),
                torch.tensor([anchor]),
                cache,
                num_proposals,
                use_head=use_head,
            )
            found.append(proposal.tokens[0].tolist())
    return found


@pytest.mark.parametrize("use_head", [True, False])
@pytest.mark.parametrize(
    ("shift_label", "num_proposals"), [(True, 3), (True, 2), (True, 4), (False, 3), (False, 2)]
)
def test_runs_equal_the_chain_walk(shift_label: bool, num_proposals: int, use_head: bool) -> None:
    """Decoding accepts, step by step, what a walk over offline proposals accepts."""
    # Few tokens, so that a random draft is often right.
    target, model = tiny_target(vocab=6), tiny_draft(shift_label, vocab_size=6, seed=5)
    prompts = random_prompts(8, vocab=6)
    end_tokens = [plain_greedy(target.model, prompts[0], 60)[-1]]
    answers = decoding.generate(
        target, model, prompts, 60, end_tokens, num_proposals=num_proposals, use_head=use_head
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == plain_greedy(target.model, prompt, 60, tuple(end_tokens))
        offline = offline_proposals(model, target, prompt, answer.tokens, num_proposals, use_head)
        right = [
            acceptance.leading_run(proposals, answer.tokens[place + 1 :])
            for place, proposals in enumerate(offline[:-1])
        ]
        assert acceptance.chain_walk(right) == answer.accepted_runs
    every = [run for row in runs(answers) for run in row]
    assert {0, 1, 2} <= set(every)


def test_head_changes_proposals_after_the_first() -> None:
    """Head on and off agree on offset 1 only."""
    prompts, plain = plain_answers()
    model = tiny_draft()
    on = offline_proposals(model, shared_target(), prompts[0], plain[0][:30], 3, True)
    off = offline_proposals(model, shared_target(), prompts[0], plain[0][:30], 3, False)
    assert [row[0] for row in on] == [row[0] for row in off]
    assert [row[1:] for row in on] != [row[1:] for row in off]


@pytest.mark.parametrize(("shift_label", "most"), [(True, 8), (False, 7)])
def test_every_number_of_proposals(shift_label: bool, most: int) -> None:
    """Fewer proposals, and block size itself with shift_label, change speed but no token."""
    prompts, expected = plain_answers()
    model = tiny_draft(shift_label, block_size=8)
    for count in range(1, most + 1):
        answers = decoding.generate(
            shared_target(), model, prompts[:3], 40, [], num_proposals=count
        )
        assert tokens(answers) == [answer[:40] for answer in expected[:3]]
        assert max(map(max, runs(answers))) <= count
    for count in (0, -1, most + 1):
        with pytest.raises(ValueError, match=rf"num_proposals is {count}.*1 to {most}"):
            decoding.generate(shared_target(), model, prompts[:1], 4, [], num_proposals=count)


def test_fewer_proposals_keep_the_block() -> None:
    """A smaller number of proposals is a prefix of the full proposal: the block is not shortened."""
    prompts, plain = plain_answers()
    for shift_label in MODES:
        model = tiny_draft(shift_label, block_size=8)
        full = offline_proposals(model, shared_target(), prompts[0], plain[0][:10], 7, True)
        few = offline_proposals(model, shared_target(), prompts[0], plain[0][:10], 2, True)
        assert few == [row[:2] for row in full]


def test_default_number_of_proposals() -> None:
    """By default an engine's block size - 1, in both label modes."""
    for shift_label in MODES:
        assert decoding.check_num_proposals(tiny_draft(shift_label, block_size=8), None) == 7


@pytest.mark.parametrize(
    ("prompts", "limit"), [([], 5), ([[]], 5), ([[3], []], 5), ([[3]], 0), ([[3]], -1)]
)
def test_bad_requests_refused(prompts: list[list[int]], limit: int) -> None:
    """No prompt, an empty prompt, or no tokens to write is an error in words."""
    with pytest.raises(ValueError, match="at least"):
        decoding.generate(shared_target(), tiny_draft(), prompts, limit, [])


# -- sampling settings -----------------------------------------------------------------------


def naive_probabilities(logits: list[float], settings: Sampling) -> list[float]:
    """Temperature, then the top_k best, then the smallest set that reaches top_p."""
    scaled = torch.tensor(logits, dtype=torch.float64) / settings.temperature
    order = sorted(range(len(logits)), key=lambda i: -float(scaled[i]))
    if settings.top_k:
        order = order[: settings.top_k]
    weights = {i: float((scaled[i] - scaled.max()).exp()) for i in order}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for i in order:
        if sum(kept.values()) / total >= settings.top_p:
            break
        kept[i] = weights[i]
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 99])
def test_probabilities(temperature: float, top_p: float, top_k: int) -> None:
    """The distribution equals a naive loop and transformers' warpers."""
    settings = Sampling(temperature, top_p, top_k)
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)) * 2
    found = settings.probabilities(logits)
    for row, expected in zip(found.tolist(), logits.tolist(), strict=True):
        assert row == pytest.approx(naive_probabilities(expected, settings), abs=1e-6)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    torch.testing.assert_close(found, scores.softmax(-1), atol=1e-6, rtol=1e-5)


def test_probabilities_of_low_precision_logits() -> None:
    """bf16 logits are sampled from in float32."""
    assert Sampling(1.0).probabilities(torch.randn(2, 8).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"proposals": "beam"},
    ],
)
def test_bad_sampling_refused(fields: dict[str, Any]) -> None:
    """Settings out of range, and an unknown way to propose, are refused by name."""
    with pytest.raises(ValueError, match=next(iter(fields))):
        Sampling(**fields)


# -- sampled output keeps the target's distribution ------------------------------------------

DRAWS = 60_000
VOCAB = 4
SETTINGS = [Sampling(1.0), Sampling(0.7, top_p=0.9)]
PROPOSALS = ["greedy", "sampled"]


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the next of four tokens after each token: the target's and the draft's."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(VOCAB, VOCAB, generator=generator),
        torch.randn(VOCAB, VOCAB, generator=generator),
    )


def with_proposals(settings: Sampling, proposals: Any) -> Sampling:
    return Sampling(settings.temperature, settings.top_p, settings.top_k, proposals)


def propose(
    table: torch.Tensor, anchors: torch.Tensor, count: int, settings: Sampling, generator: Any
) -> Proposal:
    """Draft ``count`` tokens from a table, greedily or sampled."""
    previous, drafted, probs = anchors, [], []
    for _ in range(count):
        if settings.proposals == "sampled":
            probs.append(settings.probabilities(table[previous]))
            previous = decoding.sample(probs[-1], generator)
        else:
            previous = table[previous].argmax(-1)
        drafted.append(previous)
    return Proposal(torch.stack(drafted, 1), torch.stack(probs, 1) if probs else None)


def committed_pairs(settings: Sampling, rule: Any, seed: int = 0) -> torch.Tensor:
    """The first two committed tokens of many independent decodings from token 0, ``[DRAWS, 2]``."""
    p_table, q_table = tables()
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.zeros(DRAWS, dtype=torch.long)
    written: list[torch.Tensor] = []
    for _ in range(2):
        proposal = propose(q_table, anchors, 3, settings, generator)
        logits = p_table[torch.cat([anchors[:, None], proposal.tokens], dim=1)]
        accepted, bonus = rule(proposal, logits, settings, generator)
        step = torch.cat([proposal.tokens, torch.zeros(DRAWS, 1, dtype=torch.long)], dim=1)
        step[torch.arange(DRAWS), accepted] = bonus
        written.append(torch.where(torch.arange(4) <= accepted[:, None], step, -1))
        anchors = bonus
    both = torch.cat(written, dim=1)
    order = (both < 0).long().argsort(dim=1, stable=True)
    return both.gather(1, order)[:, :2]


def p_value(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square of counts against probabilities; a token of probability 0 must not occur."""
    possible = expected > 0
    if bool(found[~possible].any()):
        return 0.0
    return float(chisquare(found[possible], expected[possible] * found.sum()).pvalue)


def pair_p_values(pairs: torch.Tensor, settings: Sampling) -> tuple[float, float]:
    """Of the first token and of both together, against the target's own distribution."""
    p_table = settings.probabilities(tables()[0].double()).double()
    p_table = p_table / p_table.sum(-1, keepdim=True)
    first = torch.bincount(pairs[:, 0], minlength=VOCAB)
    both = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    return p_value(first, p_table[0]), p_value(both, (p_table[0][:, None] * p_table).flatten())


@pytest.mark.parametrize("settings", SETTINGS, ids=["t1", "t0.7-p0.9"])
@pytest.mark.parametrize("proposals", PROPOSALS)
def test_sampled_is_lossless(settings: Sampling, proposals: str) -> None:
    """First token and first pair of 60,000 decodings follow the target's distribution."""
    settings = with_proposals(settings, proposals)
    first, both = pair_p_values(committed_pairs(settings, decoding.accept), settings)
    assert first > 1e-4 and both > 1e-4


@pytest.mark.parametrize("proposals", PROPOSALS)
def test_sampled_accepts_as_much_as_possible(proposals: str) -> None:
    """The first draft stands with probability Σ min(p, q): none is rejected needlessly."""
    settings = with_proposals(Sampling(1.0), proposals)
    p_table, q_table = tables()
    generator = torch.Generator().manual_seed(0)
    anchors = torch.zeros(DRAWS, dtype=torch.long)
    proposal = propose(q_table, anchors, 1, settings, generator)
    logits = p_table[torch.cat([anchors[:, None], proposal.tokens], dim=1)]
    accepted, _ = decoding.accept(proposal, logits, settings, generator)
    p, q = p_table[0].softmax(-1), q_table[0].softmax(-1)
    if proposals == "greedy":
        q = torch.zeros(VOCAB).index_fill(0, q_table[0].argmax(), 1.0)
    expected = float(torch.minimum(p, q).sum())
    assert float(accepted.float().mean()) == pytest.approx(expected, abs=0.01)


def greedy_rule(proposal: Proposal, logits: torch.Tensor, *_: Any) -> Any:
    """Wrong on purpose: verifies against the target's best token."""
    return decoding.accept(proposal, logits, Sampling())


def no_residual_rule(
    proposal: Proposal, logits: torch.Tensor, settings: Sampling, generator: Any
) -> Any:
    """Wrong on purpose: draws the bonus token from p even after a rejection."""
    accepted, _ = decoding.accept(proposal, logits, settings, generator)
    rows = torch.arange(len(accepted))
    return accepted, decoding.sample(settings.probabilities(logits[rows, accepted]), generator)


@pytest.mark.parametrize("rule", [greedy_rule, no_residual_rule])
@pytest.mark.parametrize("proposals", PROPOSALS)
def test_wrong_rules_are_caught(rule: Any, proposals: str) -> None:
    """The chi-square tests above have teeth: two plausible wrong rules fail them."""
    settings = with_proposals(Sampling(1.0), proposals)
    first, both = pair_p_values(committed_pairs(settings, rule), settings)
    assert first < 1e-8 and both < 1e-8


def test_draft_equal_to_the_target_is_always_accepted() -> None:
    """With q = p no proposal is rejected."""
    settings = Sampling(1.0, proposals="sampled")
    p_table, _ = tables()
    generator = torch.Generator().manual_seed(0)
    anchors = torch.zeros(2000, dtype=torch.long)
    proposal = propose(p_table, anchors, 3, settings, generator)
    logits = p_table[torch.cat([anchors[:, None], proposal.tokens], dim=1)]
    accepted, _ = decoding.accept(proposal, logits, settings, generator)
    assert bool((accepted == 3).all())


def test_rejection_without_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection by rounding alone, where q ≥ p everywhere, draws from p instead of failing."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2.0**-24))
    proposal = Proposal(torch.tensor([[0]]), torch.full((1, 1, 2), 0.5000001))
    accepted, bonus = decoding.accept(proposal, torch.zeros(1, 2, 2), Sampling(1.0))
    assert int(accepted[0]) == 0 and int(bonus[0]) in (0, 1)


def sampled_target() -> Target:
    """Eight tokens with clearly unequal probabilities."""
    return tiny_target(vocab=8, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)


@pytest.mark.parametrize("settings", SETTINGS, ids=["t1", "t0.7-p0.9"])
@pytest.mark.parametrize("proposals", PROPOSALS)
def test_sampled_generate_is_lossless(settings: Sampling, proposals: str) -> None:
    """End to end: the first three tokens of 20,000 answers follow the target's distribution."""
    settings = with_proposals(settings, proposals)
    target = sampled_target()
    model = tiny_draft(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, vocab_size=8, seed=3
    )
    prompt, draws = [2, 5], 4000
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(512, dtype=torch.long)
    accepted = 0
    for _ in range(5):
        answers = decoding.generate(
            target, model, [prompt] * draws, 3, [], sampling=settings, generator=generator
        )
        found = torch.tensor(tokens(answers))
        counts += torch.bincount(found @ torch.tensor([64, 8, 1]), minlength=512)
        accepted += sum(map(sum, runs(answers)))
    assert accepted > 0
    triples = torch.cartesian_prod(*[torch.arange(8)] * 3)
    ids = torch.cat([torch.tensor([prompt]).expand(512, -1), triples], dim=1)
    logits = target.logits(target.encode(ids, torch.ones_like(ids)).hidden)
    probs = settings.probabilities(logits[:, 1:4].double())
    expected = probs.gather(2, triples[:, :, None])[:, :, 0].double().prod(1)
    assert not bool(counts[expected == 0].any())
    rare = expected * counts.sum() < 5
    merged_found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    merged = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert p_value(merged_found, merged / merged.sum()) > 1e-4


def test_same_seed_same_answers() -> None:
    """Sampling is decided by the generator alone."""
    target, model = sampled_target(), None
    settings = Sampling(1.0)
    found = [
        tokens(
            decoding.generate(
                target, model, [[2, 5], [3]], 20, [], sampling=settings,
                generator=torch.Generator().manual_seed(seed),
            )
        )
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert found[0] == found[1] != found[2]


def test_tiny_temperature_is_nearly_greedy() -> None:
    """A temperature close to 0 gives the greedy answer, without overflow."""
    prompts, expected = plain_answers()
    answers = decoding.generate(
        shared_target(), tiny_draft(), prompts[:2], 20, [], sampling=Sampling(1e-6)
    )
    assert tokens(answers) == [answer[:20] for answer in expected[:2]]


# -- targets that cannot decode --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear_attention", "sliding_attention"])
def test_hybrid_target_refused(kind: str) -> None:
    """A target with layers whose state cannot be taken back is refused by name."""
    model = tiny_model()
    model.config.layer_types = ["full_attention"] * 3 + [kind]
    target = Target(model, [0, 2])
    with pytest.raises(ValueError, match=kind):
        target.new_cache(8)
    with pytest.raises(ValueError, match=kind):
        decoding.generate(target, tiny_draft(), [[3, 4]], 4, [])
