"""Sampled verification: the target's probabilities are SGLang's, and the draft changes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.speculative.dflash_worker_v2 import (
    _commit_accept,
    compute_dflash_correct_drafts_and_bonus,
)

from domino_kit.serve.cpu_worker import CpuDFlashWorker, accept_sampled, target_probabilities

pytestmark = pytest.mark.sglang

ALL = 1 << 30
"""SGLang's top-k of a request without one."""
GREEDY = (1.0, 1, 1.0, 0.0)
"""What SGLang makes of temperature 0."""
REQUESTS = {
    "plain": [(1.0, ALL, 1.0, 0.0)] * 2,
    "temperature": [(0.3, ALL, 1.0, 0.0), (2.5, ALL, 1.0, 0.0)],
    "top-k": [(1.0, 5, 1.0, 0.0), (0.8, 20, 1.0, 0.0), (1.0, ALL, 1.0, 0.0)],
    "top-p": [(1.0, ALL, 0.9, 0.0), (1.0, ALL, 0.3, 0.0), (1.0, ALL, 1e-6, 0.0)],
    "min-p": [(1.0, ALL, 1.0, 0.1), (1.0, ALL, 1.0, 0.9), (1.0, ALL, 1.0, 0.0)],
    "all at once": [(0.7, 12, 0.8, 0.05), (1.3, 30, 0.95, 0.2), (0.2, 3, 0.99, 0.0), GREEDY],
    "greedy beside sampled": [GREEDY, (1.0, ALL, 1.0, 0.0), GREEDY],
}
"""Temperature, top-k, top-p and min-p of each request of a batch."""


def sampling_info(requests: list[tuple[float, int, float, float]]) -> SimpleNamespace:
    temperatures, top_ks, top_ps, min_ps = zip(*requests, strict=True)
    return SimpleNamespace(
        temperatures=torch.tensor(temperatures).view(-1, 1),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        need_min_p_sampling=any(min_p > 0 for min_p in min_ps),
        is_all_greedy=all(top_k <= 1 for top_k in top_ks),
    )


def random_logits(rows: int, vocab: int = 60, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mix", REQUESTS)
def test_target_probabilities_are_what_sglang_samples_from(mix: str, rows: int) -> None:
    info = sampling_info(REQUESTS[mix])
    logits = random_logits(len(REQUESTS[mix]) * rows)
    given = logits.clone()
    found = target_probabilities(logits, info, rows)
    assert torch.equal(logits, given)
    spread = {
        name: getattr(info, name).repeat_interleave(rows, dim=0)
        for name in ("temperatures", "top_ks", "top_ps", "min_ps")
    }
    _, kept, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        (logits / spread.pop("temperatures")).softmax(-1),
        **spread,
        need_min_p_sampling=info.need_min_p_sampling,
        sampling_seed=None,
        positions=None,
        return_filtered_probs=True,
    )
    wanted = torch.zeros_like(logits).scatter(1, ids.long(), kept / kept.sum(-1, keepdim=True))
    assert found.dtype == torch.float32 and found.shape == (len(REQUESTS[mix]), rows, 60)
    assert torch.equal(found.flatten(0, 1) > 0, wanted > 0)
    torch.testing.assert_close(found.flatten(0, 1), wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))


def test_filters_keep_what_their_names_say() -> None:
    """Independent of SGLang: four tokens of known probabilities."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(5, -1)
    requests = [
        (1.0, ALL, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (1.0, ALL, 0.7, 0.0), (1.0, ALL, 1.0, 0.25),
        (0.5, ALL, 1.0, 0.0),
    ]  # fmt: skip
    found = target_probabilities(logits, sampling_info(requests), 1)[:, 0]
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    wanted = torch.stack([
        torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.5, 0.3, 0, 0]) / 0.8,
        torch.tensor([0.5, 0.3, 0, 0]) / 0.8, torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95,
        squares / squares.sum(),
    ])  # fmt: skip
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("tied", [[3, 7], [0, 59], [7, 3, 40], list(range(60))])
def test_greedy_row_with_ties_has_all_mass_on_the_argmax(tied: list[int]) -> None:
    logits = random_logits(2)
    logits[:, tied] = 20.0
    found = target_probabilities(logits, sampling_info([GREEDY, GREEDY]), 1)[:, 0]
    assert torch.equal(found, torch.eye(60)[logits.argmax(-1)])


def test_logits_in_bfloat16_are_widened() -> None:
    logits = random_logits(2).bfloat16()
    info = sampling_info([(0.7, 12, 0.8, 0.05)])
    assert torch.equal(
        target_probabilities(logits, info, 2), target_probabilities(logits.float(), info, 2)
    )


DRAFTS = [2, 5, 0]
CHANCES = {
    "never": [0.0, 0.0, 0.0],
    "rarely": [0.02, 0.05, 0.02],
    "evenly": [0.4, 0.5, 0.6],
    "mostly": [0.9, 0.95, 0.8],
    "always": [1.0, 1.0, 1.0],
    "last never": [0.9, 0.9, 0.0],
    "first always": [1.0, 0.3, 0.9],
}
"""The target's probability of each of the three drafts."""


def probability_table(chances: list[float]) -> Tensor:
    """``[4, 7]``: uneven rows in which each draft has its chance; one other token has none."""
    weights = torch.tensor([1.0, 4.0, 2.0, 0.0, 3.0, 0.5, 1.5]).repeat(4, 1)
    for row, (draft, chance) in enumerate(zip(DRAFTS, chances, strict=True)):
        weights[row, draft] = 0
        weights[row] *= (1 - chance) / weights[row].sum()
        weights[row, draft] = chance
    return weights / weights.sum(-1, keepdim=True)


