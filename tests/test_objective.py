"""The chunked objective against its plain twin: loss, gradients, metrics and the λ schedule."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from domino_kit.train.objective import (
    Rows,
    chunk_rows,
    dual_cross_entropy,
    lambda_base,
    regression,
)

R, D, E, V = 23, 6, 4, 17


def make_rows(
    seed: int, with_head: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Rows, torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(R, generator=g, dtype=dtype) * (torch.rand(R, generator=g) > 0.4)
    hidden = torch.randn(R, D, generator=g, dtype=dtype, requires_grad=True)
    low = torch.randn(R, E, generator=g, dtype=dtype, requires_grad=True) if with_head else None
    projection = torch.randn(V, E, generator=g, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (R,), generator=g)
    head = torch.randn(V, D, generator=g, dtype=dtype)
    return Rows(hidden, low, labels, weights), head, projection if with_head else None


def plain(
    rows: Rows, head: torch.Tensor, projection: torch.Tensor | None, lam: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All logits at once: spec 3.4 word for word, as sums."""
    base = rows.hidden @ head.T
    base_loss = (F.cross_entropy(base, rows.labels, reduction="none") * rows.weights).sum()
    if rows.low_rank is None or projection is None:
        return base_loss, base_loss, base_loss
    final = base + rows.low_rank @ projection.T
    final_loss = (F.cross_entropy(final, rows.labels, reduction="none") * rows.weights).sum()
    return (1 - lam) * final_loss + lam * base_loss, final_loss, base_loss


