"""Validation on held-out rows: teacher-forced numbers and free-running replay acceptance."""

import torch

from domino_kit.acceptance import Acceptance, teacher_forced_accept_length
from domino_kit.modeling import DominoDraft
from domino_kit.replay import KnownAnswer, project, walk
from domino_kit.target import TargetEnds
from domino_kit.train.dataset import Sample, anchor_generators, collate
from domino_kit.train.features import FeatureSource
from domino_kit.train.processes import Processes
from domino_kit.train.recipe import Recipe
from domino_kit.train.step import block_loss, compute_dtype, draw_blocks, forward_blocks


def known_answers(sample: Sample) -> list[KnownAnswer]:
    """Every supervised span of a sample with all that precedes it."""
    found = []
    start = None
    for place, flag in enumerate([*sample.loss_mask, 0]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            if start > 0:
                found.append(KnownAnswer(sample.input_ids[:start], sample.input_ids[start:place]))
            start = None
    return found


@torch.no_grad()
def validate(
    recipe: Recipe,
    model: DominoDraft,
    target: TargetEnds,
    source: FeatureSource,
    rows: list[Sample],
    processes: Processes,
) -> dict[str, float]:
    """``teacher_forced_*`` and ``replay_*`` numbers; every acceptance length is with bonus.

    Each process works on its share of ``rows``; all of them get the numbers of the whole. Replay
    takes the rows' answers as the target's own greedy ones; with other text it is an estimate that
    reads high or low.
    """
    model.eval()
    own = processes.share(rows)
    metrics = teacher_forced(recipe, model, target, source, own, processes)
    runs = replayed(model, target, source, own, recipe.train.batch_size)
    for name, mine in runs.items():
        everyone = [run for part in processes.gather(mine) for run in part]
        stats = Acceptance.of(everyone, model.config.num_proposals)
        metrics[f"{name}_accept_length"] = stats.accept_length
    model.train()
    return metrics


def replayed(
    model: DominoDraft,
    target: TargetEnds,
    source: FeatureSource,
    rows: list[Sample],
    batch_size: int,
) -> dict[str, list[int]]:
    """Accepted runs of all answers in ``rows``, from the features that training reads."""
    runs: dict[str, list[int]] = {"replay": []}
    if model.config.has_head:
        runs["replay_head_off"] = []
    for start in range(0, len(rows), batch_size):
        samples = rows[start : start + batch_size]
        features = source(collate(samples, target.device)).features
        with compute_dtype(target):
            texts = [
                (row, text) for row, each in enumerate(samples) for text in known_answers(each)
            ]
            contexts = [
                project(model, features[row : row + 1, : len(text.tokens)]) for row, text in texts
            ]
            for name, found in runs.items():
                for each in walk(
                    target, model, [text for _, text in texts], contexts,
                    use_head=name == "replay",
                ):  # fmt: skip
                    found += each
    return runs


def teacher_forced(
    recipe: Recipe,
    model: DominoDraft,
    target: TargetEnds,
    source: FeatureSource,
    rows: list[Sample],
    processes: Processes,
) -> dict[str, float]:
    """Losses, accuracies and acceptance with true tokens fed to the head."""
    names = ("weight", "final", "base", "correct", "base_correct", "count")
    sums = dict.fromkeys(names, 0.0)
    correct_blocks: list[list[bool]] = []
    valid_blocks: list[list[bool]] = []
    for start in range(0, len(rows), recipe.train.batch_size):
        samples = rows[start : start + recipe.train.batch_size]
        batch = collate(samples, target.device)
        generators = anchor_generators(samples, recipe.train.seed, -1)
        blocks = draw_blocks(batch, model, recipe.train.num_anchors, recipe.gamma, generators)
        features = source(batch).features
        with compute_dtype(target):
            flat = forward_blocks(model, target, batch, features, blocks)
        loss = block_loss(model, target, flat, 0.0, recipe.train.chunk_mb)
        used = flat.weights > 0
        sums["weight"] += float(flat.weights.sum())
        sums["final"] += loss.final
        sums["base"] += loss.base
        sums["correct"] += float(loss.final_correct.sum())
        sums["base_correct"] += float(loss.base_correct.sum())
        sums["count"] += int(used.sum())
        size = model.config.block_size
        correct_blocks += loss.final_correct.view(-1, size).tolist()
        valid_blocks += used.view(-1, size).tolist()
    sums = dict(zip(names, processes.sum(list(sums.values())), strict=True))
    blocks_of_all = processes.gather((correct_blocks, valid_blocks))
    correct_blocks = [block for part, _ in blocks_of_all for block in part]
    valid_blocks = [block for _, part in blocks_of_all for block in part]
    return {
        "teacher_forced_final_loss": sums["final"] / max(sums["weight"], 1e-6),
        "teacher_forced_base_loss": sums["base"] / max(sums["weight"], 1e-6),
        "teacher_forced_accuracy": sums["correct"] / max(sums["count"], 1),
        "teacher_forced_base_accuracy": sums["base_correct"] / max(sums["count"], 1),
        "teacher_forced_accept_length": teacher_forced_accept_length(correct_blocks, valid_blocks),
    }
