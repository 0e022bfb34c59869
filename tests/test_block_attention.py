"""Block attention against the masked definition: outputs, every gradient, and what it never builds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from domino_kit import alignment
from domino_kit.block_attention import block_attention, block_mask
from domino_kit.modeling import DominoDraft
from tests.tiny import tiny_draft

S, K, WIDTH = 21, 3, 4
ANCHORS = torch.tensor([[1, 2, 5, 6, 13, 20, 20], [0, 9, 4, 8, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
"""In order; out of order, with places that are not kept; a sample without anchors."""
LENGTHS = (21, 12, 0)
"""Of the three contexts; the rest is padding."""


def context_positions() -> Tensor:
    positions = torch.arange(S).expand(len(LENGTHS), -1)
    return torch.where(positions < torch.tensor(LENGTHS)[:, None], positions, -1)


def random_inputs(kv_heads: int, share: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, then keys and values of context and block rows, as a projection lays them out."""
    generator = torch.Generator().manual_seed(kv_heads * 10 + share)
    rows = ANCHORS.shape[1] * K
    sizes = [(rows, kv_heads * share), *[(S, kv_heads)] * 2, *[(rows, kv_heads)] * 2]
    return [
        torch.randn(len(ANCHORS), length, heads, WIDTH, generator=generator, dtype=dtype)
        .transpose(1, 2).requires_grad_()
        for length, heads in sizes
    ]  # fmt: skip


def masked(q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    """The definition: one mask over context and all blocks."""
    visible = alignment.visibility(ANCHORS, context_positions(), K)
    keys, values = torch.cat([ck, bk], dim=2), torch.cat([cv, bv], dim=2)
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible[:, None], enable_gqa=True
    ).transpose(1, 2)


def ours(group: int | None, q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
    visible = alignment.context_visibility(ANCHORS, context_positions())
    return block_attention(q, (ck, cv), (bk, bv), block_mask(visible, K, group))


@pytest.mark.parametrize("group", [1, 2, 3, 100, None])
@pytest.mark.parametrize(("kv_heads", "share"), [(1, 1), (2, 2), (3, 1), (1, 4)])
def test_equals_the_masked_definition(group: int | None, kv_heads: int, share: int) -> None:
    inputs = random_inputs(kv_heads, share, torch.float32)
    wanted, found = masked(*inputs), ours(group, *inputs)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted_grads = torch.autograd.grad(wanted, inputs, slope)
    for grad, expected in zip(torch.autograd.grad(found, inputs, slope), wanted_grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)


def test_any_visibility_is_followed() -> None:
    """Not only what lies before an anchor: a row of holes, too."""
    inputs = random_inputs(2, 2, torch.float32)
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(*ANCHORS.shape, S, generator=generator) > 0.5
    owner = torch.arange(ANCHORS.shape[1]).repeat_interleave(K)
    own = (owner[:, None] == owner).expand(len(ANCHORS), -1, -1)
    mask = torch.cat([visible.repeat_interleave(K, dim=1), own], dim=-1)[:, None]
    keys, values = torch.cat(inputs[1::2], dim=2), torch.cat(inputs[2::2], dim=2)
    wanted = F.scaled_dot_product_attention(
        inputs[0], keys, values, attn_mask=mask, enable_gqa=True
    )
    found = block_attention(inputs[0], *_pairs(inputs), block_mask(visible, K, 3))
    torch.testing.assert_close(found.transpose(1, 2), wanted, atol=1e-5, rtol=1e-5)


def _pairs(inputs: list[Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (inputs[1], inputs[2]), (inputs[3], inputs[4])


def test_gradcheck_in_float64() -> None:
    inputs = random_inputs(1, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *each: ours(4, *each), inputs, fast_mode=True)


# -- the model's training pass ---------------------------------------------------------------------


def model_inputs(block: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(block)
    return {
        "features": torch.randn(len(ANCHORS), S, 64, generator=generator),
        "context_positions": context_positions(),
        "anchors": ANCHORS,
        "block_embeds": torch.randn(*ANCHORS.shape, block, 32, generator=generator),
    }


def masked_forward(
    model: DominoDraft, features: Tensor, context_positions: Tensor, anchors: Tensor,
    block_embeds: Tensor,
) -> Tensor:  # fmt: skip
    """The training pass with the whole mask."""
    block = block_embeds.shape[2]
    visible = alignment.visibility(anchors, context_positions, block)
    positions = alignment.block_positions(anchors, block).flatten(1)
    context = model.context_kv(features, context_positions)
    hidden = model.block_hidden(block_embeds.flatten(1, 2), positions, context, visible)
    return hidden.view_as(block_embeds)


@pytest.mark.parametrize("block", [2, 4, 8])
def test_training_pass_equals_the_masked_one(block: int) -> None:
    model, inputs = tiny_draft(block_size=block), model_inputs(block)
    parameters = {n: p for n, p in model.named_parameters() if n.split(".")[0] in
                  ("fc", "hidden_norm", "layers", "norm")}  # fmt: skip
    wanted, found = masked_forward(model, **inputs), model(**inputs)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(wanted.square().sum(), list(parameters.values()))
    others = torch.autograd.grad(found.square().sum(), list(parameters.values()))
    for name, grad, other in zip(parameters, grads, others, strict=True):
        torch.testing.assert_close(other / grad.abs().max(), grad / grad.abs().max(),
                                   atol=1e-5, rtol=1e-5, msg=name)  # fmt: skip


def test_bfloat16_autocast_is_as_near_to_float32_as_the_masked_pass() -> None:
    model, inputs = tiny_draft(), model_inputs(4)
    errors = []
    exact = masked_forward(model, **inputs).detach()
    for run in (masked_forward, DominoDraft.__call__):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = run(model, **inputs)
        hidden.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.layers.parameters() if p.grad is not None)
        errors.append(float((hidden.detach().float() - exact).norm() / exact.norm()))
    assert 0 < errors[1] < 1.5 * errors[0] < 0.1


# -- what is never built ---------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def largest(blocks: int, length: int, whole: bool) -> int:
    """For one layer's forward and backward pass with that many blocks on that long a context."""
    model = tiny_draft(num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, length, (1, blocks), generator=generator).sort().values
    features = torch.randn(1, length, 64, generator=generator)
    embeds = torch.randn(1, blocks, 4, 32, generator=generator)
    with Largest() as found:
        run = masked_forward if whole else DominoDraft.__call__
        run(model, features, torch.arange(length)[None], anchors, embeds).sum().backward()
    return found.numel


def test_no_array_grows_with_blocks_times_context() -> None:
    """Rows x (context + rows) would be 512 x 640; the largest array is of rows x features."""
    assert largest(128, 128, whole=True) >= 512 * 640
    assert largest(128, 128, whole=False) <= 512 * 64
