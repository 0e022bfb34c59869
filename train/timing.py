"""How long a run will take: one micro-batch is measured, and the rest follows from counts."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_kit.train.cost import BatchShape, Operations, TargetCost, batch_operations, batch_shape
from domino_kit.train.dataset import RowStream, Sample
from domino_kit.train.features import FeatureSource, RowEncoder
from domino_kit.train.loop import StepSums, micro_batch
from domino_kit.train.setup import Run

LOOKED_AT = 500
"""Micro-batches of the first epoch whose shapes stand for all."""

LONG = 20.0
"""Seconds from which on nothing is measured twice."""


@dataclass(frozen=True)
class Measured:
    """One micro-batch on this device: seconds of features and of training, and what it was.

    ``peak`` is the most memory that the device's allocator held, in bytes; 0 where it cannot say.
    """

    shape: BatchShape
    feature_seconds: float
    train_seconds: float
    peak: int


@dataclass(frozen=True)
class Estimate:
    """Operations and seconds, as means over micro-batches and for the whole run."""

    step: Operations
    step_seconds: float
    run_seconds: float
    rate: float
    """Operations of the draft a second, as measured."""


def micro_batches(run: Run) -> list[list[tuple[int, Sample]]]:
    """The first micro-batches of a run of one process, as epoch and sample."""
    options, rows = run.recipe.train, run.recipe.step_rows
    stream, found = RowStream(run.samples, options.seed), []
    steps = max(1, min(run.total_steps, LOOKED_AT * options.batch_size // rows))
    for step in range(steps):
        part = stream.rows(step * rows, (step + 1) * rows)
        found += [part[i : i + options.batch_size] for i in range(0, rows, options.batch_size)]
    return found


def shapes_of(run: Run, batches: Sequence[list[tuple[int, Sample]]]) -> list[BatchShape]:
    """The shapes of micro-batches."""
    anchors, config = run.recipe.train.num_anchors, run.model.config
    return [batch_shape([sample for _, sample in each], anchors, config) for each in batches]


def measure(run: Run, encode: RowEncoder, part: list[tuple[int, Sample]]) -> Measured:
    """Run a micro-batch forward and backward, and an update of size zero; weights stay as they are.

    Raises ``ValueError`` if it does not fit into a GPU's memory or the loss is not a number.
    """
    device, options = run.target.device, run.recipe.train
    samples = [sample for _, sample in part]
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.0, weight_decay=0.0)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def features() -> None:
        kept.update({id(sample): encode(sample) for sample in samples})

    def train() -> None:
        source = FeatureSource(lambda sample: kept[id(sample)], 0)
        sums = StepSums(lam=0.5)
        micro_batch(run, source, part, options.regress_steps, sums)
        if not math.isfinite(sums.loss):
            raise ValueError(f"the loss is {sums.loss} before any training; check the target.")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run.model.train()
    try:
        feature_seconds = _seconds(features, device)
        train_seconds = _seconds(train, device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the largest micro-batch does not fit into memory ({str(error).splitlines()[0]}) Lower "
            f"train.batch_size (now {options.batch_size}), train.num_anchors (now "
            f"{options.num_anchors}), data.max_length (now {run.recipe.data.max_length}) or "
            "train.chunk_mb."
        ) from None
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return Measured(shapes_of(run, [part])[0], feature_seconds, train_seconds, peak)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of ``work``: of a second time, unless the first was long, since that one is slower."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        if seconds > LONG:
            break
    return seconds


def estimate_time(
    run: Run, shapes: Sequence[BatchShape], measured: Measured, kept: float
) -> Estimate:
    """Scale the measured micro-batch to all, each part by its own operations.

    ``kept`` is the share of features that stay in memory after the first epoch. Features that the
    target does not compute in this process count by tokens.
    """
    whole = run.whole_target if run.recipe.features.backend == "hf" else None
    target = None if whole is None else TargetCost.of(whole)
    teacher = run.recipe.train.distill != "none"
    config, options = run.model.config, run.recipe.train

    def cost(shape: BatchShape) -> Operations:
        return batch_operations(shape, config, target, teacher=teacher)

    each = [cost(shape) for shape in shapes]
    count = options.accumulation
    step = Operations(
        *(count * sum(getattr(one, name) for one in each) / len(each)
          for name in ("target", "draft", "vocabulary"))
    )  # fmt: skip
    here = cost(measured.shape)
    tokens = count * sum(sum(shape.lengths) for shape in shapes) / len(shapes)
    share = step.target / here.target if target else tokens / sum(measured.shape.lengths)
    features = measured.feature_seconds * share
    train = measured.train_seconds * step.trained / here.trained
    epochs = run.total_steps * run.recipe.step_rows / len(run.samples)
    computed = min(1.0, 1 / epochs) * kept + (1 - kept)
    return Estimate(
        step, features + train, run.total_steps * (features * computed + train),
        here.trained / measured.train_seconds,
    )  # fmt: skip


def describe_time(run: Run, encode: RowEncoder, kept: float) -> list[str]:
    """Measure the largest of the first micro-batches; operations and time, as lines for people.

    Raises what :func:`measure` raises.
    """
    batches = micro_batches(run)
    shapes = shapes_of(run, batches)
    config = run.model.config
    sizes = [batch_operations(shape, config, None).trained for shape in shapes]
    measured = measure(run, encode, batches[sizes.index(max(sizes))])
    found = estimate_time(run, shapes, measured, kept)
    step, shape = found.step, measured.shape
    return [
        f"a step: {_count(step.total)} operations (target {_count(step.target)}, draft "
        f"{_count(step.draft)}, vocabulary {_count(step.vocabulary)}), counted, on average",
        f"measured: {len(shape.lengths)} rows of up to {shape.width} tokens with {shape.anchors} "
        f"blocks, {measured.feature_seconds:.2f} s for features and {measured.train_seconds:.2f} s "
        f"for the draft, at {_count(found.rate)} operations/s"
        + (f"; memory peak {measured.peak / 2**30:.1f} GB" if measured.peak else ""),
        f"estimated time: {found.step_seconds:.2f} s a step, {_duration(found.run_seconds)} for "
        f"{run.total_steps} steps in one process, without validation and checkpoints",
    ]


def _count(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} M"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
