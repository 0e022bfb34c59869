"""SGLang's layers on a CPU, with products that suit a few rows."""

from typing import Any

from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from torch import Tensor, nn

from domino_kit.products import product


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
