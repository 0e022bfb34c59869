"""The training-time gate: a written checkpoint must do what the training graph did."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from domino_kit.causes import Case, explain
from domino_kit.checkpoint import load_draft, write_whole
from domino_kit.draft_contract import check_draft
from domino_kit.manifest import MANIFEST_NAME, TRACE_NAME, library_versions, read_manifest
from domino_kit.modeling import DominoDraft
from domino_kit.parity import ParityError, compare_paths, first_difference, to_cpu, tolerance_for
from domino_kit.paths import decode_steps, feature_steps, replay_steps
from domino_kit.target import Target
from domino_kit.trace import Step, reduce_columns, save_steps, spread
from domino_kit.train.dataset import Sample, collate
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.graph import graph_steps, known_row
from domino_kit.train.setup import Run

PROMPT_TOKENS = 128
ANSWER_TOKENS = 24
RECORDED_STEPS = 4


WITHOUT_TARGET = (
    "only the target's ends were in process (target.load=ends): training graph and replay were "
    "compared on features as training reads them, but not decoding, nor the target's own features "
    "and choices"
)
"""What is said of a checkpoint whose target could not be run."""


def check_checkpoint(run: Run, folder: Path, source: FeatureSource) -> None:
    """Check a checkpoint's files, then one prompt stage by stage: graph, replay, decode.

    Where the target cannot be run, a row of the data takes the place of its answer, and ``source``
    gives the features. The graph's trace is kept beside the weights: it is what `domino check`
    later compares with. The manifest says whether this passed, and what it lacked. Raises
    :class:`ParityError` with the first stage that differs and its cause.
    """
    said = _disagreement(run, folder, source)
    manifest = read_manifest(folder)
    assert manifest is not None, "training writes one"
    update = {
        "gate": "passed" if said is None else f"failed: {said}",
        "gate_lacks": WITHOUT_TARGET if run.whole_target is None else None,
    }
    manifest = manifest.model_copy(update=update)
    write_whole(folder / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
    if said is not None:
        raise ParityError(f"checkpoint {folder} is not what was trained: {said}")


@dataclass(frozen=True)
class _Traced:
    """One prompt's steps by path, and the training graph's."""

    prompt_tokens: int
    paths: dict[str, Sequence[Step]]
    graph: list[Step]


def _disagreement(run: Run, folder: Path, source: FeatureSource) -> str | None:
    contract, _, _ = check_draft(folder)
    if contract.errors:
        return contract.errors[0].message
    dtype = run.target.embedding.weight.dtype
    model, _ = load_draft(folder, dtype, str(run.target.device))
    whole = run.whole_target
    traced = _from_source(run, model, source) if whole is None else _from_target(run, model, whole)
    if not traced.graph:
        return None  # the answer ends with its first token: nothing was drafted
    tolerance = tolerance_for([str(dtype).removeprefix("torch.")])
    graph = [to_cpu(step) for step in traced.graph]
    found = {
        name: ([to_cpu(step) for step in steps], tolerance) for name, steps in traced.paths.items()
    }
    wrong = first_difference(compare_paths(graph, found, run.target.hidden_size))
    _record(run, folder, graph, dtype)
    if wrong is None:
        return None
    return explain(Case.of(wrong, model, run.target, traced.prompt_tokens)).sentence


def _from_target(run: Run, model: DominoDraft, target: Target) -> _Traced:
    """The target's own answer to a prompt of the data: decoded, replayed and from the graph."""
    sample, start = _row(run.samples)
    prompt = sample.input_ids[:start][-2 * PROMPT_TOKENS :]
    known = sample.input_ids[start : start + ANSWER_TOKENS]
    paths: dict[str, Sequence[Step]] = {}
    try:
        answer, steps = decode_steps(target, model, "train", prompt, ANSWER_TOKENS, run.end_tokens)
        known, anchors = answer.tokens, [step.anchor for step in steps]
        paths["decode"] = steps
    except ValueError:  # a target that cannot take tokens back: its rows stand for answers
        anchors = list(range(len(prompt), len(prompt) + len(known) - 1))
    if not anchors:
        return _Traced(len(prompt), {}, [])
    paths["replay"] = replay_steps(target, model, "train", prompt, known, anchors)
    graph = graph_steps(model, target, encode_row(target), paths["replay"])
    return _Traced(len(prompt), paths, graph)


def _from_source(run: Run, model: DominoDraft, source: FeatureSource) -> _Traced:
    """A row of the data, with the features that training reads: replayed and from the graph."""
    sample, start = _row(run.samples)
    text = sample.input_ids[: start + ANSWER_TOKENS]
    features = source(collate([sample], run.target.device)).features[:, : len(text)]
    anchors = range(start, len(text) - 1)
    if not anchors:
        return _Traced(start, {}, [])
    steps = feature_steps(run.target, model, "train", text, features, anchors)
    graph = graph_steps(model, run.target, known_row(features[0]), steps)
    return _Traced(start, {"replay": steps}, graph)


def _row(samples: Sequence[Sample]) -> tuple[Sample, int]:
    """The row whose prompt is nearest to :data:`PROMPT_TOKENS` long, and where its answer starts."""
    starts = [max(1, sample.loss_mask.index(1)) for sample in samples]
    place = min(range(len(samples)), key=lambda i: abs(starts[i] - PROMPT_TOKENS))
    return samples[place], starts[place]


def _record(run: Run, folder: Path, graph: list[Step], dtype: torch.dtype) -> None:
    """Keep a few of the graph's steps: the first, the last, and some between."""
    facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": run.target.device.type,
        **{f"library.{name}": version for name, version in library_versions().items()},
    }
    kept = [reduce_columns(step) for step in spread(graph, RECORDED_STEPS)]
    save_steps(folder / TRACE_NAME, kept, facts)
