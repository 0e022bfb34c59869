"""The objective's forward and backward pass: all logits at once, checkpointed chunks, fused chunks."""

from pathlib import Path

import click
import torch
import torch.nn.functional as F
from measure import Row, measure, show, write_rows
from roofline import product_seconds, products
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from domino_kit.train.objective import Rows, chunk_rows, dual_cross_entropy

LAM = 0.5
Heads = tuple[Tensor, Tensor]
"""The target's head ``[V, D]`` and the projector's last matrix ``[V, E]``."""


def plain_loss(rows: Rows, head: Tensor, projection: Tensor | None) -> Tensor:
    """The definition: all logits of both heads under autograd."""
    base = rows.hidden @ head.T
    base_loss = F.cross_entropy(base, rows.labels, reduction="none") @ rows.weights
    if rows.low_rank is None or projection is None:
        return base_loss
    final = base + rows.low_rank @ projection.T
    final_loss = F.cross_entropy(final, rows.labels, reduction="none") @ rows.weights
    return (1 - LAM) * final_loss + LAM * base_loss


def checkpointed_loss(rows: Rows, head: Tensor, projection: Tensor, chunk: int) -> Tensor:
    """The definition in chunks of rows whose logits are computed again in the backward pass."""
    total = rows.hidden.new_zeros(())
    for start in range(0, len(rows.labels), chunk):
        part = slice(start, start + chunk)
        assert rows.low_rank is not None

        def loss(hidden: Tensor, low_rank: Tensor, last: Tensor, part: slice = part) -> Tensor:
            return plain_loss(
                Rows(hidden, low_rank, rows.labels[part], rows.weights[part]), head, last
            )

        total = total + checkpoint(
            loss, rows.hidden[part], rows.low_rank[part], projection, use_reentrant=False
        )
    return total


def random_case(count: int, vocab: int, width: int, rank: int, device: str) -> tuple[Rows, Heads]:
    """Rows with weights above zero, labels, and both heads; scaled like those of a trained model."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale)

    labels = torch.randint(vocab, (count,), generator=generator, device=device)
    weights = torch.rand(count, generator=generator, device=device) + 0.1
    hidden, low_rank = random(count, width).requires_grad_(), random(count, rank).requires_grad_()
    head = random(vocab, width, scale=2 * width**-0.5)
    projection = random(vocab, rank, scale=rank**-0.5).requires_grad_()
    return Rows(hidden, low_rank, labels, weights), (head, projection)


def measured(
    anchors: int, block: int, vocab: int, width: int, rank: int, chunk_mb: int, repeats: int,
    device: str,
) -> list[Row]:  # fmt: skip
    """All three at one shape, and the time of the fused version's products."""
    rows, (head, projection) = random_case(anchors * block, vocab, width, rank, device)
    chunk = chunk_rows(vocab, chunk_mb)
    inputs = [rows.hidden, rows.low_rank, projection]

    def gradients(total: Tensor) -> tuple[Tensor, ...]:
        return total.detach(), *torch.autograd.grad(total, inputs)

    variants = {
        "plain": lambda: gradients(plain_loss(rows, head, projection)),
        "chunked_checkpoint": lambda: gradients(checkpointed_loss(rows, head, projection, chunk)),
        "fused": lambda: gradients(
            dual_cross_entropy(rows, head, projection, LAM, chunk).total
        ),
    }  # fmt: skip
    shape = {"N": anchors, "K": block, "V": vocab, "D": width, "E": rank, "chunk": chunk}
    found = measure(shape, variants, repeats, count_first=True)
    roofline = product_seconds(products(variants["fused"]), device)
    for row in found:
        row.roofline_seconds = roofline
    return found


@click.command()
@click.option("--repeats", default=3, show_default=True)
@click.option("--chunk-mb", default=512, show_default=True, help="train.chunk_mb.")
@click.option("--quick", is_flag=True, help="Tiny shapes: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(repeats: int, chunk_mb: int, quick: bool, output: Path | None) -> None:
    """Measure at the sizes of a draft for Qwen3-0.6B, and for Qwen3-8B with fewer anchors.

    The plain version needs about 13 GB at the first. Chunks are of the same rows in both.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if quick:
        found = measured(4, 4, 500, 16, 8, 1, 1, device)
    else:
        found = measured(256, 16, 151936, 1024, 256, chunk_mb, repeats, device)
        found += measured(32, 16, 151936, 4096, 256, chunk_mb, repeats, device)
    show("objective, forward and backward", found, "plain")
    write_rows(output, found)


if __name__ == "__main__":
    main()
