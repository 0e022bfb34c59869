"""Distillation: a divergence from the target's own next-token distribution, with its gradient."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distill:
    """What replaces a row's cross-entropy: ``(1 - mix) · CE + mix · divergence``.

    ``temperature`` divides the logits of both models; ``top_k`` keeps that many tokens of the
    teacher, renormalised (0: all).
    """

    kind: Literal["forward_kl", "total_variation"]
    mix: float = 1.0
    temperature: float = 1.0
    top_k: int = 0


def teacher_probabilities(logits: Tensor, distill: Distill, dtype: torch.dtype) -> Tensor:
    """The teacher's distribution ``[R, V]`` from its logits ``[R, V]``, computed in ``dtype``."""
    wide = logits.to(dtype) / distill.temperature
    if distill.top_k == 0 or distill.top_k >= wide.shape[-1]:
        return wide.softmax(-1)
    best, index = wide.topk(distill.top_k, dim=-1)
    return torch.zeros_like(wide).scatter_(-1, index, best.softmax(-1))


def divergence(logits: Tensor, teacher: Tensor, distill: Distill) -> tuple[Tensor, Tensor]:
    """Each row's divergence from ``teacher`` p ``[R, 1]``, and its gradient by the logits ``[R, V]``.

    With ``q = softmax(logits / T)``: ``forward_kl`` is ``T² · Σ p (log p - log q)``, whose gradient
    is ``T (q - p)`` (T² keeps its size independent of T: Hinton et al., arXiv:1503.02531);
    ``total_variation`` is ``½ Σ |p - q|``, one minus the chance that sampled verification keeps a
    draft (Leviathan et al., arXiv:2211.17192), with gradient ``q (s - Σ q s) / T`` where
    ``s = ½ sign(q - p)``. ``logits`` are left as they are.
    """
    heat = distill.temperature
    log_q = (logits / heat).log_softmax(-1)
    if distill.kind == "forward_kl":
        rows = torch.xlogy(teacher, teacher).sum(-1, keepdim=True)
        rows = rows - torch.linalg.vecdot(teacher, log_q).unsqueeze(-1)
        return heat**2 * rows, log_q.exp_().sub_(teacher).mul_(heat)
    q = log_q.exp_()
    gap = q - teacher
    rows = gap.abs().sum(-1, keepdim=True) / 2
    side = gap.sign_().mul_(0.5)
    side -= torch.linalg.vecdot(q, side).unsqueeze(-1)
    return rows, q.mul_(side).div_(heat)
