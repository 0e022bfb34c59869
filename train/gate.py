"""The training-time gate: a written checkpoint must do what the training graph did."""

from collections.abc import Sequence
from pathlib import Path

import torch

from domino_kit.causes import Case, explain
from domino_kit.checkpoint import load_draft, write_whole
from domino_kit.draft_contract import check_draft
from domino_kit.manifest import MANIFEST_NAME, TRACE_NAME, library_versions, read_manifest
from domino_kit.parity import ParityError, compare_paths, first_difference, to_cpu, tolerance_for
from domino_kit.paths import decode_steps, replay_steps
from domino_kit.trace import Step, reduce_columns, save_steps, spread
from domino_kit.train.dataset import Sample
from domino_kit.train.graph import graph_steps
from domino_kit.train.setup import Run

PROMPT_TOKENS = 128
ANSWER_TOKENS = 24
RECORDED_STEPS = 4


def check_checkpoint(run: Run, folder: Path) -> None:
    """Check a checkpoint's files, then one prompt stage by stage: graph, replay, decode.

    The graph's trace is kept beside the weights: it is what `domino check` later compares with.
    The manifest says whether this passed. Raises :class:`ParityError` with the first stage that
    differs and its cause.
    """
    said = _disagreement(run, folder)
    manifest = read_manifest(folder)
    assert manifest is not None, "training writes one"
    manifest = manifest.model_copy(update={"gate": "passed" if said is None else f"failed: {said}"})
    write_whole(folder / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
    if said is not None:
        raise ParityError(f"checkpoint {folder} is not what was trained: {said}")


def _disagreement(run: Run, folder: Path) -> str | None:
    contract, _, _ = check_draft(folder)
    if contract.errors:
        return contract.errors[0].message
    dtype = run.target.embedding.weight.dtype
    model, _ = load_draft(folder, dtype, str(run.target.device))
    prompt, known = _prompt(run.samples)
    paths: dict[str, Sequence[Step]] = {}
    try:
        answer, steps = decode_steps(
            run.target, model, "train", prompt, ANSWER_TOKENS, run.end_tokens
        )
        known, anchors = answer.tokens, [step.anchor for step in steps]
        paths["decode"] = steps
    except ValueError:  # a target that cannot take tokens back: its rows stand for answers
        anchors = list(range(len(prompt), len(prompt) + len(known) - 1))
    if not anchors:
        return None  # the answer ends with its first token: nothing was drafted
    paths["replay"] = replay_steps(run.target, model, "train", prompt, known, anchors)
    graph = [to_cpu(step) for step in graph_steps(model, run.target, paths["replay"])]
    tolerance = tolerance_for([str(dtype).removeprefix("torch.")])
    found = {name: ([to_cpu(step) for step in steps], tolerance) for name, steps in paths.items()}
    wrong = first_difference(compare_paths(graph, found, run.target.hidden_size))
    _record(run, folder, graph, dtype)
    if wrong is None:
        return None
    return explain(Case.of(wrong, model, run.target, len(prompt))).sentence


def _prompt(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Prompt and answer of the row whose prompt is nearest to :data:`PROMPT_TOKENS` long."""
    starts = [max(1, sample.loss_mask.index(1)) for sample in samples]
    place = min(range(len(samples)), key=lambda i: abs(starts[i] - PROMPT_TOKENS))
    ids, start = samples[place].input_ids, starts[place]
    return ids[:start][-2 * PROMPT_TOKENS :], ids[start : start + ANSWER_TOKENS]


def _record(run: Run, folder: Path, graph: list[Step], dtype: torch.dtype) -> None:
    """Keep a few of the graph's steps: the first, the last, and some between."""
    facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": run.target.device.type,
        **{f"library.{name}": version for name, version in library_versions().items()},
    }
    kept = [reduce_columns(step) for step in spread(graph, RECORDED_STEPS)]
    save_steps(folder / TRACE_NAME, kept, facts)
