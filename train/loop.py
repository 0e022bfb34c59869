"""The training loop: micro-batches, one update a step, metrics, validation, checkpoints."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from domino_kit.train.dataset import RowStream, Sample, anchor_generators, collate
from domino_kit.train.feature_source import open_source
from domino_kit.train.features import FeatureSource
from domino_kit.train.gate import check_checkpoint
from domino_kit.train.objective import lambda_base, regression
from domino_kit.train.processes import Processes
from domino_kit.train.report import Progress, write_checkpoint
from domino_kit.train.setup import Run
from domino_kit.train.state import remove_old, remove_unfinished, resume
from domino_kit.train.step import (
    add_teacher,
    compute_dtype,
    draw_blocks,
    forward_blocks,
    training_loss,
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


SUMMED = ("weight", "loss", "final", "base", "rows", "correct", "base_correct", "samples")
"""Fields of :class:`StepSums` that add up over processes."""


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
    run: Run, source: FeatureSource, rows: list[tuple[int, Sample]], step: int
) -> StepSums:
    """Accumulate the gradient of this process's rows (epoch and sample) of an optimizer step.

    It is the gradient of a *sum* over block rows, so that sums of micro-batches and of processes
    are the whole step's.
    """
    options = run.recipe.train
    horizon = run.total_steps - options.regress_steps
    lam = lambda_base(
        step - options.regress_steps, horizon,
        options.lambda_base_start, options.lambda_base_decay_ratio,
    )  # fmt: skip
    sums = StepSums(lam=lam)
    for start in range(0, len(rows), options.batch_size):
        micro_batch(run, source, rows[start : start + options.batch_size], step, sums)
    return sums


def micro_batch(
    run: Run, source: FeatureSource, part: list[tuple[int, Sample]], step: int, sums: StepSums
) -> None:
    """One forward and backward pass; its sums are added to ``sums``."""
    recipe, model, target, options = run.recipe, run.model, run.target, run.recipe.train
    samples = [sample for _, sample in part]
    batch = collate(samples, target.device)
    generators = [g for epoch, s in part for g in anchor_generators([s], options.seed, epoch)]
    blocks = draw_blocks(batch, model, options.num_anchors, recipe.gamma, generators, options)
    found = source(batch)
    with compute_dtype(target):
        rows = forward_blocks(model, target, batch, found.features, blocks)
    if step < options.regress_steps:
        total = regression(rows, wanted_hidden(batch, model, found, blocks))
        divisor = float(rows.weights.sum())
    else:
        rows = add_teacher(options, rows, batch, model, found, blocks)
        loss = training_loss(options, model, target, rows, sums.lam)
        total, divisor = loss.total, loss.divisor
        sums.final += loss.final
        sums.base += loss.base
        sums.correct += int(loss.final_correct.sum())
        sums.base_correct += int(loss.base_correct.sum())
    total.backward()
    sums.loss += float(total.detach())
    sums.weight += divisor
    sums.rows += int((rows.weights > 0).sum())
    sums.samples += len(samples)
    lacking = ~blocks.keep.any(1)
    sums.empty_rows += [s.row_id for s, none in zip(samples, lacking, strict=True) if none]


def add_up(run: Run, sums: StepSums, processes: Processes, stop: bool) -> tuple[StepSums, bool]:
    """Sums and gradients over all processes, and whether any of them was asked to stop.

    Every process takes part, with or without rows or anchors of its own.
    """
    if processes.count == 1:
        return sums, stop
    values = processes.sum(
        [float(getattr(sums, name)) for name in SUMMED] + [stop, len(sums.empty_rows)]
    )
    total = StepSums(lam=sums.lam, **dict(zip(SUMMED, values, strict=False)))  # type: ignore[arg-type]
    if values[-1]:
        total.empty_rows = [row for rows in processes.gather(sums.empty_rows) for row in rows]
    processes.sum_gradients(run.model)
    return total, values[-2] > 0


def update(run: Run, optimizer: torch.optim.Optimizer, sums: StepSums, step: int) -> float:
    """Divide the summed gradient by the summed weight, clip and step; returns the gradient norm.

    Dividing here, by all weights of the step, makes the result independent of how rows fall on
    micro-batches and processes.
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
def _interruptible(processes: Processes) -> Iterator[dict[str, bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once.

    Not so among several processes, where a launcher passes on what the terminal has sent already.
    """
    asked = {"stop": False}

    def handler(number: int, frame: Any) -> None:
        if asked["stop"] and processes.count == 1:
            raise KeyboardInterrupt
        asked["stop"] = True

    previous = {kind: signal.signal(kind, handler) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for kind, old in previous.items():
            signal.signal(kind, old)


@dataclass
class Training:
    """A run on its way: what :func:`train` carries from step to step."""

    run: Run
    command: list[str]
    processes: Processes
    source: FeatureSource
    optimizer: torch.optim.Optimizer
    measured: dict[str, float]
    before: float
    """Seconds of the run before it was resumed."""
    done: int = 0
    """Steps that lay behind when this process began."""
    saved: int = -1
    """Step of the newest checkpoint, if it needs no other at the same step."""
    gated: bool = False
    started: float = field(default_factory=time.monotonic)

    def validate(self, step: int, progress: Progress) -> None:
        """Validate on all processes' shares."""
        run = self.run
        self.measured = validate(
            run.recipe, run.model, run.target, self.source, run.validation, self.processes
        )
        progress.validation(step, self.measured)

    def save(self, step: int, *, last: bool) -> None:
        """Write a checkpoint, and check the first and the last one: others wait meanwhile."""

        def write() -> None:
            seconds = self.before + time.monotonic() - self.started
            folder = write_checkpoint(
                self.run, step, self.command, self.measured, seconds, self.optimizer
            )
            if last or not self.gated:  # a mismatch is better known now than at the end
                check_checkpoint(self.run, folder, self.source)
            remove_old(folder.parent, self.run.recipe.output.max_checkpoints)

        self.processes.together(write, only_first=True)
        self.saved, self.gated = step, True


def train(
    run: Run,
    command: list[str],
    *,
    quiet: bool = False,
    source: FeatureSource | None = None,
    processes: Processes | None = None,
    resumed: bool = False,
) -> int:
    """Train to the end, or to Ctrl-C, save, and return the number of steps done.

    Checkpoints lie in ``output.folder/step-N``; ``metrics.jsonl`` and TensorBoard events beside
    them. ``source`` may be that of an earlier run on the same target, layers and data;
    ``resumed`` goes on from the newest checkpoint there. Raises ``ValueError`` if the loss stops
    being a number or that checkpoint is another run's, ``ParityError`` if the first or the last
    checkpoint does not do what the training graph does.
    """
    options = run.recipe.train
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with open_source(run, source) as opened:
        state = _prepare(run, command, opened, processes or Processes(), quiet, resumed)
        return _train(state, quiet)


def _train(state: Training, quiet: bool) -> int:
    """All steps from ``state.done`` on; returns the number of the last one."""
    run, options = state.run, state.run.recipe.train
    step, rows = state.done, run.recipe.step_rows
    stream = RowStream(run.samples, options.seed)
    first = state.processes.first
    progress = state.processes.together(
        lambda: Progress(run, step, quiet=quiet or not first, write=first)
    )
    assert progress is not None
    with progress, _interruptible(state.processes) as asked:
        stop = False
        while step < run.total_steps and not stop:
            part = state.processes.share(stream.rows(step * rows, (step + 1) * rows))
            own = train_step(run, state.source, part, step)
            sums, stop = add_up(run, own, state.processes, asked["stop"])
            if not math.isfinite(sums.loss):
                raise ValueError(
                    f"the loss is {sums.loss} at step {step + 1}; lower train.lr (now {options.lr})."
                )
            norm = update(run, state.optimizer, sums, step)
            step += 1
            progress.step(step, sums, learning_rate(step - 1, run), norm)
            last = step == run.total_steps
            if run.validation and (last or _due(step, run.recipe.output.validate_every)):
                state.validate(step, progress)
            if not last and not stop and _due(step, run.recipe.output.save_every):
                state.save(step, last=False)
    if state.saved != step:
        state.save(step, last=True)
    return step


def _prepare(
    run: Run,
    command: list[str],
    source: FeatureSource,
    processes: Processes,
    quiet: bool,
    resumed: bool,
) -> Training:
    """Optimizer and state, from the beginning or from the newest checkpoint."""
    options = run.recipe.train
    run.model.train()
    optimizer = torch.optim.AdamW(
        run.model.parameters(),
        lr=options.lr, betas=options.betas, weight_decay=options.weight_decay,
    )  # fmt: skip
    state = Training(run, command, processes, source, optimizer, {}, 0.0)
    if not resumed:
        return state
    notes: list[str] = []
    found = processes.together(lambda: resume(run, optimizer, notes))
    if found is not None:
        state.measured, state.before, state.done = found.measured, found.seconds, found.step
        if found.checked or found.step < run.total_steps:  # else killed between writing and check
            state.saved = found.step
        notes.append(f"going on from step {found.step} of {run.total_steps}")
    if processes.first:
        remove_unfinished(run.recipe.output.folder)
        for note in notes:
            Console(stderr=True, quiet=quiet, markup=False).print(note)
    return state


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
