"""Products of a few rows against ``F.linear``."""

import pytest
import torch
import torch.nn.functional as F

from domino_kit.products import MOST_ROWS, add_product, product
from tests.few_rows import assert_close, numbers

SHAPES = [(96, 24), (24, 96), (40, 40), (1, 16), (16, 1)]
"""Weights that are tall, wide, square, and of one row or column."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", range(21))
def test_product_equals_linear(rows: int, shape: tuple[int, int]) -> None:
    x, weight = numbers(rows, shape[1]), numbers(*shape)
    found = product(x, weight)
    assert found.is_contiguous()
    assert_close(found, F.linear(x, weight))
    assert_close(found, (x.double() @ weight.double().t()).float())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", range(21))
def test_product_in_bfloat16_is_linear(rows: int, shape: tuple[int, int]) -> None:
    """Every bit, so that a bfloat16 target answers as without this."""
    x = numbers(rows, shape[1], dtype=torch.bfloat16)
    weight = numbers(*shape, dtype=torch.bfloat16)
    found = product(x, weight)
    assert found.is_contiguous()
    assert torch.equal(found, F.linear(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("outer", [(1, 1), (2, 3), (4, 5), (3, 0), (0, 3), (2, 1, 2), ()])
def test_product_of_other_dimensions(outer: tuple[int, ...], shape: tuple[int, int]) -> None:
    x, weight = numbers(*outer, shape[1]), numbers(*shape)
    found = product(x, weight)
    assert found.is_contiguous()
    assert_close(found, F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 3, 12])
def test_product_of_views(rows: int) -> None:
    """Rows cut out of blocks, and a weight that is a part of a larger one."""
    x, weight = numbers(2, rows + 2, 24)[:, 1:-1], numbers(30, 40)[4:, 8:32]
    assert not x.is_contiguous() and not weight.is_contiguous()
    found = product(x, weight)
    assert found.is_contiguous()
    assert_close(found, F.linear(x, weight))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_product_changes_no_input_and_owns_its_result(rows: int) -> None:
    x, weight = numbers(rows, 24), numbers(96, 24)
    before = x.clone(), weight.clone()
    product(x, weight).fill_(7)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS, MOST_ROWS + 1])
def test_sum_with_a_product(rows: int, dtype: torch.dtype) -> None:
    """A slice of base logits is added to and stays as it is."""
    x, weight = numbers(rows, 24, dtype=dtype), numbers(96, 24, dtype=dtype)
    block = numbers(rows, 3, 96, dtype=dtype)
    before = block.clone()
    found = add_product(block[:, 1], x, weight)
    wanted = before[:, 1].double() + x.double() @ weight.double().t()
    assert found.dtype == dtype and torch.equal(block, before)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
