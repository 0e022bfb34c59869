"""The stage trace: what every stage of a draft-verify step computed, in one form from every path.

Training graph, replay, decode and server write the same record of a step, so two of them can be
compared stage by stage; the first stage that differs is the one that is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Record = dict[str, Tensor]
"""Tensors by stage, as a path computed them: with a leading batch axis where it has one."""

STAGES = (
    "text",  # [a+1] committed tokens, the anchor last
    "features",  # [a, layers*D] the target's, of the positions before the anchor
    "context",  # [a, D] hidden_norm(fc(features))
    "context_keys",  # [a, draft layers, kv_heads, head_dim] as the block reads them
    "context_values",  # the same
    "block_ids",  # [K]
    "block_positions",  # [K]
    "block_embeds",  # [K, D]
    "hidden",  # [K, D] normed backbone rows
    "base_logits",  # [n, V] by offset 1 … n
    "gru_states",  # [n, G] the state that has consumed the anchor and offset-1 proposals
    "corrected_logits",  # [n, V]
    "proposals",  # [n]
    "target_argmax",  # [n+1] the target's choice after the anchor and each proposal
    "accepted_run",  # [1]
)
LOGIT_STAGES = ("base_logits", "corrected_logits")
RECORD_COLUMNS = 1024
"""Columns of the logits that a trace beside a checkpoint keeps: whole rows would be megabytes."""


@dataclass(frozen=True)
class Step:
    """One step of one prompt. ``values`` holds the stages that this path shows.

    Rows of positions that a path did not compute (a prefix found in a cache) are NaN. ``columns``
    names the vocabulary ids that the logits hold, or is ``None`` for all.
    """

    prompt: str
    values: Record
    columns: Tensor | None = None

    @property
    def anchor(self) -> int:
        """The anchor's position."""
        return len(self.values["text"]) - 1

    @property
    def key(self) -> tuple[str, int]:
        """Which step this is, on every path."""
        return self.prompt, self.anchor


def context_record(layers: Sequence[tuple[Tensor, Tensor]]) -> Record:
    """Context keys and values ``[B, a, layers, kv_heads, head_dim]`` of ``layers`` as caches hold them.

    Each layer has keys and values ``[B, kv_heads, a, head_dim]``.
    """
    return {
        "context_keys": torch.stack([keys.transpose(1, 2) for keys, _ in layers], dim=2),
        "context_values": torch.stack([values.transpose(1, 2) for _, values in layers], dim=2),
    }


def pick(record: Record, row: int) -> Record:
    """One row of the batch of a record."""
    return {stage: values[row] for stage, values in record.items()}


def assemble(prompt: str, text: Sequence[int], records: Sequence[Record]) -> list[Step]:
    """Steps of one decoded prompt from the records of its path.

    ``text`` is prompt and answer. Each record is one step's and has, besides its stages (no batch
    axis), ``anchor`` (its position) and the features and context of the ``positions`` that were
    computed since the last step. A position that is computed again, since its token was rejected,
    replaces the old one.
    """
    known: Record = {}
    steps = []
    for record in records:
        anchor = int(record["anchor"])
        values: Record = {"text": torch.tensor(text[: anchor + 1])}
        for stage in ("features", "context"):
            if stage in record:
                known[stage] = _place(known.get(stage), record[stage], record["positions"])
                values[stage] = _exactly(known[stage], anchor)
        values |= {
            stage: record[stage]
            for stage in STAGES
            if stage in record and stage not in ("features", "context", "text")
        }
        steps.append(Step(prompt, {stage: values[stage] for stage in STAGES if stage in values}))
    return steps


def _place(known: Tensor | None, rows: Tensor, positions: Tensor) -> Tensor:
    """A copy of ``known [S, …]``, grown with NaN where needed, with ``rows`` at ``positions``."""
    before = 0 if known is None else len(known)
    size = max([before, *(positions + 1).tolist()])
    grown = rows.new_full((size, *rows.shape[1:]), torch.nan, dtype=torch.float32)
    if known is not None:
        grown[:before] = known
    grown[positions] = rows.float()
    return grown


def _exactly(rows: Tensor, length: int) -> Tensor:
    missing = rows.new_full((max(0, length - len(rows)), *rows.shape[1:]), torch.nan)
    return torch.cat([rows[:length], missing])


def spread(steps: Sequence[Step], count: int) -> list[Step]:
    """At most ``count`` steps: the first, the last, and evenly between."""
    if len(steps) <= count:
        return list(steps)
    places = torch.linspace(0, len(steps) - 1, count).round().long().tolist()
    return [steps[place] for place in places]


