"""The training graph's stage trace: one training step's forward pass and objective at one anchor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.acceptance import leading_run
from domino_kit.modeling import DominoDraft
from domino_kit.target import TargetEnds
from domino_kit.trace import Record, Step
from domino_kit.train.dataset import Sample, collate
from domino_kit.train.features import FeatureSource, RowEncoder
from domino_kit.train.step import block_loss, compute_dtype, forward_blocks, weigh_blocks

CHUNK_MB = 256


def graph_steps(
    model: DominoDraft, target: TargetEnds, encode: RowEncoder, steps: Sequence[Step]
) -> list[Step]:
    """The same steps from the training graph; ``encode`` gives the features of their texts.

    Training is teacher-forced, so each step's own proposals are put behind its text as the truth:
    the graph then feeds its GRU what a free-running rollout fed its own, and the objective must
    find every one of those proposals to be the best token (-1 where it does not). What was fed is
    kept as ``fed``, so that a recorded step can be fed the same again. Without last hidden rows
    from ``encode``, the target's own choices are left out.
    """
    return [_graph_step(model, target, encode, step) for step in steps]


def known_row(features: Tensor) -> RowEncoder:
    """The encoder for texts that begin like a row whose ``features [S, layers*D]`` are known.

    Rows from the anchor on are zero: no block may read them.
    """

    def encode(sample: Sample) -> tuple[Tensor, Tensor]:
        anchor, size = sample.loss_mask.index(1) - 1, len(sample.input_ids)
        rows = features.new_zeros(size, features.shape[-1])
        rows[:anchor] = features[:anchor]
        return rows, features.new_empty(size, 0)

    return encode


@torch.no_grad()
def _graph_step(model: DominoDraft, target: TargetEnds, encode: RowEncoder, step: Step) -> Step:
    config = model.config
    proposals = step.values.get("fed", step.values["proposals"]).tolist()
    tokens = [*step.values["text"].tolist(), *proposals]
    mask = [0] * (step.anchor + 1) + [1] * len(proposals)
    batch = collate([Sample(0, step.prompt, tokens, mask)], target.device)
    anchors = torch.tensor([[step.anchor]], device=target.device)
    blocks = weigh_blocks(batch, model, anchors, torch.ones_like(anchors, dtype=torch.bool), 1e9)
    found = FeatureSource(encode, cache_mb=0)(batch)
    record: Record = {}
    with compute_dtype(target):
        rows = forward_blocks(model, target, batch, found.features, blocks, record)
        base = target.logits(rows.hidden)
        corrected = base
        if rows.low_rank is not None:
            corrected = base + rows.low_rank.to(base.dtype) @ model.vocab_projection.T.to(
                base.dtype
            )
    loss = block_loss(model, target, rows, 0.0, CHUNK_MB)
    served = alignment.proposal_rows(config.block_size, config.shift_label)
    correct, labels = loss.final_correct[served], blocks.labels[0, 0, served]
    record |= {
        "base_logits": base[served],
        "proposals": torch.where(correct, labels, -1),
    }
    if found.hidden.shape[-1]:
        record["target_argmax"] = target.logits(found.hidden[0, step.anchor :]).argmax(-1)
    if config.has_head:
        record |= {
            "gru_states": record["gru_states"][0, 0, served],
            "corrected_logits": corrected[served],
        }
    return Step(step.prompt, _plain(record, step, proposals))


def _plain(record: Record, step: Step, proposals: list[int]) -> Record:
    """The stages without their batch and anchor axes; the context up to the anchor."""
    anchor = step.anchor
    values: Record = {"text": step.values["text"], "fed": torch.tensor(proposals)}
    for stage in ("features", "context", "context_keys", "context_values"):
        values[stage] = record[stage][0, :anchor]
    for stage in ("block_ids", "block_embeds", "hidden"):
        values[stage] = record[stage][0, 0]
    values["block_positions"] = record["block_positions"][0]
    for stage in ("base_logits", "gru_states", "corrected_logits", "proposals", "target_argmax"):
        if stage in record:
            values[stage] = record[stage]
    if "target_argmax" in values:
        run = leading_run(proposals, values["target_argmax"].tolist())
        values["accepted_run"] = torch.tensor([run])
    return values
