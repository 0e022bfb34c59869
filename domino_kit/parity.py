"""Comparing the stage traces of several paths, up to the first stage that is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from domino_kit.acceptance import leading_run
from domino_kit.trace import STAGES, Difference, Step, compare_stage


class ParityError(RuntimeError):
    """A draft does not do what it did in training."""


BY_OFFSET = ("gru_states", "corrected_logits", "target_argmax")
"""Stages that depend on the proposals before: comparable up to the first different proposal."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that rounding explains; ``near_tie`` is for tokens.

    A proposal, or a choice of the target, may differ only where the reference's own logits of the
    two tokens are closer than ``near_tie`` of the row's largest logit: 0 in float32, where tokens
    must be equal.
    """

    features: float
    other: float
    near_tie: float

    def of(self, stage: str) -> float:
        """For one stage. Embeddings are looked up, so they are exact in every dtype."""
        if stage == "block_embeds":
            return 1e-6
        return self.features if stage in ("features", "context") else self.other


FLOAT32 = Tolerance(features=1e-5, other=1e-4, near_tie=0.0)
ROUNDED = Tolerance(features=0.1, other=0.1, near_tie=0.05)
"""For bfloat16 and float16, whose rounding the layers of a target amplify."""


def tolerance_for(dtypes: Sequence[str]) -> Tolerance:
    """The tolerance between paths that ran in these dtypes."""
    return FLOAT32 if set(dtypes) == {"float32"} else ROUNDED


def rule(tolerance: Tolerance) -> str:
    """The rule in words."""
    said = (
        f"features and context within {tolerance.features:g}, other stages within "
        f"{tolerance.other:g} of each row's largest value"
    )
    if tolerance.near_tie == 0:
        return f"{said}; tokens and runs must be equal"
    return (
        f"{said}; tokens may differ only where the reference's logits of both are within "
        f"{tolerance.near_tie:g} of the row's largest"
    )


@dataclass(frozen=True)
class StageResult:
    """One stage of one path against the reference, over all steps that both have.

    ``worst`` is the largest difference, of the first step out of tolerance if there is one.
    ``found`` and ``wanted`` are that step, ``order`` its number within its prompt.
    """

    stage: str
    path: str
    steps: int
    worst: Difference
    found: Step | None = None
    wanted: Step | None = None
    order: int = 0

    @property
    def agrees(self) -> bool:
        """No step is out of tolerance."""
        return self.found is None


def compare_paths(
    reference: Sequence[Step],
    paths: Mapping[str, tuple[Sequence[Step], Tolerance]],
    width: int,
) -> list[StageResult]:
    """Results stage by stage in order, each path against the reference, up to the stage where
    something is wrong first (:func:`first_difference`). ``width`` is D.
    """
    known = {step.key: step for step in reference}
    results = []
    for stage in STAGES:
        for name, (steps, tolerance) in paths.items():
            pairs = [(step, known[step.key]) for step in steps if step.key in known]
            found = _compare(stage, name, pairs, tolerance, width)
            results += [] if found is None else [found]
    wrong = first_difference(results)
    if wrong is None:
        return results
    return [each for each in results if STAGES.index(each.stage) <= STAGES.index(wrong.stage)]


def first_difference(results: Sequence[StageResult]) -> StageResult | None:
    """The result that is wrong first: on each path the earliest step, there the earliest stage.

    A step that goes wrong late can spoil even the first stage of the next one, so time comes before
    stage. Of several paths the one with the earliest stage is taken.
    """
    decisive: dict[str, StageResult] = {}
    for result in results:
        before = decisive.get(result.path)
        if not result.agrees and (before is None or _when(result) < _when(before)):
            decisive[result.path] = result
    return min(decisive.values(), key=lambda each: STAGES.index(each.stage), default=None)


def _when(result: StageResult) -> tuple[int, int]:
    return result.order, STAGES.index(result.stage)


def _compare(
    stage: str, path: str, pairs: list[tuple[Step, Step]], tolerance: Tolerance, width: int
) -> StageResult | None:
    """One stage over the pairs of steps that both have it; ``None`` if no pair has."""
    orders = _orders([found for found, _ in pairs])
    worst = Difference(stage, 0.0, 0.0, None)
    first: tuple[int, Step, Step] | None = None
    count = 0
    for order, (found, wanted) in zip(orders, pairs, strict=True):
        if stage not in found.values or stage not in wanted.values:
            continue
        count += 1
        found, wanted = comparable(stage, found, wanted)
        gap = compare_stage(stage, found, wanted, tolerance.of(stage), width)
        if not gap.agrees and _near_tie(stage, found, wanted, tolerance):
            gap = Difference(stage, gap.absolute, gap.relative, None)
        if not gap.agrees and (first is None or order < first[0]):
            first, worst = (order, found, wanted), gap
        elif first is None and gap.relative > worst.relative:
            worst = gap
    if count == 0:
        return None
    if first is None:
        return StageResult(stage, path, count, worst)
    return StageResult(stage, path, count, worst, first[1], first[2], first[0])


def _orders(steps: Sequence[Step]) -> list[int]:
    """The number of each step within its prompt, by anchor."""
    anchors: dict[str, list[int]] = {}
    for step in steps:
        anchors.setdefault(step.prompt, []).append(step.anchor)
    return [sorted(anchors[step.prompt]).index(step.anchor) for step in steps]


def comparable(stage: str, found: Step, wanted: Step) -> tuple[Step, Step]:
    """Both steps with the stage cut to the offsets that were fed the same proposals."""
    if stage not in (*BY_OFFSET, "accepted_run") or "proposals" not in found.values:
        return found, wanted
    fed = [step.values.get("fed", step.values["proposals"]).tolist() for step in (found, wanted)]
    same = leading_run(*fed)
    keep = same + 1
    if stage == "accepted_run":
        keep = 1 if same == len(fed[1]) else 0
    cut = [
        Step(step.prompt, {**step.values, stage: step.values[stage][:keep]}, step.columns)
        for step in (found, wanted)
    ]
    return cut[0], cut[1]


def best_token(step: Step, offset: int) -> int:
    """The best token of a reference's row, which has all columns; ``offset`` counts from 0."""
    logits = step.values.get("corrected_logits", step.values["base_logits"])
    return int(logits[offset].argmax())


def _near_tie(stage: str, found: Step, wanted: Step, tolerance: Tolerance) -> bool:
    """Whether different tokens are excused by the reference's own logits being nearly equal."""
    if tolerance.near_tie == 0 or stage not in ("proposals", "target_argmax", "accepted_run"):
        return False
    if stage != "proposals":
        return True  # the target's logits are not traced: its choices are compared in float32 only
    ours, theirs = found.values["proposals"], wanted.values["proposals"]
    logits = wanted.values.get("corrected_logits", wanted.values["base_logits"]).float()
    for offset in (ours != theirs).nonzero().flatten().tolist():
        row = logits[offset]
        gap = row[best_token(wanted, offset)] - row[ours[offset]]
        if gap > tolerance.near_tie * row.abs().max():
            return False
    return True


def to_cpu(step: Step) -> Step:
    """The step with everything on the CPU, floats as float32."""
    values = {
        stage: value.to("cpu", torch.float32) if value.is_floating_point() else value.cpu()
        for stage, value in step.values.items()
    }
    return Step(step.prompt, values, step.columns)
