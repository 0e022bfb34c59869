"""One training step on a batch: from anchors to the rows that the objective takes."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.modeling import DominoDraft
from domino_kit.target import TargetEnds
from domino_kit.trace import Record
from domino_kit.train.dataset import Batch
from domino_kit.train.distill import Distill
from domino_kit.train.dpace import Dpace
from domino_kit.train.features import BatchFeatures
from domino_kit.train.objective import Loss, Rows, chunk_rows, dual_cross_entropy, logit_arrays
from domino_kit.train.recipe import TrainSection


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch: ``anchors, keep [B, N]``, ``labels, weights [B, N, K]``.

    ``prefix [B, N]`` counts the tokens that a block shows, the anchor included; ``None``: only it.
    """

    anchors: Tensor
    keep: Tensor
    labels: Tensor
    weights: Tensor
    prefix: Tensor | None = None


def draw_blocks(
    batch: Batch,
    model: DominoDraft,
    num_anchors: int,
    gamma: float,
    generators: list[torch.Generator],
    options: TrainSection | None = None,
) -> Blocks:
    """Sample anchors, and visible prefixes where ``options`` want some, and weigh their rows."""
    anchors, keep = alignment.sample_anchors(batch.loss_mask, num_anchors, generators)
    prefix = None
    if options is not None and options.visible_prefix > 0:
        prefix = alignment.sample_prefixes(
            keep, options.visible_prefix, options.visible_prefix_base,
            model.config.block_size, generators,
        )  # fmt: skip
    return weigh_blocks(batch, model, anchors, keep, gamma, prefix)


def weigh_blocks(
    batch: Batch,
    model: DominoDraft,
    anchors: Tensor,
    keep: Tensor,
    gamma: float,
    prefix: Tensor | None = None,
) -> Blocks:
    """Labels and weights at given anchors: decay by offset where the label is supervised.

    Behind a visible prefix, the decay starts at the first token that is not shown.
    """
    config = model.config
    labels, supervised = alignment.row_labels(
        batch.input_ids, batch.loss_mask, anchors, config.block_size, config.shift_label
    )
    if prefix is None:
        decay = alignment.decay_weights(config.block_size, config.shift_label, gamma)
    else:
        decay = alignment.prefix_weights(prefix, config.block_size, config.shift_label, gamma)
    weights = decay.to(labels.device) * (supervised & keep[..., None])
    return Blocks(anchors, keep, labels, weights, prefix)


def forward_blocks(
    model: DominoDraft,
    target: TargetEnds,
    batch: Batch,
    features: Tensor,
    blocks: Blocks,
    record: Record | None = None,
) -> Rows:
    """Run the draft on all blocks, teacher-forced: rows ``[B*N*K, ...]`` for the objective."""
    config = model.config
    anchor_tokens = batch.input_ids.gather(1, blocks.anchors)
    inputs = alignment.block_inputs(anchor_tokens, config.block_size, config.mask_token_id)
    if blocks.prefix is not None:
        tokens = alignment.gru_inputs(batch.input_ids, blocks.anchors, config.block_size)
        inputs = alignment.show_prefix(inputs, tokens, blocks.prefix)
    embeds = target.embed(inputs)
    hidden = model(features, batch.positions, blocks.anchors, embeds, record)
    if record is not None:
        record |= {"block_ids": inputs, "block_embeds": embeds, "hidden": hidden}
    low_rank = None
    if config.has_head:
        tokens = alignment.gru_inputs(batch.input_ids, blocks.anchors, config.block_size)
        states = model.head_states(target.embed(tokens).flatten(0, 1)).view(*tokens.shape, -1)
        if record is not None:
            record["gru_states"] = alignment.row_states(states, config.shift_label)
        low_rank = model.head_hidden(hidden, alignment.row_states(states, config.shift_label))
        corrected = alignment.corrected_rows(
            config.block_size, config.shift_label, config.pure_draft_prefix_len
        )
        low_rank = (low_rank * corrected.to(low_rank.device)[:, None]).flatten(0, 2)
    return Rows(hidden.flatten(0, 2), low_rank, blocks.labels.flatten(), blocks.weights.flatten())


def compute_dtype(target: TargetEnds) -> AbstractContextManager[object]:
    """bfloat16 compute over float32 master weights where the target computes in bfloat16."""
    dtype = target.embedding.weight.dtype
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(target.device.type, dtype=dtype)


def block_loss(
    model: DominoDraft, target: TargetEnds, rows: Rows, lam: float, chunk_mb: int
) -> Loss:
    """The plain objective of a draft's rows, with the target's head and the draft's projector."""
    projection = model.vocab_projection if model.config.has_head else None
    chunk = chunk_rows(target.vocab_size, chunk_mb)
    return dual_cross_entropy(rows, target.head.weight, projection, lam, chunk)


def add_teacher(
    options: TrainSection,
    rows: Rows,
    batch: Batch,
    model: DominoDraft,
    found: BatchFeatures,
    blocks: Blocks,
) -> Rows:
    """The rows with what distillation learns from; the same rows where there is none."""
    if options.distill == "none":
        return rows
    return replace(rows, wanted=wanted_hidden(batch, model, found, blocks))


def training_loss(
    options: TrainSection, model: DominoDraft, target: TargetEnds, rows: Rows, lam: float
) -> Loss:
    """The objective as the recipe wants it: D-PACE weights, distillation, or neither."""
    dpace = distill = None
    if options.position_weights == "dpace":
        per_block = options.dpace_divide_by == "blocks"
        dpace = Dpace(options.dpace_alpha, model.config.block_size, per_block)
    if options.distill != "none":
        distill = Distill(
            options.distill, options.distill_mix, options.distill_temperature, options.distill_top_k
        )
    projection = model.vocab_projection if model.config.has_head else None
    chunk = chunk_rows(target.vocab_size, options.chunk_mb, logit_arrays(distill is not None))
    return dual_cross_entropy(rows, target.head.weight, projection, lam, chunk, dpace, distill)


def wanted_hidden(batch: Batch, model: DominoDraft, found: BatchFeatures, blocks: Blocks) -> Tensor:
    """The target's hidden row that predicts each row's label, ``[B*N*K, D]``: position label - 1.

    Rows without a label get the row of some valid position; their weight is zero.
    """
    config = model.config
    offsets = alignment.row_offsets(config.block_size, config.shift_label)
    index = blocks.anchors[..., None] + offsets.to(blocks.anchors.device) - 1
    index = index.clamp(min=0, max=batch.input_ids.shape[1] - 1).flatten(1)
    rows = found.hidden.gather(1, index[..., None].expand(-1, -1, found.hidden.shape[-1]))
    return rows.flatten(0, 1)
