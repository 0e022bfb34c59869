"""Attention of many blocks over one context: each group of blocks reads only what it may see.

Equal to masked attention over ``[context | all blocks]``, whose mask is almost all zeros: blocks do
not see each other, and a block sees the context before its anchor only. Here neighbouring blocks
form a group, whose scores are ``[rows, L | K]``: L context positions, up to the last that any of
them sees, and each row's own block. Scores of one group exist at a time; the backward pass computes
them again, as flash attention does (arXiv:2205.14135).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

GROUP_BLOCKS = 4
"""Blocks a group on a CPU: more read more context in vain, fewer make products too small."""
GPU_GROUP_BLOCKS = 64
"""Not measured: few groups, since each starts some thirty kernels."""


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks of one sample.

    All of them see the context positions before ``shared`` and none any from ``limit`` on;
    ``hidden [G, limit - shared]`` marks what each may not see in between.
    """

    sample: int
    blocks: slice
    shared: int
    limit: int
    hidden: Tensor


@dataclass(frozen=True)
class BlockMask:
    """What N blocks of K rows see: context as ``groups`` say, all of their own block, no other."""

    block_size: int
    groups: tuple[Group, ...]

    def scratch(self, q: Tensor) -> list[Tensor]:
        """Memory for two arrays of scores of the largest group, used for all groups in turn."""
        heads = q.shape[1]
        size = max(
            (g.blocks.stop - g.blocks.start) * heads * self.block_size * (g.limit + self.block_size)
            for g in self.groups
        )
        return [q.new_empty(size) for _ in range(2)]


def group_size(device: torch.device) -> int:
    """Blocks a group on a device."""
    return GROUP_BLOCKS if device.type == "cpu" else GPU_GROUP_BLOCKS


def block_mask(visible: Tensor, block_size: int, group_blocks: int | None = None) -> BlockMask:
    """The mask of blocks that see the context where ``visible [B, N, S]`` says so.

    Any visibility is allowed; anchors in increasing order make the groups cheap.
    """
    group_blocks = group_blocks or group_size(visible.device)
    batch, blocks, _ = visible.shape
    missing = -blocks % group_blocks
    wide = F.pad(visible, (0, 0, 0, missing)).unflatten(1, (-1, group_blocks))
    full = F.pad(visible, (0, 0, 0, missing), value=True).unflatten(1, (-1, group_blocks))
    columns = torch.arange(1, visible.shape[2] + 1, device=visible.device)
    limits = (wide.any(2) * columns).amax(-1).tolist()
    shares = full.all(2).cumprod(-1).sum(-1).tolist()
    groups = []
    for sample in range(batch):
        for place, (limit, shared) in enumerate(zip(limits[sample], shares[sample], strict=True)):
            part = slice(place * group_blocks, min(blocks, (place + 1) * group_blocks))
            shared = min(shared, limit)
            hidden = ~visible[sample, part, shared:limit]
            groups.append(Group(sample, part, shared, limit, hidden))
    return BlockMask(block_size, tuple(groups))


def block_attention(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    mask: BlockMask,
) -> Tensor:
    """Attention of block rows ``[B, N*K, heads, head_dim]``, with gradients.

    ``queries`` are ``[B, heads, N*K, head_dim]``; keys and values of the ``context`` ``[B, kv_heads,
    S, head_dim]`` and of the ``block`` rows ``[B, kv_heads, N*K, head_dim]``. Under autocast the
    products are in its type, like PyTorch's own attention; the softmax sums in float32. The same
    operations run on every device; on a GPU this has not been tried.
    """
    tensors = [queries, *context, *block]
    device = queries.device.type
    if torch.is_autocast_enabled(device):
        tensors = [each.to(torch.get_autocast_dtype(device)) for each in tensors]
    with torch.autocast(device, enabled=False):
        return _BlockAttention.apply(mask, *tensors)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: BlockMask, *tensors: Tensor) -> Tensor:
        q = tensors[0]
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        scratch = mask.scratch(q)
        for group in mask.groups:
            _Tile(group, mask.block_size, scratch, *tensors).forward(out.transpose(1, 2))
        ctx.save_for_backward(out, *tensors)
        ctx.mask = mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        mask, (out, *tensors) = ctx.mask, ctx.saved_tensors
        # context gradients add up over groups; rows of a block belong to one group
        grads = [
            torch.zeros_like(each) if place in (1, 2) else torch.empty_like(each)
            for place, each in enumerate(tensors)
        ]
        scratch = mask.scratch(tensors[0])
        for group in mask.groups:
            tile = _Tile(group, mask.block_size, scratch, *tensors)
            tile.backward(out.transpose(1, 2), grad_out.transpose(1, 2), *grads)
        return None, *grads


