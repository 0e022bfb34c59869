"""Which modules of a served model are switched to products that suit a few rows."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from domino_kit.serve.cpu_linear import (
    CpuEmbeddingMethod,
    CpuLinear,
    CpuLinearMethod,
    use_fast_products,
)
from tests.few_rows import assert_close, numbers

pytestmark = pytest.mark.sglang


def test_every_plain_layer_of_a_model_is_switched() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(12, 20), nn.SiLU(), nn.Sequential(nn.Linear(20, 30, bias=False)), nn.Linear(30, 5)
    )
    special = Special(5, 5)
    model.append(special)
    names = [name for name, _ in model.named_parameters()]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    x = numbers(3, 12)
    before = model(x)
    use_fast_products(model)
    assert [type(each) for each in model] == [CpuLinear, nn.SiLU, nn.Sequential, CpuLinear, Special]
    assert type(model[2][0]) is CpuLinear
    assert [name for name, _ in model.named_parameters()] == names
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert_close(model(x), before)
    use_fast_products(model)
    assert_close(model(x), before)


def test_a_single_layer_is_switched_itself() -> None:
    layer = nn.Linear(6, 4)
    use_fast_products(layer)
    assert type(layer) is CpuLinear


def test_unquantised_methods_are_switched_and_others_left() -> None:
    class Quantised(UnquantizedLinearMethod):
        pass

    others = Quantised(), object(), None
    model = nn.ModuleList(nn.Identity() for _ in range(6))
    methods = (UnquantizedLinearMethod(), UnquantizedEmbeddingMethod(), *others)
    for module, method in zip(model, methods, strict=False):
        module.quant_method = method
    use_fast_products(model)
    assert type(model[0].quant_method) is CpuLinearMethod
    assert type(model[1].quant_method) is CpuEmbeddingMethod
    assert [model[index].quant_method for index in (2, 3, 4)] == list(others)
    assert not hasattr(model[5], "quant_method")


@pytest.mark.parametrize("method", [CpuLinearMethod, CpuEmbeddingMethod])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 30])
def test_methods_equal_sglangs(rows: int, with_bias: bool, method: type) -> None:
    layer = SimpleNamespace(weight=numbers(96, 24))
    x, bias = numbers(rows, 24), numbers(96) if with_bias else None
    found = method().apply(layer, x, bias)
    assert_close(found, F.linear(x, layer.weight, bias))
    assert_close(found, method.__base__().apply(layer, x, bias))


def test_embedding_method_still_looks_up() -> None:
    layer = SimpleNamespace(weight=numbers(96, 24))
    ids = torch.tensor([3, 90, 3])
    assert torch.equal(CpuEmbeddingMethod().embedding(layer, ids), layer.weight[ids])
