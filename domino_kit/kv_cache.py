"""Key/value caches in which the slot is the position, so a rejected token needs no repair.

Every token writes its keys and values at the slot of its own position, and a query at position p
reads slots up to p only. A rejected draft leaves an entry that no later query sees before the
token that really takes that position has overwritten it. Rows of different lengths just write at
different slots. Nothing is ever cropped.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotBuffer:
    """Keys and values of one layer, ``[B, kv_heads, capacity, head_dim]``, allocated once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Store ``keys, values [B, kv_heads, Q, head_dim]`` at the slots ``positions [B, Q]``."""
        if self.keys is None or self.values is None:
            batch, heads, _, width = keys.shape
            self.keys = keys.new_zeros(batch, heads, self.capacity, width)
            self.values = values.new_zeros(batch, heads, self.capacity, values.shape[-1])
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.keys[rows, :, positions] = keys.transpose(1, 2)
        self.values[rows, :, positions] = values.transpose(1, 2)

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """The first ``length`` slots."""
        assert self.keys is not None and self.values is not None, "nothing written yet"
        return self.keys[:, :, :length], self.values[:, :, :length]

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows of the batch."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class SlotLayer(CacheLayerMixin):
    """One target layer's cache in the interface that transformers' attention layers call."""

    is_sliding = False

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self.owner = owner
        self.buffer = SlotBuffer(owner.capacity)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffer is allocated by its first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write at the positions of the running pass; return all slots that a query may read."""
        self.buffer.write(key_states, value_states, self.owner.positions)
        return self.buffer.read(self.owner.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the readable part."""
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        """Readable slots."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Allocated slots."""
        return self.owner.capacity


class SlotCache(Cache):
    """A target's cache; :meth:`begin` names the positions of the pass that is about to run."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.positions = torch.empty(0, 0, dtype=torch.long)
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def begin(self, positions: Tensor) -> Tensor:
        """Announce a pass over ``positions [B, Q]``; gives its mask ``[B, 1, Q, length]`` bool."""
        self.positions = positions
        self.length = int(positions.max()) + 1
        assert self.length <= self.capacity, "the caller sized the cache too small"
        slots = torch.arange(self.length, device=positions.device)
        return (slots <= positions[:, :, None])[:, None]

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows of the batch."""
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            layer.buffer.select(rows)


class DraftCache:
    """The draft's context keys and values, from target features; block rows never enter."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.buffers = [SlotBuffer(capacity) for _ in range(num_layers)]

    def write(self, layers: list[tuple[Tensor, Tensor]], positions: Tensor) -> None:
        """Store :meth:`DominoDraft.context_kv` of the features at ``positions [B, Q]``."""
        for buffer, (keys, values) in zip(self.buffers, layers, strict=True):
            buffer.write(keys, values, positions)

    def read(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the first ``length`` positions, layer by layer."""
        return [buffer.read(length) for buffer in self.buffers]

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows of the batch."""
        for buffer in self.buffers:
            buffer.select(rows)
