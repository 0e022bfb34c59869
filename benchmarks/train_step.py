"""A whole training step from known features: draft forward, objective, backward, AdamW.

With the fast paths, and with what they replace: the mask over context and all blocks, and all
logits at once. The target's own pass is the same for both and not part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from measure import Row, measure, show, write_rows
from objective import LAM, plain_loss
from roofline import product_seconds, products
from torch import Tensor, nn

from domino_kit import alignment
from domino_kit.config import DraftConfig
from domino_kit.modeling import DominoDraft, init_weights
from domino_kit.target_ends import StoredEnds
from domino_kit.train.dataset import Batch, Sample, collate
from domino_kit.train.objective import Rows, chunk_rows, dual_cross_entropy
from domino_kit.train.step import draw_blocks, forward_blocks

SIZES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 5,
        "gru_hidden_dim": 1024, "emb_dim": 256,
    },
    "SmolLM2-135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "num_hidden_layers": 5,
        "gru_hidden_dim": 512, "emb_dim": 128,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "num_hidden_layers": 1,
        "gru_hidden_dim": 12, "emb_dim": 8,
    },
}  # fmt: skip
"""Targets' sizes, and a draft's for each."""


class MaskedDraft(DominoDraft):
    """The training pass by the dense mask ``[N*K, S + N*K]``."""

    def forward(self, features: Tensor, context_positions: Tensor, anchors: Tensor,
                block_embeds: Tensor, record: object = None) -> Tensor:  # fmt: skip
        """As :meth:`DominoDraft.forward`."""
        block = block_embeds.shape[2]
        positions = alignment.block_positions(anchors, block).flatten(1)
        visible = alignment.visibility(anchors, context_positions, block)
        context = self.context_kv(features, context_positions)
        embeds = block_embeds.flatten(1, 2)
        return self.block_hidden(embeds, positions, context, visible).view_as(block_embeds)


@dataclass
class Case:
    """Ends of a target, a text with its features, and where its blocks are."""

    config: DraftConfig
    ends: StoredEnds
    batch: Batch
    features: Tensor
    anchors: int
    device: str

    def step(self, kind: type[DominoDraft], loss: Callable[..., Tensor]) -> Callable[[], float]:
        """A step of a fresh draft; each call trains on."""
        model = kind(self.config)
        init_weights(model, torch.Generator().manual_seed(0))
        model.to(self.device)
        optimizer = torch.optim.AdamW(model.parameters())

        def run() -> float:
            generator = torch.Generator().manual_seed(0)
            blocks = draw_blocks(self.batch, model, self.anchors, 7.0, [generator])
            rows = forward_blocks(model, self.ends, self.batch, self.features, blocks)
            total = loss(rows, self.ends.head.weight, model.vocab_projection)
            total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(total.detach())

        return run


def make_case(sizes: dict[str, Any], length: int, anchors: int, device: str) -> Case:
    """Random ends and features; every token after the first of the text is supervised."""
    layers = (1, 9, 17, 25, 33)
    config = DraftConfig(
        rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960, block_size=16,
        num_target_layers=36, target_layer_ids=layers, mask_token_id=1, projector_type="domino",
        shift_label=True, **sizes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    vocab, width = config.vocab_size, config.hidden_size
    with torch.device("meta"):
        embedding, head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
    weight = torch.randn(vocab, width, generator=generator).mul_(width**-0.5).to(device)
    embedding.weight = head.weight = nn.Parameter(weight, requires_grad=False)
    ids = torch.randint(vocab, (length,), generator=generator).tolist()
    batch = collate([Sample(0, "text", ids, [0] + [1] * (length - 1))], device)
    features = torch.randn(1, length, len(layers) * width, generator=generator).to(device)
    ends = StoredEnds(embedding, head, None, list(layers))
    return Case(config, ends, batch, features, anchors, device)


def fused(chunk_mb: int) -> Callable[..., Tensor]:
    """The objective in chunks of that many MB."""

    def loss(rows: Rows, head: Tensor, projection: Tensor) -> Tensor:
        chunk = chunk_rows(len(head), chunk_mb)
        return dual_cross_entropy(rows, head, projection, LAM, chunk).total

    return loss


def measured(name: str, length: int, anchors: int, repeats: int, device: str) -> list[Row]:
    """Both at the sizes of one target, and the time of the fast step's products."""
    case = make_case(SIZES[name], length, anchors, device)
    fast = case.step(DominoDraft, fused(512))
    variants = {"plain": case.step(MaskedDraft, plain_loss), "fast": fast}
    shape = {"sizes": name, "S": length, "N": anchors, "K": case.config.block_size}
    found = measure(shape, variants, repeats, count_first=True)
    found[1].roofline_seconds = product_seconds(products(fast), device)
    return found


@click.command()
@click.option("--sizes", default="Qwen3-0.6B", show_default=True, type=click.Choice(list(SIZES)))
@click.option("--length", default=2048, show_default=True, help="Tokens of the text.")
@click.option("--anchors", default=256, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Tiny shapes: does it run?")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    sizes: str, length: int, anchors: int, repeats: int, quick: bool, output: Path | None
) -> None:
    """Measure both in turn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if quick:
        sizes, length, anchors, repeats = "tiny", 40, 6, 1
    found = measured(sizes, length, anchors, repeats, device)
    show("training step without the target's pass", found, "plain")
    write_rows(output, found)


if __name__ == "__main__":
    main()