@pytest.mark.parametrize("chunk", [1, 5, R, 1000])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_equal_the_plain_version(
    chunk: int, lam: float, with_head: bool, dtype: torch.dtype
) -> None:
    rows, head, projection = make_rows(1, with_head, dtype)
    inputs = [t for t in (rows.hidden, rows.low_rank, projection) if t is not None]
    expected, final, base = plain(rows, head, projection, lam)
    wanted = torch.autograd.grad(expected * 0.37, inputs, allow_unused=True)
    loss = dual_cross_entropy(rows, head, projection, lam, chunk)
    found = torch.autograd.grad(loss.total * 0.37, inputs)
    torch.testing.assert_close(loss.total, expected, rtol=1e-6, atol=1e-6)
    assert loss.final == pytest.approx(final.item(), rel=1e-6)
    assert loss.base == pytest.approx(base.item(), rel=1e-6)
    for ours, theirs in zip(found, wanted, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_gradcheck_in_float64() -> None:
    rows, head, projection = make_rows(6, dtype=torch.float64)

    def total(hidden: torch.Tensor, low: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        part = Rows(hidden, low, rows.labels, rows.weights)
        return dual_cross_entropy(part, head, last, 0.3, 5).total

    assert torch.autograd.gradcheck(total, (rows.hidden, rows.low_rank, projection))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_no_further_from_float64_than_the_plain_ones(
    seed: int, dtype: torch.dtype
) -> None:
    rows, width, rank, vocab = 96, 64, 32, 8000
    g = torch.Generator().manual_seed(seed)
    head = (torch.randn(vocab, width, generator=g) * 2 * width**-0.5).to(dtype)
    inputs = [
        torch.randn(rows, width, generator=g).to(dtype).requires_grad_(),
        torch.randn(rows, rank, generator=g).to(dtype).requires_grad_(),
        (torch.randn(vocab, rank, generator=g) * rank**-0.5).to(dtype).requires_grad_(),
    ]
    labels, weights = torch.randint(vocab, (rows,), generator=g), torch.rand(rows, generator=g)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = torch.autograd.grad(
        plain(Rows(exact[0], exact[1], labels, weights), head.double(), exact[2], 0.3)[0], exact
    )
    own = Rows(inputs[0], inputs[1], labels, weights)
    theirs = torch.autograd.grad(plain(own, head, inputs[2], 0.3)[0], inputs)
    ours = torch.autograd.grad(dual_cross_entropy(own, head, inputs[2], 0.3, 20).total, inputs)
    for found, other, right in zip(ours, theirs, wanted, strict=True):
        assert 0 < (found - right).norm() <= (other - right).norm()


def test_a_label_that_the_draft_rules_out_has_a_finite_loss() -> None:
    """Its probability is zero in float32; its loss is the distance of the logits."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    rows = Rows(hidden, None, torch.tensor([1]), torch.tensor([1.0]))
    loss = dual_cross_entropy(rows, torch.tensor([[500.0], [-500.0]]), None, 1.0, 4)
    loss.total.backward()
    assert loss.total == 1000
    assert hidden.grad == 1000


class Widest(TorchDispatchMode):
    """The most rows in any tensor ``[rows, V]`` that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.dim() == 2 and each.shape[1] == V:
                self.rows = max(self.rows, each.shape[0])
        return result


def test_never_more_logits_than_a_chunk() -> None:
    rows, head, projection = make_rows(8)
    with Widest() as found:
        dual_cross_entropy(rows, head, projection, 0.3, 8).total.backward()
    # less than a chunk would be hidden by the transposed head [D, V], which is a view
    assert found.rows == 8 > max(D, E)
    with Widest() as found:
        plain(rows, head, projection, 0.3)[0].backward()
    assert found.rows == R


def test_without_gradient_the_numbers_are_the_same() -> None:
    rows, head, projection = make_rows(9)
    wanted = dual_cross_entropy(rows, head, projection, 0.3, 5)
    with torch.no_grad():
        found = dual_cross_entropy(rows, head, projection, 0.3, 5)
    assert not found.total.requires_grad
    assert (found.total, found.final, found.base) == (wanted.total, wanted.final, wanted.base)
    assert torch.equal(found.final_correct, wanted.final_correct)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_any_split_into_micro_batches_gives_the_same_gradient(pieces: int) -> None:
    rows, head, projection = make_rows(2)
    assert projection is not None
    assert rows.low_rank is not None
    whole, _, _ = plain(rows, head, projection, 0.4)
    wanted = torch.autograd.grad(whole, projection, retain_graph=True)[0]
    for index in torch.randperm(R).tensor_split(pieces):
        part = Rows(rows.hidden[index], rows.low_rank[index], rows.labels[index],
                    rows.weights[index])  # fmt: skip
        dual_cross_entropy(part, head, projection, 0.4, 3).total.backward(retain_graph=True)
    torch.testing.assert_close(projection.grad, wanted, rtol=1e-6, atol=1e-6)


def test_correct_flags_are_the_argmax_of_both_heads_where_weighted() -> None:
    rows, head, projection = make_rows(3)
    assert projection is not None
    assert rows.low_rank is not None
    loss = dual_cross_entropy(rows, head, projection, 0.5, 4)
    base = rows.hidden @ head.T
    used = rows.weights > 0
    assert torch.equal(loss.base_correct, (base.argmax(-1) == rows.labels) & used)
    final = (base + rows.low_rank @ projection.T).argmax(-1)
    assert torch.equal(loss.final_correct, (final == rows.labels) & used)


def test_rows_of_zero_weight_may_hold_anything() -> None:
    rows, head, projection = make_rows(4)
    expected = dual_cross_entropy(rows, head, projection, 0.5, 4).total
    hidden = rows.hidden.detach().clone()
    hidden[rows.weights == 0] = torch.nan
    hidden.requires_grad_()
    dirty = Rows(hidden, rows.low_rank, rows.labels, rows.weights)
    loss = dual_cross_entropy(dirty, head, projection, 0.5, 4).total
    loss.backward()
    assert loss == expected
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
    assert (hidden.grad[rows.weights == 0] == 0).all()


def test_no_weighted_row_is_a_zero_loss_that_still_has_a_gradient() -> None:
    rows, head, projection = make_rows(5)
    empty = Rows(rows.hidden, rows.low_rank, rows.labels, torch.zeros(R))
    loss = dual_cross_entropy(empty, head, projection, 0.5, 4)
    loss.total.backward()
    assert loss.total == 0
    assert projection is not None
    assert (projection.grad == 0).all()


@pytest.mark.parametrize(
    ("step", "ratio", "expected"),
    [(0, 1.0, 1.0), (50, 1.0, 0.5), (100, 1.0, 0.0), (25, 0.5, 0.5), (50, 0.5, 0.0), (99, 0.5, 0)],
)
def test_lambda_falls_linearly_over_its_share_of_the_horizon(
    step: int, ratio: float, expected: float
) -> None:
    assert lambda_base(step, 100, 1.0, ratio) == pytest.approx(expected)


def test_regression_is_the_weighted_relative_squared_error() -> None:
    rows, _, _ = make_rows(7)
    wanted = torch.randn(R, D)
    expected = sum(
        w.item() * ((h - t) ** 2).sum().item() / (t**2).sum().item()
        for w, h, t in zip(rows.weights, rows.hidden, wanted, strict=True)
    )
    assert regression(rows, wanted).item() == pytest.approx(expected, rel=1e-5)


def test_a_chunk_fits_its_memory() -> None:
    assert chunk_rows(1000, 1, 3) * 1000 * 4 * 3 <= 2**20
    assert chunk_rows(10**9, 1) == 1
