"""Tokenised samples: filtering, a deterministic order, and batches padded on the right."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from domino_kit.chat_template import encode_row, split_row
from domino_kit.conversations import Row


@dataclass(frozen=True)
class Sample:
    """One row ready for training; ``index`` is its place in the kept data."""

    index: int
    row_id: str
    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right. ``positions`` is -1 at padding, ``loss_mask`` 0."""

    samples: list[Sample]
    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor

    @property
    def attention_mask(self) -> Tensor:
        """1 at real tokens, ``[B, S]`` int64."""
        return (self.positions >= 0).long()


def build_samples(
    rows: list[Row],
    tokenizer: Any,
    *,
    thinking: bool | None,
    end_tokens: list[int],
    max_length: int,
    min_supervised: int,
) -> tuple[list[Sample], Counter[str]]:
    """Encode and cut rows; returns the kept samples and why others were dropped.

    An answer whose reasoning is left out of its row becomes a sample of its own. Raises
    ``ValueError`` if no row is left.
    """
    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    for row in chain.from_iterable(split_row(tokenizer, row, thinking) for row in rows):
        ids, mask = encode_row(tokenizer, row, thinking, end_tokens)
        supervised = sum(mask[:max_length])
        if supervised < min_supervised:
            cut = len(ids) > max_length
            dropped["no answer left after cutting" if cut else "answer too short"] += 1
            continue
        samples.append(Sample(len(samples), row.row_id, ids[:max_length], mask[:max_length]))
    if not samples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise ValueError(
            f"no row of the data is left ({reasons}); raise data.max_length or lower "
            "data.min_supervised."
        )
    return samples, dropped


def collate(samples: list[Sample], device: str | torch.device) -> Batch:
    """Pad to the longest sample."""
    width = max(len(sample.input_ids) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros(len(samples), width, dtype=torch.long)
    positions = torch.full((len(samples), width), -1, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        ids[row, :length] = torch.tensor(sample.input_ids)
        mask[row, :length] = torch.tensor(sample.loss_mask)
        positions[row, :length] = torch.arange(length)
    return Batch(samples, ids.to(device), mask.to(device), positions.to(device))


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of samples in an epoch, from the seed alone."""
    order = list(range(count))
    random.Random(f"order-{seed}-{epoch}").shuffle(order)
    return order


class RowStream:
    """All epochs laid end to end: which rows a step takes follows from its number alone."""

    def __init__(self, samples: list[Sample], seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, start: int, stop: int) -> list[tuple[int, Sample]]:
        """Epoch and sample at the places ``start`` to ``stop - 1``."""
        found = []
        for place in range(start, stop):
            epoch, within = divmod(place, len(self.samples))
            if epoch not in self._orders:
                order = epoch_order(len(self.samples), self.seed, epoch)
                kept = {key: each for key, each in self._orders.items() if key == epoch - 1}
                self._orders = {**kept, epoch: order}
            found.append((epoch, self.samples[self._orders[epoch][within]]))
        return found


def anchor_generators(samples: list[Sample], seed: int, epoch: int) -> list[torch.Generator]:
    """One generator a sample, so its anchors depend on nothing but seed, epoch and sample."""
    generators = []
    for sample in samples:
        value = random.Random(f"anchors-{seed}-{epoch}-{sample.index}").getrandbits(62)
        generators.append(torch.Generator().manual_seed(value))
    return generators
