"""The loss: weighted cross-entropy on final and base logits, without ever holding all logits.

``loss = (1 - λ) · final + λ · base`` with ``final = Σ w · CE(base logits + correction)`` and
``base = Σ w · CE(base logits)`` over the same rows (SpecForge and Automodel agree on this to all
printed digits). All are sums; the caller divides by the sum of weights of a whole optimizer step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """What the objective needs of R block rows.

    ``hidden [R, D]``; ``low_rank [R, E]``, the head's low-rank hidden, zero where a row is not
    corrected, or ``None`` for a draft without head; ``labels [R]``; ``weights [R]``.
    """

    hidden: Tensor
    low_rank: Tensor | None
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Loss:
    """Sums over rows: ``total`` carries the gradient, the rest are plain numbers or flags."""

    total: Tensor
    final: float
    base: float
    final_correct: Tensor
    base_correct: Tensor


def lambda_base(step: int, horizon: int, start: float, decay_ratio: float) -> float:
    """λ at an optimizer step: linear from ``start`` to 0 over ``decay_ratio`` of the horizon.

    Source: Automodel ``get_lambda_base``, SpecForge ``linear_lambda_base``.
    """
    span = max(1, int(horizon * decay_ratio))
    return min(1.0, max(0.0, start * (1.0 - min(step / span, 1.0))))


def chunk_rows(vocab_size: int, chunk_mb: int) -> int:
    """Rows a chunk so that its three float32 logit arrays fit in ``chunk_mb``."""
    return max(1, chunk_mb * 2**20 // (3 * 4 * vocab_size))


def dual_cross_entropy(
    rows: Rows, head: Tensor, projection: Tensor | None, lam: float, chunk: int
) -> Loss:
    """The objective in chunks of rows.

    ``head`` is the target's output matrix ``[V, D]`` (frozen), ``projection`` the draft's last
    projector matrix ``[V, E]``. Gradients reach ``rows.hidden``, ``rows.low_rank`` and
    ``projection``. Rows of zero weight are not computed and count as incorrect.
    """
    used = rows.weights > 0
    hidden, labels, weights = rows.hidden[used], rows.labels[used], rows.weights[used]
    low_rank = None if rows.low_rank is None else rows.low_rank[used]
    total, final, base, final_ok, base_ok = _ChunkedDualCrossEntropy.apply(
        hidden, low_rank, head, projection, labels, weights, lam, chunk
    )
    final_correct, base_correct = torch.zeros_like(used), torch.zeros_like(used)
    final_correct[used], base_correct[used] = final_ok, base_ok
    return Loss(total, final.item(), base.item(), final_correct, base_correct)


class _ChunkedDualCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass; backward only scales them.

    The loss is a sum over rows, so its gradient is known as soon as a chunk's logits are, and
    those logits need neither be kept nor computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        low_rank: Tensor | None,
        head: Tensor,
        projection: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        lam: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(head.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden)
        grad_low = None if low_rank is None else torch.zeros_like(low_rank)
        grad_projection = None if projection is None else torch.zeros_like(projection, dtype=wide)
        base_sum = hidden.new_zeros((), dtype=wide)
        final_sum = base_sum.clone()
        final_ok = torch.zeros_like(labels, dtype=torch.bool)
        base_ok = torch.zeros_like(final_ok)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            label, weight = labels[part, None], weights[part, None].to(wide)
            base = hidden[part].to(head.dtype) @ head.T
            base_ok[part] = base.argmax(-1) == label[:, 0]
            if low_rank is None or projection is None or grad_low is None:
                base_loss, grad = _cross_entropy(base, label, weight, 1.0)
                final_loss, final_ok[part] = base_loss, base_ok[part]
            else:
                low, last = low_rank[part].to(head.dtype), projection.to(head.dtype)
                final = base + low @ last.T
                final_ok[part] = final.argmax(-1) == label[:, 0]
                final_loss, grad_final = _cross_entropy(final, label, weight, 1.0 - lam)
                base_loss, grad = _cross_entropy(base, label, weight, lam)
                grad += grad_final
                grad_final = grad_final.to(head.dtype)
                grad_low[part] = (grad_final @ last).to(low_rank.dtype)
                assert grad_projection is not None
                grad_projection += grad_final.T @ low
            grad_hidden[part] = (grad.to(head.dtype) @ head).to(hidden.dtype)
            base_sum += base_loss
            final_sum += final_loss
        if projection is not None and grad_projection is not None:
            grad_projection = grad_projection.to(projection.dtype)
        ctx.save_for_backward(grad_hidden, grad_low, grad_projection)
        total = base_sum.clone() if low_rank is None else (1.0 - lam) * final_sum + lam * base_sum
        ctx.mark_non_differentiable(final_sum, base_sum, final_ok, base_ok)
        return total, final_sum, base_sum, final_ok, base_ok

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_low, grad_projection = ctx.saved_tensors
        scale = grads[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_low is None else grad_low * scale.to(grad_low.dtype),
            None,
            None if grad_projection is None else grad_projection * scale.to(grad_projection.dtype),
            *[None] * 4,
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
