"""The loss: weighted cross-entropy on final and base logits, without ever holding all logits.

``loss = (1 - λ) · final + λ · base`` with ``final = Σ w · CE(base logits + correction)`` and
``base = Σ w · CE(base logits)`` over the same rows (SpecForge and Automodel agree on this to all
printed digits). All are sums; the caller divides by the sum of weights of a whole optimizer step.
Options replace the weights (``dpace.py``) or mix in distillation (``distill.py``).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from domino_kit.train.distill import Distill, divergence, teacher_probabilities
from domino_kit.train.dpace import Dpace


@dataclass(frozen=True)
class Rows:
    """What the objective needs of R block rows.

    ``hidden [R, D]``; ``low_rank [R, E]``, the head's low-rank hidden, zero where a row is not
    corrected, or ``None`` for a draft without head; ``labels [R]``; ``weights [R]``. Distillation
    also needs ``wanted [R, D]``, the target's own normed hidden row that predicts each label.
    """

    hidden: Tensor
    low_rank: Tensor | None
    labels: Tensor
    weights: Tensor
    wanted: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Sums over rows: ``total`` carries the gradient, the rest are plain numbers or flags.

    ``divisor`` is what the sums have to be divided by, summed over a whole optimizer step: the
    sum of the weights that were used.
    """

    total: Tensor
    final: float
    base: float
    final_correct: Tensor
    base_correct: Tensor
    divisor: float


def lambda_base(step: int, horizon: int, start: float, decay_ratio: float) -> float:
    """λ at an optimizer step: linear from ``start`` to 0 over ``decay_ratio`` of the horizon.

    Source: Automodel ``get_lambda_base``, SpecForge ``linear_lambda_base``.
    """
    span = max(1, int(horizon * decay_ratio))
    return min(1.0, max(0.0, start * (1.0 - min(step / span, 1.0))))


def logit_arrays(distill: bool) -> int:
    """Float32 arrays ``[rows, V]`` that a chunk needs at once, at most; a teacher doubles them.

    Base and final logits, which become their gradients in place, and what bfloat16 copies of both
    take.
    """
    return 6 if distill else 3


def chunk_rows(vocab_size: int, chunk_mb: int, arrays: int = 3) -> int:
    """Rows a chunk so that its float32 ``arrays`` of ``[rows, V]`` fit in ``chunk_mb``."""
    return max(1, chunk_mb * 2**20 // (arrays * 4 * vocab_size))


def dual_cross_entropy(
    rows: Rows,
    head: Tensor,
    projection: Tensor | None,
    lam: float,
    chunk: int,
    dpace: Dpace | None = None,
    distill: Distill | None = None,
) -> Loss:
    """The objective in chunks of rows.

    ``head`` is the target's output matrix ``[V, D]`` (frozen), ``projection`` the draft's last
    projector matrix ``[V, E]``. Gradients reach ``rows.hidden``, ``rows.low_rank`` and
    ``projection``. Rows of zero weight are not computed and count as incorrect.

    ``dpace`` replaces the weights of the other rows by its own; ``distill`` mixes every
    cross-entropy with a divergence from the target's distribution, and needs ``rows.wanted``.
    """
    used = rows.weights > 0
    place = used.nonzero().flatten()
    low_rank = None if rows.low_rank is None else rows.low_rank[used]
    wanted = None if distill is None or rows.wanted is None else rows.wanted[used]
    learns = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in (rows.hidden, low_rank, projection)
    )
    work = _Work(
        head, rows.labels[used], rows.weights[used], place, wanted, lam, chunk, dpace, distill,
        learns,
    )  # fmt: skip
    total, final, base, final_ok, base_ok, weights = _ChunkedDualCrossEntropy.apply(
        rows.hidden[used], low_rank, projection, work
    )
    final_correct, base_correct = torch.zeros_like(used), torch.zeros_like(used)
    final_correct[used], base_correct[used] = final_ok, base_ok
    divisor = float(rows.weights.sum()) if dpace is None else dpace.divisor(weights, place)
    return Loss(total, final.item(), base.item(), final_correct, base_correct, divisor)


