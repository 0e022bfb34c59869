"""Measuring drafts on prompts: plain decoding, replay and decode, as the runs of one report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_kit.acceptance import Acceptance, histogram
from domino_kit.checkpoint import load_draft
from domino_kit.config import resolve_folder
from domino_kit.contract import PROMPT_FACTS
from domino_kit.decoding import Answer, Sampling, generate
from domino_kit.eval.positions import positions_table
from domino_kit.eval.prompt_set import Prompt
from domino_kit.manifest import matrix_hashes
from domino_kit.modeling import DominoDraft
from domino_kit.replay import KnownAnswer, replay
from domino_kit.target import Target
from domino_kit.target_contract import check_loaded, check_prompts, compare_files, target_files

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A draft to measure, with its head or with the head off."""

    name: str
    model: DominoDraft
    target: Target
    use_head: bool = True

    @property
    def head(self) -> str:
        """``domino``, ``off`` or ``none``."""
        if not self.model.config.has_head:
            return "none"
        return "domino" if self.use_head else "off"


@dataclass(frozen=True)
class Task:
    """What every candidate is measured on: the same prompts, lengths and proposals.

    ``bucket`` is the width of the report's position buckets, ``None`` powers of two. Prompts are
    replayed ``replay_batch`` at a time.
    """

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    max_new_tokens: int
    end_tokens: list[int]
    num_proposals: int
    batch_size: int
    sampling: Sampling
    seed: int = 0
    bucket: int | None = None
    replay_batch: int = 32


def load_candidates(
    draft: str,
    compare: Sequence[str],
    target_name: str,
    hf_model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    thinking: bool | None,
    allow: Sequence[str],
    say: Say,
) -> list[Candidate]:
    """Load the draft and what it is compared with (``off``: the same draft, head off).

    Raises ``ValueError`` if a draft was trained for another target or does not fit this one, except
    for the facts named by ``allow``.
    """
    weight = hf_model.get_input_embeddings().weight
    files = target_files(target_name, hf_model.config, tokenizer)
    messages = [prompt.messages for prompt in prompts]
    candidates: list[Candidate] = []
    hashes: dict[str, str] = {}
    for source in [draft, *compare]:
        if source == "off":
            first = candidates[0]
            if not first.model.config.has_head:
                raise ValueError(f"--compare off needs a draft with a head; {draft} has none.")
            candidates.append(Candidate(first.name, first.model, first.target, use_head=False))
            continue
        contract, config, manifest = compare_files(resolve_folder(source), files)
        if manifest is not None and config is not None and not contract.errors:
            target = Target(hf_model, list(config.target_layer_ids), allow_last_layer=True)
            hashes = hashes or matrix_hashes(target)
            check_loaded(contract, manifest.target, target_name, hashes)
        check_prompts(contract, manifest, tokenizer, messages, thinking)
        contract.only_warn(PROMPT_FACTS)  # what is measured here may well be just that
        contract.allow(allow)
        for warning in contract.warnings:
            say(f"warning: draft {source}: {warning.message}")
        contract.stop()
        model, _ = load_draft(source, weight.dtype, str(weight.device))
        target = Target(hf_model, list(model.config.target_layer_ids), allow_last_layer=True)
        candidates.append(Candidate(_name(source, candidates), model, target))
    return candidates


def short_name(source: str) -> str:
    """A short name for tables: the draft's folder."""
    folder = Path(source).expanduser().resolve()
    return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("step-") else folder.name


def _name(source: str, candidates: list[Candidate]) -> str:
    """The short name, or the whole path where that is taken."""
    name = short_name(source)
    return source if name in {candidate.name for candidate in candidates} else name


def equal_proposals(candidates: list[Candidate], wanted: int | None) -> int:
    """The same number of proposals for every candidate: the wanted one, or the smallest block's.

    Raises ``ValueError`` if a draft cannot propose that many.
    """
    least = min(candidate.model.config.num_proposals for candidate in candidates)
    if wanted is not None and not 1 <= wanted <= least:
        raise ValueError(
            f"{wanted} proposals a step (--num-proposals, or what a server drafts) are too many: "
            f"these drafts allow 1 to {least}."
        )
    return wanted or least


def check_lengths(task: Task, candidates: list[Candidate]) -> None:
    """Raise ``ValueError`` if an answer could outgrow a draft's or the target's positions."""
    longest = max(len(ids) for ids in task.prompt_ids)
    for candidate in candidates:
        config = candidate.model.config
        needed = longest + task.max_new_tokens + config.block_size
        limit = min(
            config.max_position_embeddings,
            int(candidate.target.text_config.max_position_embeddings),
        )
        if needed > limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens; with --max-new-tokens "
                f"{task.max_new_tokens} and a block it needs {needed} positions, and draft "
                f"{candidate.name} or its target has {limit}. Lower --max-new-tokens or drop it."
            )


