"""Numbers for products of a few rows, and when two results are the same up to rounding."""

import torch
from torch import Tensor


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, the same for the same shape."""
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """The same up to rounding, relative to the largest number."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if wanted.numel():
        assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
