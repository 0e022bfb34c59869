"""Why a stage differs: each known fault is computed from the right inputs and compared with what
was found, so a cause is named only if it reproduces the difference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_kit import variants
from domino_kit.draft_contract import explain_layer_ids
from domino_kit.modeling import DominoDraft
from domino_kit.parity import StageResult, best_token
from domino_kit.target import Target, TargetEnds
from domino_kit.trace import LOGIT_STAGES, Step

MATCH = 2e-3
"""A hypothesis explains a stage if it leaves less than this, relative to each row's largest value."""

Hypothesis = tuple[str, str, Tensor]
"""A cause's name, its sentence, and the stage as that cause would make it."""


@dataclass(frozen=True)
class Case:
    """One step that differs at one stage; all stages before agree."""

    stage: str
    path: str
    found: Step
    wanted: Step
    model: DominoDraft
    target: TargetEnds
    prompt_tokens: int
    place: int | None
    cached_prefix: int = 0

    @classmethod
    def of(
        cls,
        result: StageResult,
        model: DominoDraft,
        target: TargetEnds,
        prompt_tokens: int,
        cached_prefix: int = 0,
    ) -> "Case":
        """From the result of a comparison that differs."""
        assert result.found is not None and result.wanted is not None, "nothing differs"
        return cls(
            result.stage, result.path, result.found, result.wanted, model, target, prompt_tokens,
            result.worst.place, cached_prefix,
        )  # fmt: skip

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """The stage as found and as wanted."""
        return self.found.values[self.stage], self.wanted.values[self.stage]


@dataclass(frozen=True)
class Cause:
    """What is wrong: a short name for programs and a sentence for people."""

    name: str
    text: str
    stage: str
    path: str

    @property
    def sentence(self) -> str:
        """Stage, path and cause in one line."""
        return f"{self.path} differs at {self.stage}: {self.text}"


@torch.no_grad()
def explain(case: Case) -> Cause:
    """The first known cause that reproduces the difference, or an honest "unknown"."""
    name, text = _by_stage(case)
    return Cause(name, text, case.stage, case.path)


def _by_stage(case: Case) -> tuple[str, str]:
    special: dict[str, Callable[[Case], tuple[str, str] | None]] = {
        "text": _text,
        "features": _features,
        "context_keys": _context,
        "context_values": _context,
        "block_ids": _block_ids,
        "block_positions": _block_positions,
        "block_embeds": _block_embeds,
        "proposals": _proposals,
        "target_argmax": _target,
        "accepted_run": _target,
    }
    known = special[case.stage](case) if case.stage in special else None
    if known is not None:
        return known
    found = case.pair[0]
    for name, text, predicted in _hypotheses(case):
        if case.stage in LOGIT_STAGES and case.found.columns is not None:
            predicted = predicted[:, case.found.columns.to(predicted.device)]
        if matches(found, predicted[: len(found)]):
            return name, text
    if looks_rounded(*case.pair):
        return "rounding", (
            "all values are slightly off, as after rounding: weights or arithmetic are not in the "
            "reference's dtype (bfloat16, or quantised on load)"
        )
    return "unknown", (
        f"no known fault gives these values (from index {case.place} on); compare the code of this "
        "stage"
    )


def matches(found: Tensor, predicted: Tensor) -> bool:
    """Whether a hypothesis reproduces what was found, row by row; NaN rows say nothing."""
    if found.shape != predicted.shape:
        return False
    found, predicted = found.float(), predicted.to(found.device).float()
    rows = found.reshape(-1, found.shape[-1])
    others = predicted.reshape(-1, found.shape[-1])
    seen = ~(rows.isnan().any(-1) | others.isnan().any(-1))
    gap = (rows - others).abs().amax(-1)[seen]
    scale = others.abs().amax(-1)[seen].clamp(min=1e-30)
    return bool(seen.any()) and bool((gap <= MATCH * scale).all())


def looks_rounded(found: Tensor, wanted: Tensor) -> bool:
    """Whether most rows are off by a little, and none by much."""
    if found.shape != wanted.shape or not found.is_floating_point():
        return False
    found, wanted = (x.float().reshape(-1, x.shape[-1]) for x in (found, wanted))
    gap = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)
    gap = gap[~gap.isnan()]
    return bool(len(gap)) and bool((gap < 0.2).all()) and bool(gap.median() > 1e-5)


def _hypotheses(case: Case) -> Iterator[Hypothesis]:
    if case.stage == "context":
        yield from variants.contexts(case.model, case.wanted)
    elif case.stage == "hidden":
        yield from variants.hidden_rows(case.model, case.target, case.wanted)
    elif case.stage == "base_logits":
        yield from variants.base_logits(case.model, case.target, case.wanted)
    elif case.stage == "gru_states":
        yield from variants.gru_states(case.model, case.target, case.wanted)
    elif case.stage == "corrected_logits":
        yield from variants.corrected_logits(case.model, case.target, case.wanted)


# -- stages with causes of their own kind -----------------------------------------------------------


def _text(case: Case) -> tuple[str, str]:
    return "text", "other tokens were committed, so the target itself answered otherwise"