class _Tile:
    """One group's part of all tensors; its rows are ``[kv_heads, G*r*K, head_dim]``, r the query
    heads that share a key head, so that each product with the context is one of matrices."""

    def __init__(
        self, group: Group, size: int, scratch: list[Tensor], q: Tensor, keys: Tensor,
        values: Tensor, own_keys: Tensor, own_values: Tensor,
    ) -> None:  # fmt: skip
        self.group, self.size, self.kv_heads = group, size, keys.shape[1]
        self.count = group.blocks.stop - group.blocks.start
        self.scale = q.shape[-1] ** -0.5
        self.q = self.rows(q).mul_(self.scale)
        shape = (*self.q.shape[:2], group.limit + size)
        self.buffers = [each[: math.prod(shape)].view(shape) for each in scratch]
        self.keys, self.values = self.context(keys), self.context(values)
        self.own_keys, self.own_values = self.own(own_keys), self.own(own_values)

    def forward(self, out: Tensor) -> None:
        """Write the group's rows of ``out [B, heads, N*K, head_dim]``."""
        chances = self.softmax()
        self.put(out, self.spread(chances, self.values, self.own_values))

    def backward(
        self, out: Tensor, grad_out: Tensor, q: Tensor, keys: Tensor, values: Tensor,
        own_keys: Tensor, own_values: Tensor,
    ) -> None:  # fmt: skip
        """Add the group's part to the gradients of all inputs, given that of the output."""
        grad, chances = self.rows(grad_out), self.softmax()
        self.gather(values, own_values, chances, grad)
        wide = torch.promote_types(grad.dtype, torch.float32)
        mean = (self.rows(out).to(wide) * grad).sum(-1, keepdim=True).to(grad.dtype)
        slopes = self.products(grad, self.values, self.own_values).sub_(mean).mul_(chances)
        self.gather(keys, own_keys, slopes, self.q)
        self.put(q, self.spread(slopes, self.keys, self.own_keys).mul_(self.scale))

    def _rows(self, x: Tensor) -> Tensor:
        """The rows of ``x [B, heads, N*K, head_dim]`` as a view ``[kv_heads, G, r, K, head_dim]``."""
        start, stop = self.group.blocks.start * self.size, self.group.blocks.stop * self.size
        part = x[self.group.sample, :, start:stop].unflatten(0, (self.kv_heads, -1))
        return part.unflatten(2, (self.count, self.size)).transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """A copy of the rows of ``x [B, heads, N*K, head_dim]``."""
        return self._rows(x).clone(memory_format=torch.contiguous_format).flatten(1, 3)

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Write ``rows`` to their places in ``x [B, heads, N*K, head_dim]``."""
        view = self._rows(x)
        view.copy_(rows.view(view.shape))

    def context(self, x: Tensor) -> Tensor:
        """What the group may see of ``x [B, kv_heads, S, head_dim]``: ``[kv_heads, L, head_dim]``."""
        return x[self.group.sample, :, : self.group.limit]

    def own(self, x: Tensor) -> Tensor:
        """Each block's own of ``x [B, kv_heads, N*K, head_dim]``: ``[kv_heads, G, K, head_dim]``."""
        return self._rows(x)[:, :, 0]

    def by_block(self, rows: Tensor) -> Tensor:
        """Rows ``[kv_heads, G*r*K, ...]`` as ``[kv_heads, G, r*K, ...]``."""
        return rows.unflatten(1, (self.count, -1))

    def products(self, rows: Tensor, context: Tensor, own: Tensor) -> Tensor:
        """Rows by context and own block, ``[kv_heads, G*r*K, L + K]``, in the first buffer."""
        limit, out = self.group.limit, self.buffers[0]
        torch.bmm(rows, context.transpose(1, 2), out=out[..., :limit])
        self.by_block(out)[..., limit:] = self.by_block(rows) @ own.transpose(2, 3)
        return out

    def softmax(self) -> Tensor:
        """Probabilities over all that a row sees, which is never nothing, in the second buffer.

        PyTorch sums them in float32 at least, whatever their type. The scores are then needed no more.
        """
        scores = self.products(self.q, self.keys, self.own_keys)
        between = self.by_block(scores)[..., self.group.shared : self.group.limit]
        between.masked_fill_(self.group.hidden[:, None], -torch.inf)
        return torch.softmax(scores, -1, out=self.buffers[1])

    def spread(self, chances: Tensor, context: Tensor, own: Tensor) -> Tensor:
        """``chances [kv_heads, G*r*K, L + K]`` times context and own block: rows."""
        limit = self.group.limit
        out = torch.bmm(chances[..., :limit], context)
        self.by_block(out).add_(self.by_block(chances)[..., limit:] @ own)
        return out

    def gather(self, context: Tensor, own: Tensor, chances: Tensor, rows: Tensor) -> None:
        """Add ``chancesᵀ · rows`` to the context's gradient, and write it to the blocks' own."""
        limit = self.group.limit
        self.context(context).baddbmm_(chances[..., :limit].transpose(1, 2), rows)
        found = self.by_block(chances)[..., limit:].transpose(2, 3) @ self.by_block(rows)
        self.own(own).copy_(found)
