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
from domino_kit.train.vocabulary import add_product, cross_entropy, sum_over_vocabulary


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


PARTS = 2
"""Parts of a chunk whose final logits exist one after another."""


def logit_arrays(distill: bool) -> int:
    """Float32 arrays ``[rows, V]`` that a chunk needs at once, at most; a teacher doubles them.

    Base logits, which become their gradient in place, and final logits of a part; in bfloat16
    also the float32 copies of a part's.
    """
    return 4 if distill else 2


def chunk_rows(vocab_size: int, chunk_mb: int, arrays: int = 2) -> int:
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

    def chunks(self) -> list[list[slice]]:
        """The parts in groups of at most ``chunk`` rows, or of one part."""
        found: list[list[slice]] = []
        for part in self.parts():
            if found and part.stop - found[-1][0].start <= self.chunk:
                found[-1].append(part)
            else:
                found.append([part])
        return found

    def parts(self) -> list[slice]:
        """Parts of chunks; under D-PACE of whole blocks, since their rows' weights hang together."""
        rows, count = max(1, self.chunk // PARTS), len(self.labels)
        if self.dpace is None:
            return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
        size = self.dpace.block_size
        block = (self.place // size).tolist()
        width = max(1, rows // size)
        cuts = [
            i for i in range(len(block)) if i == 0 or block[i] // width != block[i - 1] // width
        ]
        return [slice(start, stop) for start, stop in pairwise([*cuts, len(block)])]

    def logits_of(self, rows: list[slice]) -> Tensor:
        """Memory for the logits of the longest of ``rows``."""
        most = max((each.stop - each.start for each in rows), default=0)
        return self.head.new_empty(most, len(self.head))

    def teacher(self, part: slice) -> Tensor | None:
        """The target's distribution at a part's rows ``[R, V]``; kept for this part only."""
        if self.distill is None:
            return None
        assert self.wanted is not None, "distillation needs the target's hidden rows"
        logits = self.wanted[part].to(self.head.dtype) @ self.head.T
        return teacher_probabilities(logits, self.distill, self.wide)

    def measure(self, logits: Tensor, part: slice, teacher: Tensor | None) -> "_Measured":
        """Losses and gradient of a part's ``logits [R, V]``, which are consumed."""
        label = self.labels[part, None]
        if self.distill is None or teacher is None:
            hard, correct = cross_entropy(logits, label)
            return _Measured(hard, hard, correct, logits, label, 1.0)
        mix = self.distill.mix
        soft, grad = divergence(logits, teacher, self.distill)
        hard, correct = cross_entropy(logits, label)
        grad.mul_(mix).add_(logits, alpha=1 - mix)
        return _Measured((1 - mix) * hard + mix * soft, hard, correct, grad, label, 1 - mix)

    def weigh(self, final: "_Measured", part: slice) -> Tensor:
        """The weights ``[R, 1]`` of a part's rows, given their final losses."""
        if self.dpace is None:
            return self.weights[part, None].to(self.wide)
        confidence = final.cross_entropy.neg().exp()
        return self.dpace.weights(confidence[:, 0], self.place[part])[:, None]


@dataclass(frozen=True)
class _Measured:
    """A part's rows by one head: ``loss [R, 1]``, the cross-entropy in it, whether the label is
    the best token ``[R]``; the gradient of ``loss`` by the logits ``[R, V]`` is ``slope`` less
    ``share`` at each ``label [R, 1]``."""

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor
    slope: Tensor
    label: Tensor
    share: float

    def gradient(self, weight: Tensor) -> Tensor:
        """That of ``weight [R, 1]`` times the loss, in the memory of ``slope``.

        The label's share is the largest entry by far; taken off last, it is rounded once.
        """
        return self.slope.mul_(weight).scatter_add_(1, self.label, -self.share * weight)


@dataclass(frozen=True)
class _Correction:
    """What makes final logits of base logits, in the head's type: ``low [R, E]`` and ``last
    [V, E]``; a part's final logits share the ``memory`` with those of all other parts."""

    low: Tensor
    last: Tensor
    memory: Tensor

    @classmethod
    def of(
        cls, work: _Work, parts: list[slice], low: Tensor | None, last: Tensor | None
    ) -> "_Correction | None":
        """Nothing for a draft without head."""
        if low is None or last is None:
            return None
        dtype = work.head.dtype
        return cls(low.to(dtype), last.to(dtype), work.logits_of(parts))

    def final(self, base: Tensor, part: slice) -> Tensor:
        """Final logits ``[R, V]`` of a part."""
        return torch.addmm(base, self.low[part], self.last.T, out=self.memory[: len(base)])


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
            if low_rank is not None and projection is not None:
                self.grad_low = torch.zeros_like(low_rank)
                self.grad_projection = torch.zeros_like(projection, dtype=work.wide)


def _add_chunk(
    sums: _Sums, work: _Work, parts: list[slice], hidden: Tensor, memory: Tensor,
    correction: _Correction | None,
) -> None:  # fmt: skip
    """Compute a chunk's base logits in ``memory``, and all that follows from them part by part."""
    rows = _union(parts)
    base = torch.mm(hidden[rows], work.head.T, out=memory[: rows.stop - rows.start])
    for part in parts:
        own = base[part.start - rows.start : part.stop - rows.start]
        own.copy_(_add_part(sums, work, part, own, correction))
    if sums.grad_hidden is not None:
        sums.grad_hidden[rows] = sum_over_vocabulary(base, work.head)


def _add_part(
    sums: _Sums, work: _Work, part: slice, base: Tensor, correction: _Correction | None
) -> Tensor:
    """Losses of a part and their gradient by its ``base [R, V]`` logits, which are consumed."""
    final = None if correction is None else correction.final(base, part)
    teacher = work.teacher(part)
    first = work.measure(base.to(work.wide), part, teacher)
    second = first if final is None else work.measure(final.to(work.wide), part, teacher)
    del teacher
    weight = work.weigh(second, part)
    sums.base_ok[part], sums.final_ok[part] = first.correct, second.correct
    sums.base += (first.loss * weight).sum()
    sums.final += (second.loss * weight).sum()
    sums.weights[part] = weight[:, 0]
    if sums.grad_low is None or sums.grad_projection is None:
        return first.gradient(weight)
    assert correction is not None
    assert final is not None
    grad = first.gradient(work.lam * weight)
    grad += (grad_final := second.gradient((1.0 - work.lam) * weight))
    add_product(sums.grad_projection, grad_final, correction.low[part])
    sums.grad_low[part] = sum_over_vocabulary(final.copy_(grad_final), correction.last)
    return grad


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
        chunks = work.chunks()
        every_part = [part for parts in chunks for part in parts]
        correction = _Correction.of(work, every_part, low_rank, projection)
        memory = work.logits_of([_union(parts) for parts in chunks])
        cast = hidden.to(work.head.dtype)
        for parts in chunks:
            _add_chunk(sums, work, parts, cast, memory, correction)
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


def _union(parts: list[slice]) -> slice:
    """The rows of neighbouring parts."""
    return slice(parts[0].start, parts[-1].stop)


def regression(rows: Rows, wanted: Tensor) -> Tensor:
    """Sum over rows of ``w · |h - wanted|² / |wanted|²``; no product with the vocabulary.

    ``wanted [R, D]`` is the target's own normed hidden row that predicts the row's label.
    """
    error = (rows.hidden - wanted).float().pow(2).sum(-1)
    return (rows.weights * error / wanted.float().pow(2).sum(-1).clamp(min=1e-6)).sum()
