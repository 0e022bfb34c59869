"""D-PACE: position weights from the draft's own confidence (arXiv:2605.18810)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dpace:
    """Smoothing ``alpha`` (0 < alpha <= 1), rows of a block, and what the loss is divided by.

    ``per_block`` divides by the number of blocks that count, as the method's author asks
    (SpecForge issue 828); otherwise by the sum of the weights, like every other loss here.
    """

    alpha: float
    block_size: int
    per_block: bool = False

    def weights(self, confidence: Tensor, place: Tensor) -> Tensor:
        """The weight of each row, ``[R]``, from the probability of its label ``[R]``.

        ``place [R]``, increasing, says which row of the flat blocks each one is; all that count of
        a block must be among them. With ``c = (1 - alpha) · confidence + alpha`` (equation 7) the
        weight of row j is the sum over rows m >= j of ``Π_{i <= m} c_i`` (equation 8): what the
        expected number of accepted tokens owes to row j. Rows that do not count are left out of
        sums and products.
        """
        block, column = place // self.block_size, place % self.block_size
        block = block - block[:1]
        shape = (int(block[-1]) + 1 if len(block) else 0, self.block_size)
        smooth, counted = confidence.new_ones(shape), confidence.new_zeros(shape)
        smooth[block, column] = (1 - self.alpha) * confidence + self.alpha
        counted[block, column] = 1
        survives = smooth.cumprod(-1) * counted
        return survives.flip(-1).cumsum(-1).flip(-1)[block, column]

    def divisor(self, weights: Tensor, place: Tensor) -> float:
        """What the summed loss of these rows has to be divided by, ``[R]`` and ``[R]``."""
        if self.per_block:
            return float(len(torch.unique(place // self.block_size)))
        return float(weights.sum())
