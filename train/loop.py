"""The training loop: micro-batches, one update a step, metrics, validation, checkpoints."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from domino_kit.train.dataset import anchor_generators, collate, micro_batches
from domino_kit.train.feature_source import open_source
from domino_kit.train.features import FeatureSource
from domino_kit.train.gate import check_checkpoint
from domino_kit.train.objective import lambda_base, regression
from domino_kit.train.report import Progress, write_checkpoint
from domino_kit.train.setup import Run
from domino_kit.train.step import (
    block_loss,
    compute_dtype,
    draw_blocks,
    forward_blocks,
    wanted_hidden,
)
from domino_kit.train.validate import validate


@dataclass
class StepSums:
    """Sums over the micro-batches of one optimizer step, and the λ it ran with."""

    lam: float = 1.0
    weight: float = 0.0
    loss: float = 0.0
    final: float = 0.0
    base: float = 0.0
    rows: int = 0
    correct: int = 0
    base_correct: int = 0
    samples: int = 0
    empty_rows: list[str] = field(default_factory=list)


def learning_rate(step: int, run: Run) -> float:
    """Linear warm-up, then cosine; the regression phase has its own warm-up and constant rate."""
    options = run.recipe.train
    if step < options.regress_steps:
        rise = min(1.0, (step + 1) / max(1, round(options.regress_steps * options.warmup_ratio)))
        return (options.regress_lr or options.lr) * rise
    step, total = step - options.regress_steps, run.total_steps - options.regress_steps
    warmup = round(total * options.warmup_ratio)
    if step < warmup:
        return options.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    low = options.min_lr_ratio
    return options.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def train_step(
    run: Run, source: FeatureSource, batches: Iterator[tuple[int, list[Any]]], step: int
) -> StepSums:
    """Accumulate the gradient of one optimizer step; it is the gradient of a *sum* over rows."""
    recipe, model, target = run.recipe, run.model, run.target
    options = recipe.train
    horizon = run.total_steps - options.regress_steps
    lam = lambda_base(
        step - options.regress_steps, horizon,
        options.lambda_base_start, options.lambda_base_decay_ratio,
    )  # fmt: skip
    sums = StepSums(lam=lam)
    for _ in range(options.accumulation):
        epoch, samples = next(batches)
        batch = collate(samples, target.device)
        generators = anchor_generators(samples, options.seed, epoch)
        blocks = draw_blocks(batch, model, options.num_anchors, recipe.gamma, generators)
        found = source(batch)
        with compute_dtype(target):
            rows = forward_blocks(model, target, batch, found.features, blocks)
        if step < options.regress_steps:
            total = regression(rows, wanted_hidden(batch, model, found, blocks))
        else:
            loss = block_loss(model, target, rows, sums.lam, options.chunk_mb)
            total = loss.total
            sums.final += loss.final
            sums.base += loss.base
            sums.correct += int(loss.final_correct.sum())
            sums.base_correct += int(loss.base_correct.sum())
        total.backward()
        sums.loss += float(total.detach())
        sums.weight += float(rows.weights.sum())
        sums.rows += int((rows.weights > 0).sum())
        sums.samples += len(samples)
        lacking = ~blocks.keep.any(1)
        sums.empty_rows += [s.row_id for s, none in zip(samples, lacking, strict=True) if none]
    return sums


def update(run: Run, optimizer: torch.optim.Optimizer, sums: StepSums, step: int) -> float:
    """Divide the summed gradient by the summed weight, clip and step; returns the gradient norm.

    Dividing here, by all weights of the step, makes the result independent of how rows fall on
    micro-batches.
    """
    parameters = [p for p in run.model.parameters() if p.grad is not None]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= max(sums.weight, 1e-6)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, run.recipe.train.clip))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, run)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@contextmanager
def _interruptible() -> Iterator[dict[str, bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once."""
    asked = {"stop": False}

    def handler(number: int, frame: Any) -> None:
        if asked["stop"]:
            raise KeyboardInterrupt
        asked["stop"] = True

    previous = {kind: signal.signal(kind, handler) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for kind, old in previous.items():
            signal.signal(kind, old)


def train(
    run: Run, command: list[str], *, quiet: bool = False, source: FeatureSource | None = None
) -> int:
    """Train to the end, or to Ctrl-C, save, and return the number of steps done.

    Checkpoints lie in ``output.folder/step-N``; ``metrics.jsonl`` and TensorBoard events beside
    them. ``source`` may be that of an earlier run on the same target, layers and data. Raises
    ``ValueError`` if the loss stops being a number, ``ParityError`` if the first or the last
    checkpoint does not do what the training graph does.
    """
    recipe, options = run.recipe, run.recipe.train
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run.model.train()
    optimizer = torch.optim.AdamW(
        run.model.parameters(),
        lr=options.lr, betas=options.betas, weight_decay=options.weight_decay,
    )  # fmt: skip
    batches = micro_batches(run.samples, options.batch_size, options.seed)
    measured: dict[str, float] = {}
    started = time.monotonic()
    with (
        open_source(run, source) as source,
        Progress(run, quiet=quiet) as progress,
        _interruptible() as asked,
    ):
        step = saved = 0
        while step < run.total_steps and not asked["stop"]:
            sums = train_step(run, source, batches, step)
            if not math.isfinite(sums.loss):
                raise ValueError(
                    f"the loss is {sums.loss} at step {step + 1}; lower train.lr (now {options.lr})."
                )
            norm = update(run, optimizer, sums, step)
            step += 1
            progress.step(step, sums, learning_rate(step - 1, run), norm)
            last = step == run.total_steps
            if run.validation and (last or _due(step, recipe.output.validate_every)):
                measured = validate(recipe, run.model, run.target, source, run.validation)
                progress.validation(step, measured)
            if not last and _due(step, recipe.output.save_every):
                seconds = time.monotonic() - started
                folder = write_checkpoint(run, step, command, measured, seconds)
                if saved == 0:
                    check_checkpoint(run, folder)  # a mismatch is better known now than at the end
                saved = step
    if saved != step or step == 0:
        folder = write_checkpoint(run, step, command, measured, time.monotonic() - started)
    check_checkpoint(run, folder)
    return step


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