def _features(case: Case) -> tuple[str, str] | None:
    found, _ = case.pair
    assert isinstance(case.target, Target), "features of two paths differ only where it is run"
    ids, normed = variants.identify_layers(case.target, case.wanted, found, matches)
    wanted = list(case.model.config.target_layer_ids)
    if normed:
        return "post_norm", (
            "the last layer's output was taken after the target's final norm; it is trained and "
            "served before it"
        )
    layers = [i for i in ids if i is not None]
    if len(layers) == len(ids) and layers != wanted:
        name = "layer_order" if sorted(layers) == sorted(wanted) else "layer_ids"
        return name, (
            f"these are the outputs of target layers {layers}, not {wanted}: "
            f"{explain_layer_ids(layers, wanted)}"
        )
    for name, text, predicted in variants.features(case.wanted):
        if matches(found, predicted):
            return name, text
    window = variants.sliding_window(case.target)
    if window is not None and case.place is not None and case.place >= window:
        return "sliding_window", (
            f"equal up to position {case.place - 1} and different beyond: a sliding window of "
            f"{window} is applied on one side and not on the other"
        )
    return "target", (
        f"the target computes other hidden states from position {case.place} on: its weights, its "
        "config or its dtype are not those of the reference"
    )


def _context(case: Case) -> tuple[str, str] | None:
    stale = _stale_positions(case)
    if stale is not None:
        return stale
    for name, text, predicted in variants.context_keys(case.model, case.target, case.wanted):
        if matches(case.found.values["context_keys"], predicted):
            return name, text
    return None


def _stale_positions(case: Case) -> tuple[str, str] | None:
    """Positions whose values are wrong too, while others are right: the cache, not the arithmetic."""
    if "context_values" not in case.found.values:
        return None
    found, wanted = (s.values["context_values"].flatten(1) for s in (case.found, case.wanted))
    if found.shape != wanted.shape:
        return None
    scale = wanted.abs().amax(1).clamp(min=1e-30)
    wrong = ((found - wanted).abs().amax(1) > MATCH * scale).nonzero().flatten().tolist()
    if not wrong or len(wrong) == len(wanted):
        return None
    if max(wrong) < case.cached_prefix:
        return "stale_prefix", (
            f"the draft's cache is stale at positions {wrong[0]} to {wrong[-1]}, which came from "
            f"the prefix cache ({case.cached_prefix} tokens): target and draft entries got apart"
        )
    if min(wrong) >= case.prompt_tokens:
        return "cache_not_advanced", (
            f"the draft's cache is wrong at positions {wrong[:6]}, all of them generated: it was not "
            "advanced after a step that rejected drafts"
        )
    return "cache", f"the draft's cache holds something else at positions {wrong[:6]}"


def _block_ids(case: Case) -> tuple[str, str]:
    found, wanted = case.pair
    if len(found) != len(wanted):
        return "block_size", (
            f"the block has {len(found)} rows, trained were {len(wanted)}: its backbone sees other "
            "rows, and acceptance drops"
        )
    if found[0] != wanted[0]:
        return "anchor_token", f"row 0 holds token {int(found[0])}, not the anchor {int(wanted[0])}"
    masks = sorted(set(found[1:].tolist()))
    return "mask_token_id", (
        f"the block is filled with token {masks[0] if len(masks) == 1 else masks}, in training it "
        f"was the mask {int(wanted[-1])}"
    )


def _block_positions(case: Case) -> tuple[str, str]:
    found, wanted = case.pair
    shift = (found - wanted).unique().tolist() if found.shape == wanted.shape else []
    if len(shift) == 1:
        return "anchor_positions", (
            f"all positions are off by {shift[0]:+d}: row 0 must sit at the anchor's own position"
        )
    return "block_positions", f"the rows sit at {found.tolist()}, not {wanted.tolist()}"


def _block_embeds(case: Case) -> tuple[str, str] | None:
    found, wanted = case.pair
    if matches(found, wanted.bfloat16()) and torch.equal(found, wanted.bfloat16().float()):
        return "embeds_rounded", (
            "the block's embeddings are rounded to bfloat16 on the way in; they are the target's "
            "rows in its own dtype"
        )
    factor = float((found * wanted).sum() / wanted.square().sum().clamp(min=1e-30))
    if matches(found, wanted * factor):
        return "embeds_scaled", (
            f"the block's embeddings are multiplied by {factor:.4g}; they are raw rows"
        )
    if matches(found[:1], wanted[:1]):
        return "mask_row", "only the mask rows differ: the mask's embedding is not the target's row"
    return "embedding", "these are not rows of the target's embedding"


def _proposals(case: Case) -> tuple[str, str]:
    found, _ = case.pair
    offset = case.place or 0
    best = best_token(case.wanted, offset)
    logits = case.wanted.values.get("corrected_logits", case.wanted.values["base_logits"])
    base = case.wanted.values["base_logits"]
    if case.wanted.columns is None and offset > 0:
        size = variants.pool_size(base, logits[offset], int(found[offset]), best)
        if size is not None:
            return "candidate_pool", (
                f"proposals are limited to a pool of about {size} candidates; measurements use the "
                "whole vocabulary (pool 0)"
            )
    return "choice", (
        f"logits agree, but offset {offset + 1} proposes {int(found[offset])} where the best token "
        f"is {best}"
    )


def _target(case: Case) -> tuple[str, str]:
    return "verification", (
        "everything drafted agrees, but the target verifies otherwise: its logits, the accept rule "
        "or the cache of the verify pass differ"
    )
