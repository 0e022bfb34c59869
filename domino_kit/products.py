"""Matrix products of a few rows on a CPU, where a decode or verify pass spends its time."""

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 8
"""Beyond this, ``F.linear`` was at least as fast (docs/serving.md, "Where a cycle goes")."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x [..., D] @ weight [V, D].T``, contiguous ``[..., V]``.

    The same numbers as ``F.linear`` up to rounding. With few rows that call reads the weight at a
    quarter of the memory's speed; asked for the transposed result, the same library reads it at
    full speed. A single row goes as two, because one row is dispatched to a slower routine.
    """
    rows = x.reshape(-1, x.shape[-1])
    count, width = rows.shape[0], weight.shape[0]
    if few_rows(rows, weight):
        if count == 1:
            rows = rows.expand(2, -1).contiguous()
        out = torch.mm(weight, rows.t()).t()[:count].contiguous()
    else:
        out = F.linear(rows, weight)
    return out.view(*x.shape[:-1], width)


def add_product(base: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``base [B, V] + x [B, E] @ weight [V, E].T``, without a pass of its own for the sum."""
    if few_rows(x, weight):
        return product(x, weight).add_(base)
    return torch.addmm(base, x, weight.t())


def few_rows(rows: Tensor, weight: Tensor) -> bool:
    """Whether ``rows [B, D]`` are so few that the transposed product with ``weight`` is faster."""
    # A long, narrow product of five and more rows is the exception.
    most = MOST_ROWS if weight.shape[0] >= weight.shape[1] else MOST_ROWS // 2
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32
    return on_cpu and 0 < rows.shape[0] <= most