def decode_all(
    task: Task, target: Target, model: DominoDraft | None, use_head: bool, say: Say
) -> tuple[list[Answer], float]:
    """All answers in batches, and the tokens per second of the whole."""
    answers: list[Answer] = []
    generator = torch.Generator(target.device).manual_seed(task.seed)
    started = time.perf_counter()
    for start in range(0, len(task.prompt_ids), task.batch_size):
        answers += generate(
            target,
            model,
            task.prompt_ids[start : start + task.batch_size],
            task.max_new_tokens,
            task.end_tokens,
            num_proposals=None if model is None else task.num_proposals,
            use_head=use_head,
            sampling=task.sampling,
            generator=generator,
        )
        say(f"{len(answers)} of {len(task.prompt_ids)} answers")
    seconds = time.perf_counter() - started
    return answers, sum(len(answer.tokens) for answer in answers) / seconds


def measure(
    task: Task, candidates: list[Candidate], modes: Sequence[str], say: Say
) -> dict[str, Any]:
    """Every candidate in every mode; returns the report's ``runs`` and ``lossless``.

    ``lossless`` lists, for greedy decoding, the ids of prompts whose answer differed from plain
    decoding (none in float32). Replay needs greedy sampling.
    """
    assert task.sampling.greedy or "replay" not in modes, "replay needs greedy answers"
    say("plain decoding")
    plain, baseline = decode_all(task, candidates[0].target, None, False, say)
    texts = [KnownAnswer(p, a.tokens) for p, a in zip(task.prompt_ids, plain, strict=True)]
    runs: list[dict[str, Any]] = []
    different: list[str] = []
    for candidate in candidates:
        for mode in modes:
            name = f"{candidate.name} (head {candidate.head})"
            say(f"{name}: {mode}")
            speed = None
            if mode == "replay":
                accepted = replay(
                    candidate.target, candidate.model, texts,
                    num_proposals=task.num_proposals, use_head=candidate.use_head,
                    batch_size=task.replay_batch,
                )  # fmt: skip
            else:
                answers, speed = decode_all(
                    task, candidate.target, candidate.model, candidate.use_head, say
                )
                accepted = [answer.accepted_runs for answer in answers]
                if task.sampling.greedy:
                    different += [f"{name}: {key}" for key in _different(task, answers, plain)]
            runs.append(
                run_entry(
                    task,
                    draft=candidate.name,
                    head=candidate.head,
                    mode=mode,
                    block_size=candidate.model.config.block_size,
                    num_proposals=task.num_proposals,
                    histograms=[histogram(each, task.num_proposals) for each in accepted],
                    accepted=list(accepted),
                    speed=speed,
                    baseline=baseline,
                )
            )
    lossless = {"checked": task.sampling.greedy and "decode" in modes, "different": different}
    return {"runs": runs, "lossless": lossless, "answers": [answer.tokens for answer in plain]}


def _different(task: Task, answers: list[Answer], plain: list[Answer]) -> list[str]:
    """Ids of the prompts whose answers are not the same."""
    triples = zip(task.prompts, answers, plain, strict=True)
    return [prompt.prompt_id for prompt, ours, own in triples if ours.tokens != own.tokens]


def run_entry(
    task: Task,
    *,
    draft: str,
    head: str,
    mode: str,
    block_size: int,
    num_proposals: int,
    histograms: Sequence[list[int] | None],
    accepted: Sequence[list[int] | None],
    speed: float | None,
    baseline: float | None,
) -> dict[str, Any]:
    """One run of the report: a draft in a mode, over all prompts.

    ``histograms`` has steps by accepted drafts for each prompt, ``accepted`` the run of each step;
    ``None`` where an engine's counters leave it open.
    """
    sizes = [len(ids) for ids in task.prompt_ids]
    return {
        "draft": draft,
        "head": head,
        "mode": mode,
        "block_size": block_size,
        "num_proposals": num_proposals,
        **summary(_total(histograms, num_proposals)),
        "uncounted_requests": sum(each is None for each in histograms),
        "tokens_per_second": speed,
        "baseline_tokens_per_second": baseline,
        "categories": _categories(task, histograms, num_proposals),
        "positions": positions_table(
            list(zip(sizes, accepted, strict=True)), num_proposals, task.bucket
        ),
        "prompts": [
            {
                "id": prompt.prompt_id,
                "category": prompt.category,
                "accepted_runs": runs,
                "histogram": counts,
            }
            for prompt, runs, counts in zip(task.prompts, accepted, histograms, strict=True)
        ],
    }


def _total(histograms: Sequence[list[int] | None], num_proposals: int) -> Acceptance:
    counts = [0] * (num_proposals + 1)
    for each in histograms:
        if each is not None:
            counts = [total + count for total, count in zip(counts, each, strict=True)]
    return Acceptance(tuple(counts))


def summary(stats: Acceptance) -> dict[str, Any]:
    """The numbers of a set of steps, each under its own name."""
    return {
        "accept_length": stats.accept_length,
        "accepted_drafts_per_step": stats.accepted_drafts_per_step,
        "accept_rate": stats.accept_rate,
        "verify_steps": stats.verify_steps,
        "histogram": list(stats.counts),
        "marginal_acceptance": stats.marginal,
        "conditional_acceptance": stats.conditional,
    }


def _categories(
    task: Task, histograms: Sequence[list[int] | None], num_proposals: int
) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[list[int] | None]] = {}
    for prompt, counts in zip(task.prompts, histograms, strict=True):
        groups.setdefault(prompt.category, []).append(counts)
    return {name: summary(_total(group, num_proposals)) for name, group in sorted(groups.items())}
