"""The CPU rollout proposes, token for token, what SGLang and our own decoding propose."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang.srt.speculative.domino_utils import domino_greedy_rollout

from domino_kit import decoding
from domino_kit.serve.cpu_rollout import cpu_rollout
from tests.tiny import rollout_case

pytestmark = pytest.mark.sglang

MODES = [True, False]
VOCAB = 40


def random_case(block: int, batch: int, *, seed: int = 0, vocab: int = VOCAB) -> dict[str, Any]:
    """Arguments of a rollout in which base logits and corrections matter alike.

    The two best logits of a choice of the comparison below are never closer than 0.001.

    The output head has 8 rows beyond the vocabulary, as padded heads do, that would always win.
    """
    draw = torch.Generator().manual_seed(1000 * seed + 10 * block + batch)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=draw)

    size, inner, state = 24, 10, 14
    embedding = nn.Embedding(vocab, size, _weight=normal(vocab, size))
    gru = nn.GRU(size, state, batch_first=True, bias=False)
    projector = nn.Sequential(
        nn.Linear(size + state, inner, bias=False), nn.SiLU(), nn.Linear(inner, vocab, bias=False)
    )
    with torch.no_grad():
        gru.weight_ih_l0.copy_(normal(3 * state, size, scale=0.4))
        gru.weight_hh_l0.copy_(normal(3 * state, state, scale=0.6))
        projector[0].weight.copy_(normal(inner, size + state, scale=0.5))
        projector[2].weight.copy_(normal(vocab, inner, scale=2.0))
    head = torch.cat([normal(vocab, size), torch.full((8, size), 1e4)])
    return {
        "draft_hidden": normal(batch, block, size),
        "bonus_tokens": torch.randint(vocab, (batch,), generator=draw),
        "target_embedding": embedding,
        "lm_head_weight": head,
        "prefix_gru": gru,
        "embed_proj": projector,
        "vocab_size": vocab,
        "in_cuda_graph": False,
        "tp_group": None,
    }


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("pool", [0, 1, 8, VOCAB - 1, VOCAB, VOCAB + 24])
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("block", [2, 3, 4, 8, 16])
def test_proposals_equal_sglangs(block: int, batch: int, pool: int, shift_label: bool) -> None:
    case = random_case(block, batch)
    choices = {"shift_label": shift_label, "candidate_pool_size": pool}
    found = cpu_rollout(**case, **choices)
    assert found.shape == (batch, block - 1) and found.dtype == torch.long
    assert found.tolist() == domino_greedy_rollout(**case, **choices).tolist()
    assert int(found.max()) < VOCAB


@pytest.mark.parametrize("shift_label", MODES)
def test_every_part_decides_some_proposals(shift_label: bool) -> None:
    """The comparison above is not empty: pool, head, anchor and mode all change what is found."""
    case = random_case(8, 8)
    choices = {"shift_label": shift_label, "candidate_pool_size": 0}
    plain = cpu_rollout(**case, **choices)
    assert len(plain.unique()) > 10
    others = [
        {**choices, "shift_label": not shift_label},
        {**choices, "candidate_pool_size": 8},
        {**choices, "bonus_tokens": (case["bonus_tokens"] + 1) % VOCAB},
        {**choices, "embed_proj": random_case(8, 8, seed=1)["embed_proj"]},
        {**choices, "prefix_gru": random_case(8, 8, seed=1)["prefix_gru"]},
    ]
    changed = [cpu_rollout(**{**case, **other}) for other in others]
    assert all(each[:, 1:].tolist() != plain[:, 1:].tolist() for each in changed)
    same_first = [each[:, 0].tolist() == plain[:, 0].tolist() for each in changed]
    assert same_first == [False, True, True, True, True]


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("pool", [0, 8])
def test_requests_of_a_batch_do_not_influence_each_other(pool: int, shift_label: bool) -> None:
    case = random_case(8, 8)
    choices = {"shift_label": shift_label, "candidate_pool_size": pool}
    together = cpu_rollout(**case, **choices)
    for index in range(8):
        own = {name: case[name][index : index + 1] for name in ("draft_hidden", "bonus_tokens")}
        assert cpu_rollout(**{**case, **own}, **choices).tolist() == [together[index].tolist()]


@pytest.mark.parametrize("shift_label", MODES)
def test_later_proposals_come_from_the_pool(shift_label: bool) -> None:
    """All but the first lie among the best tokens of a request's later rows."""
    case = random_case(16, 8)
    found = cpu_rollout(**case, shift_label=shift_label, candidate_pool_size=8)
    start = 0 if shift_label else 1
    rows = case["draft_hidden"][:, start + 1 : start + 15]
    best = (rows @ case["lm_head_weight"][:VOCAB].t()).amax(1).topk(8).indices
    for tokens, allowed in zip(found[:, 1:].tolist(), best.tolist(), strict=True):
        assert set(tokens) <= set(allowed)


def test_hidden_rows_may_be_a_view() -> None:
    case = random_case(8, 4)
    wide = torch.randn(4, 10, 30, generator=torch.Generator().manual_seed(2))
    wide[:, 1:9, 3:27] = case["draft_hidden"]
    choices = {"shift_label": True, "candidate_pool_size": 8}
    found = cpu_rollout(**{**case, "draft_hidden": wide[:, 1:9, 3:27]}, **choices)
    assert found.tolist() == cpu_rollout(**case, **choices).tolist()


def test_rollout_in_bfloat16_proposes_tokens() -> None:
    case = random_case(8, 3)
    for name in ("target_embedding", "prefix_gru", "embed_proj"):
        case[name] = case[name].bfloat16()
    for name in ("draft_hidden", "lm_head_weight"):
        case[name] = case[name].bfloat16()
    found = cpu_rollout(**case, shift_label=True, candidate_pool_size=8)
    assert found.shape == (3, 7) and found.dtype == torch.long and int(found.max()) < VOCAB
    first = (case["draft_hidden"][:, 0] @ case["lm_head_weight"][:VOCAB].t()).argmax(-1)
    assert found[:, 0].tolist() == first.tolist()


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("block", [2, 4, 16])
@pytest.mark.parametrize("pool", [0, 64, 100])
def test_proposals_equal_our_own_decoding(
    pool: int, block: int, batch: int, shift_label: bool
) -> None:
    """What is served is what `domino eval` measures."""
    model, target, hidden, anchors, arguments = rollout_case(shift_label, block, batch)
    found = cpu_rollout(**arguments, candidate_pool_size=pool)
    ours = decoding.rollout(model, target, hidden, anchors, block - 1).tokens
    assert found.tolist() == ours.tolist()
