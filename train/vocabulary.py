"""Passes over the vocabulary that a chunk of rows makes: its cross-entropy, sums for gradients."""

import torch
from torch import Tensor

SUMS = 32
"""Partial sums of a sum over the vocabulary, since rounding errors grow with a sum's length."""


def cross_entropy(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies ``[R, 1]`` and whether each label is the best token ``[R]``.

    ``logits [R, V]`` become their softmax, a few rows at a time, so that no second array of that
    size exists: four on a CPU, which stay in its cache; more on a GPU, for which a few are too
    little work. The log-sum-exp comes out of it: ``x_best - log p_best``, exact since ``p_best >=
    1/V``.
    """
    top, best = logits.max(-1, keepdim=True)
    shortfall = top - logits.gather(1, label)
    few = torch.empty_like(logits[: 4 if logits.device.type == "cpu" else -(-len(logits) // 8)])
    for rows in logits.split(len(few)):
        rows.copy_(torch.softmax(rows, -1, out=few[: len(rows)]))
    losses = shortfall - logits.gather(1, best).log_()
    return losses, (best == label)[:, 0]


def sum_over_vocabulary(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad [R, V] @ weight [V, D]``; in float32 from partial sums, which is more exact.

    Narrower types are summed in float32 by the library and rounded once.
    """
    if grad.element_size() < 4:
        return grad @ weight
    total = grad.new_zeros(len(grad), weight.shape[1], dtype=torch.float64)
    size = -(-len(weight) // SUMS)
    for left, right in zip(grad.split(size, dim=1), weight.split(size), strict=True):
        total += left @ right
    return total.to(grad.dtype)


def add_product(total: Tensor, grad: Tensor, low: Tensor) -> None:
    """``total [V, E] += gradᵀ [V, R] @ low [R, E]``, not rounded to ``low``'s type on the way.

    Otherwise the sum over chunks would carry a rounding of each. The branch for a GPU, where
    float32 products would be slow, has not been run.
    """
    if low.is_cuda and low.dtype != total.dtype:
        total += torch.mm(grad.to(low.dtype).T, low, out_dtype=total.dtype)
    else:
        total.addmm_(grad.T, low.to(total.dtype))