# -- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How one stage of one step differs: largest absolute and relative difference over rows.

    Relative is to the largest value of the same row, where a row is one vector (a position, a
    layer, a head). ``place`` is the first index of the stage's first axis (a position, a block row
    or an offset - 1) that is out of tolerance, ``None`` if none is. ``shape`` says that even the
    shapes differ.
    """

    stage: str
    absolute: float
    relative: float
    place: int | None
    shape: bool = False

    @property
    def agrees(self) -> bool:
        """Within the tolerance."""
        return self.place is None and not self.shape


def compare_stage(
    stage: str, found: Step, wanted: Step, tolerance: float, width: int
) -> Difference:
    """The difference of one stage that both steps have.

    ``width`` is the length of a row of features (D), which are several layers side by side.
    Integers must be equal; NaN rows of either side are left out.
    """
    ours, theirs = _common_columns(stage, found, wanted)
    if ours.shape != theirs.shape:
        return Difference(stage, torch.inf, torch.inf, None, shape=True)
    if not theirs.is_floating_point():
        apart = (ours != theirs).flatten(1).any(1) if ours.dim() > 1 else ours != theirs
        size = float((ours - theirs).abs().max()) if ours.numel() else 0.0
        return Difference(stage, size, size, _first(apart))
    row = width if stage == "features" else theirs.shape[-1]
    ours, theirs = (x.float().reshape(len(x), -1, row) for x in (ours, theirs))
    absent = ours.isnan().any(-1) | theirs.isnan().any(-1)
    gap = (ours - theirs).abs().amax(-1).masked_fill(absent, 0.0)
    scale = theirs.abs().amax(-1).nan_to_num().clamp(min=1e-30)
    relative = gap / scale
    if not relative.numel():
        return Difference(stage, 0.0, 0.0, None)
    place = _first((relative > tolerance).any(-1))
    return Difference(stage, float(gap.max()), float(relative.max()), place)


def _common_columns(stage: str, found: Step, wanted: Step) -> tuple[Tensor, Tensor]:
    ours, theirs = found.values[stage], wanted.values[stage]
    if stage in LOGIT_STAGES and (found.columns is None) != (wanted.columns is None):
        if found.columns is None and wanted.columns is not None:
            ours = ours[:, wanted.columns]
        elif found.columns is not None:
            theirs = theirs[:, found.columns]
    return ours, theirs


def _first(apart: Tensor) -> int | None:
    places = apart.nonzero().flatten()
    return int(places[0]) if len(places) else None


# -- files ---------------------------------------------------------------------------------------


def reduce_columns(step: Step) -> Step:
    """The step with evenly spaced columns of its logits only."""
    size = step.values["base_logits"].shape[-1]
    columns = torch.linspace(0, size - 1, min(size, RECORD_COLUMNS)).round().long().unique()
    values = {
        stage: value[:, columns] if stage in LOGIT_STAGES else value
        for stage, value in step.values.items()
    }
    return Step(step.prompt, values, columns)


def save_steps(path: Path, steps: Sequence[Step], facts: dict[str, str]) -> None:
    """Write steps and a few facts about them as safetensors, whole or not at all."""
    tensors: Record = {}
    for number, step in enumerate(steps):
        values = dict(step.values)
        if step.columns is not None:
            values["columns"] = step.columns
        tensors |= {f"{number}.{stage}": value.clone() for stage, value in values.items()}
    names = {f"{number}.prompt": step.prompt for number, step in enumerate(steps)}
    fresh = path.with_name(f".{path.name}.new")
    save_file(tensors, fresh, metadata={**facts, **names, "steps": str(len(steps))})
    fresh.replace(path)


def load_steps(path: Path) -> tuple[list[Step], dict[str, str]]:
    """Steps and facts of :func:`save_steps`; raises ``ValueError`` naming a file that is no trace."""
    try:
        with safe_open(path, framework="pt") as reader:
            facts = dict(reader.metadata() or {})
            count = int(facts.pop("steps"))
            values: list[Record] = [{} for _ in range(count)]
            for name in reader.keys():  # noqa: SIM118  (not a dict)
                number, _, stage = name.partition(".")
                values[int(number)][stage] = reader.get_tensor(name)
            prompts = [facts.pop(f"{number}.prompt") for number in range(count)]
    except (SafetensorError, OSError, KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable stage trace ({error}); delete it.") from None
    steps = []
    for prompt, each in zip(prompts, values, strict=True):
        columns = each.pop("columns", None)
        steps.append(Step(prompt, each, columns))
    return steps, facts