@dataclass(frozen=True)
class _Work:
    """What the chunks need and no gradient reaches; ``place`` are the rows among all blocks'.

    Without ``learns`` no gradient is computed.
    """

    head: Tensor
    labels: Tensor
    weights: Tensor
    place: Tensor
    wanted: Tensor | None
    lam: float
    chunk: int
    dpace: Dpace | None
    distill: Distill | None
    learns: bool

    @property
    def wide(self) -> torch.dtype:
        """The type of everything that sums over the vocabulary: at least float32."""
        return torch.promote_types(self.head.dtype, torch.float32)

    def parts(self) -> list[slice]:
        """The chunks; under D-PACE each holds whole blocks, since their rows' weights hang together."""
        if self.dpace is None:
            starts = range(0, len(self.labels), self.chunk)
            return [slice(start, start + self.chunk) for start in starts]
        size = self.dpace.block_size
        block = (self.place // size).tolist()
        width = max(1, self.chunk // size)
        cuts = [
            i for i in range(len(block)) if i == 0 or block[i] // width != block[i - 1] // width
        ]
        return [slice(start, stop) for start, stop in pairwise([*cuts, len(block)])]

    def teacher(self, part: slice) -> Tensor | None:
        """The target's distribution at a chunk's rows ``[R, V]``; kept for this chunk only."""
        if self.distill is None:
            return None
        assert self.wanted is not None, "distillation needs the target's hidden rows"
        logits = self.wanted[part].to(self.head.dtype) @ self.head.T
        return teacher_probabilities(logits, self.distill, self.wide)

    def measure(self, logits: Tensor, part: slice, teacher: Tensor | None) -> "_Measured":
        """Losses and gradient of a chunk's ``logits [R, V]``, which are consumed."""
        label = self.labels[part, None]
        if self.distill is None or teacher is None:
            hard, correct = _cross_entropy(logits, label)
            return _Measured(hard, hard, correct, logits)
        mix = self.distill.mix
        soft, grad = divergence(logits, teacher, self.distill)
        hard, correct = _cross_entropy(logits, label)
        grad.mul_(mix).add_(logits, alpha=1 - mix)
        return _Measured((1 - mix) * hard + mix * soft, hard, correct, grad)

    def weigh(self, final: "_Measured", part: slice) -> Tensor:
        """The weights ``[R, 1]`` of a chunk's rows, given their final losses."""
        if self.dpace is None:
            return self.weights[part, None].to(self.wide)
        confidence = final.cross_entropy.neg().exp()
        return self.dpace.weights(confidence[:, 0], self.place[part])[:, None]


@dataclass(frozen=True)
class _Measured:
    """A chunk's rows by one head: ``loss [R, 1]``, the cross-entropy in it, whether the label is
    the best token ``[R]``, and the gradient of ``loss`` by the logits ``[R, V]``."""

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor
    grad: Tensor


class _Sums:
    """What all chunks add up to: losses, flags and gradients."""

    def __init__(
        self, work: _Work, hidden: Tensor, low_rank: Tensor | None, projection: Tensor | None
    ) -> None:
        self.base = hidden.new_zeros((), dtype=work.wide)
        self.final = self.base.clone()
        self.final_ok = torch.zeros_like(work.labels, dtype=torch.bool)
        self.base_ok = torch.zeros_like(self.final_ok)
        self.weights = torch.zeros_like(work.weights, dtype=work.wide)
        self.grad_hidden = self.grad_low = self.grad_projection = None
        if work.learns:
            self.grad_hidden = torch.zeros_like(hidden)
            self.grad_low = None if low_rank is None else torch.zeros_like(low_rank)
            if projection is not None:
                self.grad_projection = torch.zeros_like(projection, dtype=work.wide)


def _add_chunk(
    sums: _Sums, work: _Work, part: slice, hidden: Tensor, low: Tensor | None, last: Tensor | None
) -> None:
    """Compute a chunk's logits, losses and gradients; its logits are gone afterwards."""
    head, lam = work.head, work.lam
    base, final = hidden @ head.T, None
    if low is not None and last is not None:
        final = torch.addmm(base, low, last.T).to(work.wide)
    teacher = work.teacher(part)
    first = work.measure(base.to(work.wide), part, teacher)
    del base
    second = first if final is None else work.measure(final, part, teacher)
    del teacher
    weight = work.weigh(second, part)
    sums.base_ok[part], sums.final_ok[part] = first.correct, second.correct
    sums.base += (first.loss * weight).sum()
    sums.final += (second.loss * weight).sum()
    sums.weights[part] = weight[:, 0]
    if sums.grad_hidden is None:
        return
    grad = first.grad.mul_(weight if final is None else lam * weight)
    if final is not None and sums.grad_low is not None and sums.grad_projection is not None:
        assert low is not None and last is not None
        grad += (grad_final := second.grad.mul_((1.0 - lam) * weight))
        sums.grad_low[part] = grad_final.to(head.dtype) @ last
        _add_product(sums.grad_projection, grad_final, low)
    sums.grad_hidden[part] = (grad.to(head.dtype) @ head).to(hidden.dtype)


class _ChunkedDualCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; backward only scales them.

    The loss is a sum over rows, so its gradient is known as soon as a chunk's logits are, and
    those logits need neither be kept nor computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, low_rank: Tensor | None, projection: Tensor | None, work: _Work
    ) -> tuple[Tensor, ...]:
        sums = _Sums(work, hidden, low_rank, projection)
        dtype = work.head.dtype
        last = None if projection is None else projection.to(dtype)
        for part in work.parts():
            low = None if low_rank is None else low_rank[part].to(dtype)
            _add_chunk(sums, work, part, hidden[part].to(dtype), low, last)
        if projection is not None and sums.grad_projection is not None:
            sums.grad_projection = sums.grad_projection.to(projection.dtype)
        ctx.save_for_backward(sums.grad_hidden, sums.grad_low, sums.grad_projection)
        total = sums.base.clone()
        if low_rank is not None:
            total = (1.0 - work.lam) * sums.final + work.lam * sums.base
        plain = (sums.final, sums.base, sums.final_ok, sums.base_ok, sums.weights)
        ctx.mark_non_differentiable(*plain)
        return total, *plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, scale = ctx.saved_tensors, grads[0]
        if scale != 1:  # else no second copy of the projection's gradient
            found = [None if each is None else each * scale.to(each.dtype) for each in found]
        return *found, None


def _cross_entropy(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies ``[R, 1]`` and whether each label is the best token ``[R]``.

    ``logits [R, V]`` become the gradient, ``softmax - one_hot(label)``. The softmax goes over a few
    rows at a time, so that no second array of that size exists and, on a CPU, rows stay in its
    cache. The log-sum-exp comes out of it: ``x_best - log p_best``, exact since ``p_best >= 1/V``.
    """
    top, best = logits.max(-1, keepdim=True)
    shortfall = top - logits.gather(1, label)
    for rows in logits.split(max(1, len(logits) // 8)):
        rows.copy_(rows.softmax(-1))
    losses = shortfall - logits.gather(1, best).log_()
    logits.scatter_add_(1, label, torch.full_like(losses, -1.0))
    return losses, (best == label)[:, 0]


def _add_product(total: Tensor, grad: Tensor, low: Tensor) -> None:
    """``total [V, E] += gradᵀ [V, R] @ low [R, E]``, not rounded to ``low``'s type on the way.

    Otherwise the sum over chunks would carry a rounding of each. The branch for a GPU, where
    float32 products would be slow, has not been run.
    """
    if low.is_cuda and low.dtype != total.dtype:
        total += torch.mm(grad.to(low.dtype).T, low, out_dtype=total.dtype)
    else:
        total.addmm_(grad.T, low.to(total.dtype))


def regression(rows: Rows, wanted: Tensor) -> Tensor:
    """Sum over rows of ``w · |h - wanted|² / |wanted|²``; no product with the vocabulary.

    ``wanted [R, D]`` is the target's own normed hidden row that predicts the row's label.
    """
    error = (rows.hidden - wanted).float().pow(2).sum(-1)
    return (rows.weights * error / wanted.float().pow(2).sum(-1).clamp(min=1e-6)).sum()
