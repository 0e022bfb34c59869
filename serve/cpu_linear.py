"""Matrix products of a few rows on a CPU, where a decode or verify pass spends its time."""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import Tensor, nn

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
    # A long, narrow product of five and more rows is the exception.
    most = MOST_ROWS if width >= weight.shape[1] else MOST_ROWS // 2
    if 0 < count <= most and x.dtype == torch.float32:
        if count == 1:
            rows = rows.expand(2, -1).contiguous()
        out = torch.mm(weight, rows.t()).t()[:count].contiguous()
    else:
        out = F.linear(rows, weight)
    return out.view(*x.shape[:-1], width)


class CpuLinear(nn.Linear):
    """A plain layer of a draft, such as ``fc``, through :func:`product`."""

    def forward(self, x: Tensor) -> Tensor:
        out = product(x, self.weight)
        return out if self.bias is None else out + self.bias


class CpuLinearMethod(UnquantizedLinearMethod):
    """SGLang's linear layers through :func:`product`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = product(x, layer.weight)  # type: ignore[arg-type]
        return out if bias is None else out + bias


class CpuEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The output head, tied or not, through :func:`product`."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = product(x, layer.weight)  # type: ignore[arg-type]
        return out if bias is None else out + bias


def use_fast_products(model: nn.Module) -> None:
    """Switch every unquantised linear layer and output head of a loaded model."""
    swaps: dict[type, Any] = {
        UnquantizedLinearMethod: CpuLinearMethod(),
        UnquantizedEmbeddingMethod: CpuEmbeddingMethod(),
    }
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CpuLinear  # the same parameters, another forward
        swap = swaps.get(type(getattr(module, "quant_method", None)))
        if swap is not None:
            module.quant_method = swap
