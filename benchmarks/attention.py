"""Attention of blocks, forward and backward: the mask over context and all blocks, and groups."""

from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from measure import Row, measure, show, write_rows
from torch import Tensor

from domino_kit import alignment
from domino_kit.block_attention import block_attention, block_mask

LENGTHS = (512, 1024, 2048, 4096)


def masked(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
    anchors: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """PyTorch's own attention with the dense mask ``[N*K, S + N*K]``."""
    positions = torch.arange(keys.shape[2], device=q.device)[None]
    visible = alignment.visibility(anchors, positions, block)
    keys, values = torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2)
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible[:, None], enable_gqa=True
    ).transpose(1, 2)


def blocks(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor,
    anchors: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """The same by groups of blocks."""
    positions = torch.arange(keys.shape[2], device=q.device)[None]
    mask = block_mask(alignment.context_visibility(anchors, positions), block)
    return block_attention(q, (keys, values), (own_keys, own_values), mask)


def measured(
    length: int, anchors: int, block: int, heads: int, kv_heads: int, width: int, repeats: int,
    device: str,
) -> list[Row]:  # fmt: skip
    """Both at one shape, with anchors anywhere in the context."""
    generator = torch.Generator().manual_seed(0)

    def random(count: int, rows: int) -> Tensor:
        values = torch.randn(1, rows, count, width, generator=generator).to(device)
        return values.transpose(1, 2).requires_grad_()

    chosen = torch.randperm(length - 1, generator=generator)[:anchors].sort().values + 1
    where, rows = chosen[None].to(device), anchors * block
    inputs = [random(heads, rows), *(random(kv_heads, length) for _ in range(2)),
              *(random(kv_heads, rows) for _ in range(2))]  # fmt: skip
    slope = torch.randn(1, rows, heads, width, generator=generator).to(device)

    def run(attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = attention(*inputs, where, block)
        return out.detach(), *torch.autograd.grad(out, inputs, slope)

    shape = {"S": length, "N": anchors, "K": block, "heads": heads, "kv": kv_heads, "d": width}
    variants = {"masked": lambda: run(masked), "blocks": lambda: run(blocks)}
    return measure(shape, variants, repeats, count_first=True)


@click.command()
@click.option("--anchors", default=256, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Tiny shapes: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(anchors: int, repeats: int, quick: bool, output: Path | None) -> None:
    """Measure one layer's attention by length of the context, with the heads of Qwen3-0.6B."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for length in (32, 64) if quick else LENGTHS:
        heads = (4, 2, 8) if quick else (16, 8, 128)
        found += measured(length, 8 if quick else anchors, 4 if quick else 16, *heads,
                          1 if quick else repeats, device)  # fmt: skip
    show("attention of one layer, forward and backward", found, "masked")
    write_rows(output, found)


if __name__ == "__main__":
    main()
