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
    """Float32 arrays ``[rows, V]`` that a chunk needs at once; a teacher doubles them."""
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
    work = _Work(
        head, rows.labels[used], rows.weights[used], place, wanted, lam, chunk, dpace, distill
    )
    total, final, base, final_ok, base_ok, weights = _ChunkedDualCrossEntropy.apply(
        rows.hidden[used], low_rank, projection, work
    )
    final_correct, base_correct = torch.zeros_like(used), torch.zeros_like(used)
    final_correct[used], base_correct[used] = final_ok, base_ok
    divisor = float(rows.weights.sum()) if dpace is None else dpace.divisor(weights, place)
    return Loss(total, final.item(), base.item(), final_correct, base_correct, divisor)


@dataclass(frozen=True)
class _Work:
    """What the chunks need and no gradient reaches; ``place`` are the rows among all blocks'."""

    head: Tensor
    labels: Tensor
    weights: Tensor
    place: Tensor
    wanted: Tensor | None
    lam: float
    chunk: int
    dpace: Dpace | None
    distill: Distill | None

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

    def weigh(self, final: Tensor, part: slice) -> Tensor:
        """The weights ``[R, 1]`` of a chunk's rows, given its final logits ``[R, V]``."""
        wide = torch.promote_types(self.head.dtype, torch.float32)
        if self.dpace is None:
            return self.weights[part, None].to(wide)
        logits, label = final.to(wide), self.labels[part, None]
        confidence = (logits.gather(1, label) - logits.logsumexp(-1, keepdim=True)).exp()
        return self.dpace.weights(confidence[:, 0], self.place[part])[:, None]

    def losses(
        self, logits: Tensor, part: slice, weight: Tensor, factor: float, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of a chunk's losses, and ``factor`` times its gradient; consumes ``logits``."""
        if self.distill is None or teacher is None:
            return _cross_entropy(logits, self.labels[part, None], weight, factor)
        mix = self.distill.mix
        soft, grad = divergence(logits, teacher, weight, factor * mix, self.distill)
        if mix == 1:
            return soft, grad
        hard, grad_hard = _cross_entropy(
            logits, self.labels[part, None], weight, factor * (1 - mix)
        )
        return (1 - mix) * hard + mix * soft, grad.add_(grad_hard)

    def teacher(self, part: slice, dtype: torch.dtype) -> Tensor | None:
        """The target's distribution at a chunk's rows ``[R, V]``; kept for this chunk only."""
        if self.distill is None:
            return None
        assert self.wanted is not None, "distillation needs the target's hidden rows"
        logits = self.wanted[part].to(self.head.dtype) @ self.head.T
        return teacher_probabilities(logits, self.distill, dtype)

    def both(
        self, base: Tensor, final: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Base and final loss, the gradients of base and final logits, and the weights ``[R, 1]``.

        Both losses use the same weights. A draft without head has no ``final``, and one loss.
        """
        weight = self.weigh(base if final is None else final, part)
        teacher = self.teacher(part, weight.dtype)
        if final is None:
            loss, grad = self.losses(base, part, weight, 1.0, teacher)
            return loss, loss, grad, None, weight
        final_loss, grad_final = self.losses(final, part, weight, 1.0 - self.lam, teacher)
        base_loss, grad = self.losses(base, part, weight, self.lam, teacher)
        grad += grad_final
        return base_loss, final_loss, grad, grad_final, weight


class _ChunkedDualCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; backward only scales them.

    The loss is a sum over rows, so its gradient is known as soon as a chunk's logits are, and
    those logits need neither be kept nor computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, low_rank: Tensor | None, projection: Tensor | None, work: _Work
    ) -> tuple[Tensor, ...]:
        head, lam = work.head, work.lam
        wide = torch.promote_types(head.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden)
        grad_low = None if low_rank is None else torch.zeros_like(low_rank)
        grad_projection = None if projection is None else torch.zeros_like(projection, dtype=wide)
        base_sum = hidden.new_zeros((), dtype=wide)
        final_sum = base_sum.clone()
        final_ok = torch.zeros_like(work.labels, dtype=torch.bool)
        base_ok = torch.zeros_like(final_ok)
        weights = torch.zeros_like(work.weights, dtype=wide)
        for part in work.parts():
            base, final = hidden[part].to(head.dtype) @ head.T, None
            if low_rank is not None and projection is not None:
                low, last = low_rank[part].to(head.dtype), projection.to(head.dtype)
                final = base + low @ last.T
            base_ok[part] = base.argmax(-1) == work.labels[part]
            final_ok[part] = (
                base_ok[part] if final is None else final.argmax(-1) == work.labels[part]
            )
            base_loss, final_loss, grad, grad_final, weight = work.both(base, final, part)
            grad_hidden[part] = (grad.to(head.dtype) @ head).to(hidden.dtype)
            if grad_final is not None and grad_low is not None and grad_projection is not None:
                grad_final = grad_final.to(head.dtype)
                grad_low[part] = (grad_final @ last).to(grad_low.dtype)
                grad_projection += grad_final.T @ low
            weights[part] = weight[:, 0]
            base_sum += base_loss
            final_sum += final_loss
        if projection is not None and grad_projection is not None:
            grad_projection = grad_projection.to(projection.dtype)
        ctx.save_for_backward(grad_hidden, grad_low, grad_projection)
        total = base_sum.clone() if low_rank is None else (1.0 - lam) * final_sum + lam * base_sum
        ctx.mark_non_differentiable(final_sum, base_sum, final_ok, base_ok, weights)
        return total, final_sum, base_sum, final_ok, base_ok, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_low, grad_projection = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_low is None else grad_low * scale.to(grad_low.dtype),
            None if grad_projection is None else grad_projection * scale.to(grad_projection.dtype),
            None,
        )


def _cross_entropy(
    logits: Tensor, label: Tensor, weight: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and ``factor`` times its gradient; ``logits`` is consumed.

    Computed in the type of ``weight``, at least float32. ``label`` and ``weight`` are ``[R, 1]``.
    """
    wide = logits.to(weight.dtype)
    normaliser = wide.logsumexp(-1, keepdim=True)
    loss = ((normaliser - wide.gather(1, label)) * weight).sum()
    grad = wide.sub_(normaliser).exp_().mul_(factor * weight)
    grad.scatter_add_(1, label, -factor * weight)
    return loss, grad


def regression(rows: Rows, wanted: Tensor) -> Tensor:
    """Sum over rows of ``w · |h - wanted|² / |wanted|²``; no product with the vocabulary.

    ``wanted [R, D]`` is the target's own normed hidden row that predicts the row's label.
    """
    error = (rows.hidden - wanted).float().pow(2).sum(-1)
    return (rows.weights * error / wanted.float().pow(2).sum(-1).clamp(min=1e-6)).sum()
