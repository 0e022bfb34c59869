"""Training options against their plain twins, and from a recipe to the training step."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from domino_kit.train.dataset import RowStream, anchor_generators, collate
from domino_kit.train.distill import Distill
from domino_kit.train.dpace import Dpace
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.loop import StepSums, train, train_step
from domino_kit.train.objective import Rows, dual_cross_entropy
from domino_kit.train.recipe import read_recipe
from domino_kit.train.setup import Run, build_run
from domino_kit.train.step import draw_blocks, forward_blocks, wanted_hidden
from tests.test_objective import D, E, V, plain
from tests.test_training import recipe
from tests.tiny_chat import save_target

K, BLOCKS = 4, 6
R = K * BLOCKS
BLANK = ["target.name=x", "data.train=y", "output.folder=z", "train.steps=1"]
DISTILL = [
    Distill("forward_kl"),
    Distill("forward_kl", mix=0.4, temperature=2.0, top_k=3),
    Distill("total_variation", mix=0.7, temperature=0.5),
    Distill("total_variation", top_k=5),
]


def make_rows(dtype: torch.dtype, with_head: bool = True) -> tuple[Rows, Tensor, Tensor | None]:
    """Blocks of K rows, some of which do not count; one block does not count at all."""
    g = torch.Generator().manual_seed(3)
    weights = torch.rand(R, generator=g, dtype=dtype) * (torch.rand(R, generator=g) > 0.3)
    weights[2 * K : 3 * K] = 0
    hidden = torch.randn(R, D, generator=g, dtype=dtype, requires_grad=True)
    low = torch.randn(R, E, generator=g, dtype=dtype, requires_grad=True) if with_head else None
    projection = torch.randn(V, E, generator=g, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (R,), generator=g)
    head = torch.randn(V, D, generator=g, dtype=dtype)
    wanted = torch.randn(R, D, generator=g, dtype=dtype)
    return Rows(hidden, low, labels, weights, wanted), head, projection if with_head else None


def plain_dpace(confidence: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """Equations 7 and 8, one block and one row at a time."""
    weights = torch.zeros_like(confidence)
    for block in range(len(confidence) // K):
        rows = [r for r in range(block * K, block * K + K) if counts[r]]
        chances = [(1 - alpha) * confidence[r].item() + alpha for r in rows]
        for j, row in enumerate(rows):
            weights[row] = sum(math.prod(chances[: m + 1]) for m in range(j, len(rows)))
    return weights


def plain_divergence(logits: Tensor, wanted: Tensor, head: Tensor, distill: Distill) -> Tensor:
    """By autograd, over all logits at once."""
    heat = distill.temperature
    teacher = wanted @ head.T / heat
    if distill.top_k:
        lowest = teacher.topk(distill.top_k).values[:, -1:]
        teacher = teacher.masked_fill(teacher < lowest, -torch.inf)
    p = teacher.softmax(-1)
    if distill.kind == "forward_kl":
        log_q = (logits / heat).log_softmax(-1)
        return heat**2 * F.kl_div(log_q, p, reduction="none").sum(-1)
    return (p - (logits / heat).softmax(-1)).abs().sum(-1) / 2


def plain_options(
    rows: Rows, head: Tensor, projection: Tensor | None, lam: float,
    dpace: Dpace | None, distill: Distill | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All logits at once: the total and the weights."""
    base = rows.hidden @ head.T
    final = base
    if rows.low_rank is not None and projection is not None:
        final = base + rows.low_rank @ projection.T
    weights = rows.weights
    if dpace is not None:
        hit = final.softmax(-1).gather(1, rows.labels[:, None])[:, 0].detach()
        weights = plain_dpace(hit, rows.weights > 0, dpace.alpha)

    def loss(logits: Tensor) -> Tensor:
        found = F.cross_entropy(logits, rows.labels, reduction="none")
        if distill is not None and rows.wanted is not None:
            soft = plain_divergence(logits, rows.wanted, head, distill)
            found = (1 - distill.mix) * found + distill.mix * soft
        return (found * weights).sum()

    if rows.low_rank is None:
        return loss(base), weights
    return (1 - lam) * loss(final) + lam * loss(base), weights


