"""Target features for training, computed in process and kept in memory while they fit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_kit.target import Target
from domino_kit.train.dataset import Batch, Sample


@dataclass(frozen=True)
class BatchFeatures:
    """Features ``[B, S, layers*D]`` and the target's normed last hidden rows ``[B, S, D]``."""

    features: Tensor
    hidden: Tensor


RowEncoder = Callable[[Sample], tuple[Tensor, Tensor]]
"""The features ``[S, layers*D]`` and normed last hidden rows ``[S, D]`` of one sample."""


def encode_row(target: Target) -> RowEncoder:
    """The in-process encoder: each sample in a pass of its own.

    A row's features then do not depend on its neighbours in a batch (another padding is another
    rounding), so they are the same bit for bit in every epoch, on any number of processes, after
    an interruption and out of a cache.
    """

    def encode(sample: Sample) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([sample.input_ids], device=target.device)
        found = target.encode(ids, torch.ones_like(ids))
        return found.features[0], found.hidden[0]

    return encode


class FeatureSource:
    """The frozen target's view of samples: the same in every epoch, so kept up to ``cache_mb``."""

    def __init__(self, encode: RowEncoder, cache_mb: int) -> None:
        self.encode = encode
        self.budget = cache_mb * 2**20
        self._kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Batch) -> BatchFeatures:
        """Features of a batch; padding rows are zero."""
        pairs = [self._row(sample) for sample in batch.samples]
        return BatchFeatures(_pad([pair[0] for pair in pairs]), _pad([pair[1] for pair in pairs]))

    def _row(self, sample: Sample) -> tuple[Tensor, Tensor]:
        key = sample.row_id, sample.index
        found = self._kept.get(key)
        if found is None:
            found = self.encode(sample)
            size = sum(tensor.nbytes for tensor in found)
            if size <= self.budget:
                self.budget -= size
                self._kept[key] = found
        return found


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
