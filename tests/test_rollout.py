"""The rollout against its definition: one step of the head after another, over all tokens."""

import pytest
import torch
from torch import Tensor, nn

from domino_kit import decoding, rollout
from domino_kit.modeling import DominoDraft
from domino_kit.rollout import Head, gru_step, input_table, propose, row_norms
from domino_kit.target import Target
from tests.tiny import rollout_case, tiny_draft, tiny_target

MODES = [True, False]


def plain_rollout(
    model: DominoDraft, target: Target, rows: Tensor, anchors: Tensor, pool: int = 0
) -> Tensor:
    """Proposals ``[B, n]`` by the model's own steps."""
    base = target.logits(rows)
    allowed = torch.zeros_like(base[:, 0])
    if pool and rows.shape[1] > 1:
        best = base[:, 1:].amax(1).topk(pool).indices
        allowed = torch.full_like(allowed, -torch.inf).scatter(1, best, 0.0)
    tokens, previous, state = [], anchors, model.initial_state(rows[:, 0])
    for place in range(rows.shape[1]):
        state = model.head_step(target.embed(previous), state)
        logits = base[:, place]
        if place > 0:
            logits = logits + model.correction(rows[:, place], state) + allowed
        previous = logits.argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("pool", [0, 1, 9])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("batch", [1, 2, 7, 33])
def test_proposals_are_those_of_the_definition(batch: int, count: int, pool: int) -> None:
    target = tiny_target(vocab=64)
    model = tiny_draft(block_size=8, vocab_size=64)
    draw = torch.Generator().manual_seed(batch)
    hidden = torch.randn(batch, 8, 32, generator=draw)
    anchors = torch.randint(64, (batch,), generator=draw)
    wanted = plain_rollout(model, target, hidden[:, :count], anchors, pool)
    found = decoding.rollout(model, target, hidden, anchors, count, candidate_pool_size=pool)
    assert found.tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("batch", [1, 12])
def test_a_table_of_inputs_changes_nothing(batch: int, shift_label: bool) -> None:
    model, target, hidden, anchors, _ = rollout_case(shift_label, 8, batch)
    table = input_table(target.embedding.weight, model.prefix_gru)
    assert table.shape == (64, 36)
    base, rows = target.logits(hidden), hidden
    head = Head(target.embed, model.prefix_gru, model.embed_proj)
    with_table = Head(target.embed, model.prefix_gru, model.embed_proj, table=table)
    wanted = propose(base, rows, anchors, head)
    assert propose(base, rows, anchors, with_table).tolist() == wanted.tolist()


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_gru_step_is_torchs(batch: int) -> None:
    draw = torch.Generator().manual_seed(batch)
    x, state, of_input, of_state = (
        torch.randn(shape, generator=draw) for shape in ((batch, 9), (batch, 5), (15, 9), (15, 5))
    )
    for before in (state, None):
        start = torch.zeros(batch, 5) if before is None else before
        wanted = torch.gru_cell(x, start, of_input, of_state)
        found = gru_step(x @ of_input.t(), before, of_state)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_spared_corrections_could_not_win(
    batch: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From corrections that never matter to such that the bound spares nothing of."""
    draw = torch.Generator().manual_seed(7)
    last = nn.Linear(6, 500, bias=False).requires_grad_(False)
    last.weight.copy_(scale * torch.randn(500, 6, generator=draw))
    base = torch.randn(batch, 9, 500, generator=draw)
    hidden = torch.randn(batch, 6, generator=draw)
    full: list[int] = []
    add_product = rollout.add_product
    monkeypatch.setattr(
        rollout, "add_product", lambda b, *rest: full.append(len(b)) or add_product(b, *rest)
    )
    whole = rollout._Vocabulary(base, last)
    for place in range(9):
        wanted = (base[:, place] + hidden @ last.weight.t()).argmax(-1)
        assert whole.best_token(place, hidden).tolist() == wanted.tolist()
    computed = sum(full) / (9 * batch)
    assert computed == 0 if scale <= 0.1 else computed > 0.9 if scale == 8 else True


def test_norms_follow_the_weight() -> None:
    layer = nn.Linear(3, 5, bias=False).requires_grad_(False)
    assert row_norms(layer) is row_norms(layer)
    layer.weight.mul_(2)
    assert torch.equal(row_norms(layer), layer.weight.norm(dim=1))


def test_sampled_proposals_need_the_whole_distribution() -> None:
    model, target, hidden, anchors, _ = rollout_case(True, 4, 2)
    sampling = decoding.Sampling(1.0, proposals="sampled")
    with pytest.raises(AssertionError, match="pool"):
        decoding.rollout(
            model, target, hidden, anchors, 3, candidate_pool_size=8, sampling=sampling
        )