@pytest.mark.parametrize("chunk", [1, 6, 1000])
@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("distill", [None, *DISTILL])
@pytest.mark.parametrize("alpha", [None, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_options_equal_their_plain_twins(
    chunk: int, with_head: bool, distill: Distill | None, alpha: float | None, dtype: torch.dtype
) -> None:
    rows, head, projection = make_rows(dtype, with_head)
    dpace = None if alpha is None else Dpace(alpha, K)
    inputs = [t for t in (rows.hidden, rows.low_rank, projection) if t is not None]
    expected, weights = plain_options(rows, head, projection, 0.3, dpace, distill)
    wanted = torch.autograd.grad(expected * 0.37, inputs)
    loss = dual_cross_entropy(rows, head, projection, 0.3, chunk, dpace, distill)
    found = torch.autograd.grad(loss.total * 0.37, inputs)
    close = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(loss.total, expected, **close)
    assert loss.divisor == pytest.approx(weights.sum().item(), rel=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("distill", DISTILL)
def test_gradcheck_in_float64(distill: Distill) -> None:
    rows, head, projection = make_rows(torch.float64)

    def total(hidden: Tensor, low: Tensor, last: Tensor) -> Tensor:
        part = Rows(hidden, low, rows.labels, rows.weights, rows.wanted)
        return dual_cross_entropy(part, head, last, 0.3, 5, None, distill).total

    assert torch.autograd.gradcheck(total, (rows.hidden, rows.low_rank, projection))


def test_dpace_by_hand() -> None:
    """Two rows that count, alpha 0.5, confidences 0.2 and 0.6: c = 0.6 and 0.8."""
    place = torch.tensor([5, 7])
    weights = Dpace(0.5, K).weights(torch.tensor([0.2, 0.6]), place)
    torch.testing.assert_close(weights, torch.tensor([0.6 + 0.6 * 0.8, 0.6 * 0.8]))
    assert Dpace(0.5, K).divisor(weights, place) == pytest.approx(1.56)
    assert Dpace(0.5, K, per_block=True).divisor(weights, place) == 1.0


def test_dpace_weights_are_the_gradient_of_the_expected_run() -> None:
    """Without smoothing: the derivative of Σ_m Π_{i<=m} q_i by log q_j, which is its derivation."""
    logs = torch.tensor([-0.3, -1.2, -0.1, -0.7], requires_grad=True)
    expected = torch.autograd.grad(logs.exp().cumprod(0).sum(), logs)[0]
    weights = Dpace(1e-12, K).weights(logs.detach().exp(), torch.arange(4))
    torch.testing.assert_close(weights, expected)


def test_dpace_without_rows() -> None:
    rows, head, projection = make_rows(torch.float32)
    empty = Rows(rows.hidden, rows.low_rank, rows.labels, torch.zeros(R))
    loss = dual_cross_entropy(empty, head, projection, 0.5, 4, Dpace(0.5, K))
    assert (loss.total.item(), loss.divisor) == (0.0, 0.0)


def test_a_teacher_of_one_token_is_cross_entropy_with_it() -> None:
    rows, head, projection = make_rows(torch.float64)
    assert rows.wanted is not None
    best = (rows.wanted @ head.T).argmax(-1)
    loss = dual_cross_entropy(rows, head, projection, 0.3, 7, None, Distill("forward_kl", top_k=1))
    labelled = Rows(rows.hidden, rows.low_rank, best, rows.weights)
    torch.testing.assert_close(loss.total, plain(labelled, head, projection, 0.3)[0])


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), family="llama")


def one_step(target_folder: Path, folder: Path, *changes: str) -> tuple[Run, StepSums]:
    run = build_run(recipe(target_folder, folder, "train.lambda_base_start=0.4", *changes))
    with torch.no_grad():
        run.model.vocab_projection.normal_(generator=torch.Generator().manual_seed(0))
    source = FeatureSource(encode_row(run.target), 100)
    rows = RowStream(run.samples, 42).rows(0, run.recipe.step_rows)
    return run, train_step(run, source, rows, 0)


@pytest.mark.parametrize(
    ("changes", "dpace", "distill"),
    [
        (["position_weights=dpace", "dpace_alpha=0.3"], Dpace(0.3, 4), None),
        (["position_weights=dpace", "dpace_divide_by=blocks"], Dpace(0.5, 4, True), None),
        (["distill=forward_kl", "distill_temperature=2"], None,
         Distill("forward_kl", temperature=2.0)),
        (["distill=total_variation", "distill_mix=0.5", "distill_top_k=7",
          "position_weights=dpace", "visible_prefix=0.5"], Dpace(0.5, 4),
         Distill("total_variation", mix=0.5, top_k=7)),
    ],
)  # fmt: skip
def test_options_reach_the_step_from_a_recipe(
    target_folder: Path, tmp_path: Path, changes: list[str],
    dpace: Dpace | None, distill: Distill | None,
) -> None:  # fmt: skip
    run, sums = one_step(target_folder, tmp_path, *[f"train.{change}" for change in changes])
    options = run.recipe.train
    samples = [each for _, each in RowStream(run.samples, 42).rows(0, options.batch_size)]
    batch = collate(samples, "cpu")
    blocks = draw_blocks(
        batch, run.model, options.num_anchors, run.recipe.gamma, anchor_generators(samples, 42, 0),
        options,
    )  # fmt: skip
    found = FeatureSource(encode_row(run.target), 0)(batch)
    rows = forward_blocks(run.model, run.target, batch, found.features, blocks)
    rows = Rows(rows.hidden, rows.low_rank, rows.labels, rows.weights,
                wanted_hidden(batch, run.model, found, blocks))  # fmt: skip
    head = run.target.head.weight
    total, weights = plain_options(rows, head, run.model.vocab_projection, 0.4, dpace, distill)
    wanted = torch.autograd.grad(total, run.model.fc.weight)[0]
    torch.testing.assert_close(run.model.fc.weight.grad, wanted, rtol=1e-4, atol=1e-5)
    assert sums.loss == pytest.approx(total.item(), rel=1e-5)
    blocks_used = int((rows.weights.view(-1, 4) > 0).any(1).sum())
    per_block = dpace is not None and dpace.per_block
    divisor = blocks_used if per_block else weights.sum().item()
    assert sums.weight == pytest.approx(divisor, rel=1e-5)


OPTIONS = ["train.position_weights=dpace", "train.distill=forward_kl", "train.distill_mix=0.5",
           "train.visible_prefix=0.5"]  # fmt: skip


def test_accumulation_does_not_change_the_sums(target_folder: Path, tmp_path: Path) -> None:
    whole, halves = (
        one_step(target_folder, tmp_path, *OPTIONS, f"train.batch_size={size}",
                 f"train.accumulation={6 // size}", "train.chunk_mb=1")
        for size in (6, 2)
    )  # fmt: skip
    assert halves[1].loss == pytest.approx(whole[1].loss, rel=1e-5)
    assert halves[1].weight == pytest.approx(whole[1].weight, rel=1e-5)
    gradients = [run.model.fc.weight.grad for run, _ in (whole, halves)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_two_runs_with_all_options_are_equal_and_pass_the_gate(
    target_folder: Path, tmp_path: Path
) -> None:
    weights = []
    for name in ("a", "b"):
        folder = f"output.folder={tmp_path / name}"
        run = build_run(recipe(target_folder, tmp_path, *OPTIONS, folder))
        assert train(run, [], quiet=True) == 4
        weights.append(run.model.state_dict())
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["train.dpace_alpha=0.4"],
            "dpace_alpha does nothing without train.position_weights=dpace",
        ),
        (["train.dpace_divide_by=blocks"], "dpace_divide_by does nothing without"),
        (["train.distill_mix=0.5"], "distill_mix does nothing without train.distill"),
        (["train.distill_temperature=2"], "distill_temperature does nothing without"),
        (["train.distill_top_k=5"], "distill_top_k does nothing without"),
        (["train.visible_prefix_base=0.5"], "visible_prefix_base does nothing without"),
        (["train.distill=forward_kl", "train.distill_mix=0"], "leaves nothing of train.distill"),
        (
            ["train.visible_prefix=0.5", "draft.block_size=2"],
            "needs draft.block_size of at least 3",
        ),
        (["train.position_weights=dpace", "train.dpace_alpha=0"], "dpace_alpha"),
        (["train.distill=reverse_kl"], "distill"),
        (["train.visible_prefix=1.5"], "visible_prefix"),
    ],
)
def test_combinations_without_sense_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_recipe(None, [*BLANK, *changes])
    assert "\n" not in str(error.value)


def test_a_recipe_survives_being_written_in_full() -> None:
    first = read_recipe(None, [*BLANK, *OPTIONS])
    assert type(first).model_validate(first.model_dump()) == first


def test_a_bfloat16_target_takes_the_options_too(target_folder: Path, tmp_path: Path) -> None:
    losses = [
        sums.loss / sums.weight
        for dtype in ("float32", "bfloat16")
        for _, sums in [one_step(target_folder, tmp_path, *OPTIONS, f"target.dtype={dtype}")]
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