def committed(table: Tensor, rows: int = 40_000, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Accept counts, bonus tokens and committed tokens (-1 where there is none) of many rows."""
    candidates = torch.tensor([6, *DRAFTS]).repeat(rows, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        accepted, bonus = accept_sampled(candidates, table.expand(rows, -1, -1))
    tokens = torch.cat([candidates[:, 1:], torch.full((rows, 1), -1)], dim=1)
    tokens = tokens.where(torch.arange(4) < accepted[:, None], -1)
    return accepted, bonus, tokens.scatter(1, accepted[:, None], bonus[:, None])


def assert_distributed(tokens: Tensor, wanted: Tensor) -> None:
    """Chi-square over what can happen, and none of what cannot."""
    counts = torch.bincount(tokens, minlength=len(wanted)).double()
    possible = wanted > 0
    assert int(counts[~possible].sum()) == 0
    if int(possible.sum()) > 1:
        expected = wanted[possible].double()
        expected *= counts.sum() / expected.sum()
        assert chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("chances", CHANCES)
def test_committed_tokens_follow_the_target(chances: str) -> None:
    """Each token given those before it, as if the target had been sampled without a draft."""
    table = probability_table(CHANCES[chances])
    _, _, tokens = committed(table)
    reached = torch.ones(len(tokens), dtype=torch.bool)
    for place in range(4):
        if int(reached.sum()) > 100:
            assert_distributed(tokens[reached, place], table[place])
        assert bool((tokens[~reached, place] == -1).all())
        if place < 3:
            reached &= tokens[:, place] == DRAFTS[place]


@pytest.mark.parametrize("chances", CHANCES)
def test_accept_counts_follow_the_chances(chances: str) -> None:
    accepted, _, _ = committed(probability_table(CHANCES[chances]))
    first, second, third = CHANCES[chances]
    wanted = [1 - first, first * (1 - second), first * second * (1 - third), first * second * third]
    assert_distributed(accepted, torch.tensor(wanted))


@pytest.mark.parametrize("chances", CHANCES)
def test_bonus_is_never_the_refused_draft(chances: str) -> None:
    accepted, bonus, _ = committed(probability_table(CHANCES[chances]))
    refused = accepted < 3
    drafts = torch.tensor([*DRAFTS, -1])[accepted]
    assert bool((bonus[refused] != drafts[refused]).all())


def test_certain_drafts_stand_and_impossible_ones_fall() -> None:
    for chances, count in (([1, 1, 1], 3), ([1, 1, 0], 2), ([1, 0, 1], 1), ([0, 1, 1], 0)):
        accepted, _, _ = committed(probability_table([float(each) for each in chances]), rows=500)
        assert accepted.tolist() == [count] * 500


def test_block_of_one_draft() -> None:
    table = probability_table(CHANCES["evenly"])[[0, 3]]
    candidates = torch.tensor([6, DRAFTS[0]]).repeat(40_000, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        accepted, bonus = accept_sampled(candidates, table.expand(40_000, -1, -1))
    assert_distributed(accepted, torch.tensor([0.6, 0.4]))
    assert_distributed(bonus[accepted == 1], table[1])
    assert_distributed(bonus.where(accepted == 0, DRAFTS[0]), table[0])


def accept_block(candidates: Tensor, logits: Tensor, info: Any) -> tuple[Any, ...]:
    worker = CpuDFlashWorker.__new__(CpuDFlashWorker)
    return worker._accept_block(candidates=candidates, next_token_logits=logits, sampling_info=info)


def test_greedy_request_beside_sampled_ones_is_verified_greedily() -> None:
    logits = random_logits(12)
    top = logits.view(3, 4, 60).argmax(-1)
    candidates = torch.cat([torch.zeros(3, 1).long(), top[:, :3]], dim=1)
    candidates[0, 2] = (candidates[0, 2] + 1) % 60
    info = sampling_info([GREEDY, (1.5, ALL, 1.0, 0.0), GREEDY])
    accepted, lengths, bonus, tokens, _ = accept_block(candidates, logits, info)
    count, wanted = compute_dflash_correct_drafts_and_bonus(
        candidates=candidates, target_predict=top
    )
    assert accepted[[0, 2]].tolist() == count[[0, 2]].tolist() == [1, 3]
    assert bonus[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    assert tokens[0, :2].tolist() == top[0, :2].tolist()
    assert tokens[2].tolist() == top[2].tolist()
    assert lengths.tolist() == (accepted + 1).tolist()


def test_accepted_block_is_laid_out_as_sglang_does() -> None:
    logits, info = random_logits(24), sampling_info([(1.5, ALL, 1.0, 0.0)] * 6)
    candidates = torch.cat([torch.zeros(6, 1).long(), logits.view(6, 4, 60)[:, :3].argmax(-1)], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        accepted, lengths, bonus, tokens, rest = accept_block(candidates, logits, info)
    wanted, counts = _commit_accept(candidates, accepted, bonus)
    assert len(accepted.unique()) > 1
    assert tokens.dtype == wanted.dtype and torch.equal(tokens, wanted)
    assert lengths.dtype == counts.dtype and torch.equal(lengths, counts)
    assert rest is None
