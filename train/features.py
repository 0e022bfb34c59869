"""Target features for training, computed in process and kept in memory while they fit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_kit.target import Target
from domino_kit.train.dataset import Batch, Sample, collate


@dataclass(frozen=True)
class BatchFeatures:
    """Features ``[B, S, layers*D]`` and the target's normed last hidden rows ``[B, S, D]``."""

    features: Tensor
    hidden: Tensor


class FeatureSource:
    """The frozen target's view of samples.

    It is the same in every epoch, so rows are kept in memory up to ``cache_mb``; beyond that they
    are computed anew. Cached and fresh features are equal bit for bit only in the same padded
    batch, so a row is always encoded in the batch that first asked for it.
    """

    def __init__(self, target: Target, cache_mb: int) -> None:
        self.target = target
        self.budget = cache_mb * 2**20
        self._kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: Batch) -> BatchFeatures:
        """Features of a batch; padding rows are zero."""
        missing = [sample for sample in batch.samples if self._key(sample) not in self._kept]
        fresh: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        if missing:
            part = collate(missing, self.target.device)
            outcome = self.target.encode(part.input_ids, part.attention_mask)
            for row, sample in enumerate(missing):
                length = len(sample.input_ids)
                fresh[self._key(sample)] = (
                    outcome.features[row, :length].clone(),
                    outcome.hidden[row, :length].clone(),
                )
            self._keep(fresh)
        pairs = [self._kept.get(self._key(s)) or fresh[self._key(s)] for s in batch.samples]
        return BatchFeatures(_pad([pair[0] for pair in pairs]), _pad([pair[1] for pair in pairs]))

    @staticmethod
    def _key(sample: Sample) -> tuple[str, int]:
        return sample.row_id, sample.index

    def _keep(self, fresh: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
        for key, pair in fresh.items():
            size = sum(tensor.nbytes for tensor in pair)
            if size <= self.budget:
                self.budget -= size
                self._kept[key] = pair


def _pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
