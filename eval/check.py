"""`domino check`: will this draft be served as it was trained, and if not, what is wrong and why."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from domino_kit.acceptance import Acceptance
from domino_kit.causes import Case, Cause, explain
from domino_kit.chat_template import prompt_ids
from domino_kit.checkpoint import load_draft
from domino_kit.config import DraftConfig, resolve_folder
from domino_kit.contract import PROMPT_FACTS, Contract, check_allowed
from domino_kit.draft_contract import check_draft, check_loaded_weights
from domino_kit.eval.check_prompts import CheckPrompt, choose_prompts, fitting_prompts
from domino_kit.eval.check_report import print_contract, print_stages, write_reports
from domino_kit.eval.check_stages import (
    Pair,
    Traces,
    add_live_contract,
    recorded_steps,
    server_with_probe,
    trace_plain,
    trace_recorded,
    trace_served,
)
from domino_kit.eval.lengths import sweep_lengths
from domino_kit.eval.options import CheckOptions
from domino_kit.manifest import Manifest, matrix_hashes, target_name, thinking_mode
from domino_kit.parity import StageResult, compare_paths, first_difference
from domino_kit.serve.confirm import read_report
from domino_kit.serve.plan import ServeOptions, ServePlan, free_port, plan_serve
from domino_kit.serve.server import ServerError
from domino_kit.target import (
    Target,
    choose_device,
    choose_dtype,
    end_token_ids,
    load_target_model,
)
from domino_kit.target_contract import (
    TargetFiles,
    check_loaded,
    check_prompts,
    check_target,
    read_target_files,
)

STRICT = ("candidate_pool", "block_size", *PROMPT_FACTS)
"""Facts that other commands only warn of, since a user may want them; here they are a mismatch."""

Say = Callable[[str], None]


@dataclass
class Outcome:
    """Everything that was found: the verdict is the contract's errors, then the first stage."""

    draft: Path
    target: str | None
    contract: Contract
    stages: list[StageResult] = field(default_factory=list)
    traces: Traces | None = None
    cause: Cause | None = None
    notes: list[str] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    lengths: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mismatch(self) -> bool:
        """Whether anything is not as in training."""
        return bool(self.contract.errors) or self.cause is not None


def run_check(options: CheckOptions) -> int:
    """Check and print; returns 0 (as trained), 1 (a mismatch) or 2 (a server could not be asked).

    Raises ``ValueError`` in one sentence for what cannot be checked at all.
    """
    console, notes = Console(markup=False, highlight=False, soft_wrap=True), Console(stderr=True)
    allowed = check_allowed(options.allow)
    for path in (options.output, options.page):
        if path is not None:  # better now than after the work
            path.parent.mkdir(parents=True, exist_ok=True)
    with notes.status("checking files") as status:
        outcome, config, manifest, files, prompts = _static(options)
        if config is not None and files is not None and not options.static:
            _strict(outcome.contract, allowed)
            if not outcome.contract.blocking:
                try:
                    _stages(options, outcome, config, manifest, files, prompts, allowed,
                            status.update)  # fmt: skip
                except ServerError as error:
                    console.print(f"could not check the server: {error}")
                    return 2
    _strict(outcome.contract, allowed)
    print_contract(outcome, console)
    print_stages(outcome, console, static=options.static)
    write_reports(outcome, options.output, options.page)
    return int(outcome.mismatch)


def _strict(contract: Contract, allowed: Sequence[str]) -> None:
    """Here a warning of :data:`STRICT` is a mismatch, unless it is allowed."""
    contract.make_errors(STRICT)
    contract.allow(allowed)


def _static(
    options: CheckOptions,
) -> tuple[Outcome, DraftConfig | None, Manifest | None, TargetFiles | None, list[CheckPrompt]]:
    """The contract over files, and the prompts that would be asked."""
    folder = resolve_folder(options.draft)
    contract, config, manifest = check_draft(folder)
    name = options.target
    if manifest is not None or not options.static:
        name = target_name(options.draft, options.target, manifest)
    outcome = Outcome(folder, name, contract)
    thinking = thinking_mode(options.thinking, manifest)
    files = None
    if name is not None:
        try:
            files = read_target_files(name, options.trust_remote_code)
        except ValueError as error:
            if not options.static:
                raise
            contract.could_not("target_config", str(error))
    prompts = choose_prompts(options.prompts, options.limit, manifest)
    if files is not None and config is not None:
        check_target(contract, config, manifest, files)
        if options.static and not getattr(files.tokenizer, "chat_template", None):
            for fact in ("thinking", "system_prompt"):
                contract.could_not(fact, "the target has no chat template")
        elif files.tokenizer is not None:
            asked = [prompt.prompt.messages for prompt in prompts]
            check_prompts(contract, manifest, files.tokenizer, asked, thinking)
            for prompt in prompts:
                prompt.ids = prompt_ids(files.tokenizer, prompt.prompt.messages, thinking)
    return outcome, config, manifest, files, prompts


def _stages(
    options: CheckOptions,
    outcome: Outcome,
    config: DraftConfig,
    manifest: Manifest | None,
    files: TargetFiles,
    prompts: list[CheckPrompt],
    allowed: Sequence[str],
    say: Say,
) -> None:
    """Load target and draft, trace every path, and compare."""
    prompts = fitting_prompts(prompts, config, files, options.max_new_tokens)
    plan = _plan(options, outcome, files.name, allowed)
    if outcome.contract.blocking:
        return
    say("loading target and draft")
    pair = _load(options, outcome, manifest, files)
    _strict(outcome.contract, allowed)
    if outcome.contract.blocking:
        return
    traces = outcome.traces = Traces()
    recorded = recorded_steps(outcome.draft)
    if recorded is None:
        outcome.notes.append("no trace was recorded in training: its stages cannot be compared")
    else:
        trace_recorded(traces, pair, recorded)
    asked = [prompt.ids for prompt in prompts]
    trace_plain(traces, pair, asked, options.max_new_tokens, say)
    if options.engine != "hf" and not _compare(outcome, pair, prompts):
        with server_with_probe(plan, options.url, say) as url:
            report = read_report(url)
            if report["draft"] is None:
                raise ServerError(f"the server at {url} runs without a draft.")
            add_live_contract(outcome.contract, report, outcome.draft)
            _strict(outcome.contract, allowed)
            if not outcome.contract.blocking:
                trace_served(traces, pair, url, report, asked, options.max_new_tokens, say)
    if outcome.contract.blocking or _compare(outcome, pair, prompts):
        return
    _compare_runs(outcome)
    _acceptance(outcome, manifest)
    if options.lengths is not None:
        outcome.lengths = sweep_lengths(
            pair.target, pair.model, files.tokenizer, [each.prompt for each in prompts],
            thinking_mode(options.thinking, manifest), options.lengths, len(prompts),
            options.max_new_tokens, pair.end_tokens, say,
        )  # fmt: skip


def _plan(
    options: CheckOptions, outcome: Outcome, target: str, allowed: Sequence[str]
) -> ServePlan | None:
    """The server to start, checked; its block is a fact of the contract."""
    if options.engine == "hf" or options.url is not None:
        return None
    trust = ("--trust-remote-code",) if options.trust_remote_code else ()
    plan = plan_serve(
        ServeOptions(
            options.draft, target, port=free_port(), device=options.device, dtype=options.dtype,
            allow=tuple(allowed), extra=(*trust, *options.extra),
        ),
        os.environ,
    )  # fmt: skip
    if plan.block_size != plan.config.block_size:
        outcome.contract.error("block_size", plan.block_note)
        outcome.contract.allow(allowed)
    return plan


def _load(
    options: CheckOptions, outcome: Outcome, manifest: Manifest | None, files: TargetFiles
) -> Pair:
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    hf_model = load_target_model(files.name, dtype, device, options.trust_remote_code)
    model, _ = load_draft(outcome.draft, dtype, device)
    target = Target(hf_model, list(model.config.target_layer_ids), allow_last_layer=True)
    if manifest is not None:
        check_loaded_weights(outcome.contract, outcome.draft, manifest, model)
        check_loaded(outcome.contract, manifest.target, files.name, matrix_hashes(target))
    ends = end_token_ids(hf_model, files.tokenizer)
    return Pair(target, model, ends)


def _compare(outcome: Outcome, pair: Pair, prompts: list[CheckPrompt]) -> bool:
    """Compare all traces so far; says whether a stage differs, with its cause kept."""
    traces = outcome.traces
    assert traces is not None
    outcome.stages = compare_paths(traces.reference, traces.paths, pair.target.hidden_size)
    wrong = first_difference(outcome.stages)
    if wrong is None:
        return False
    assert wrong.found is not None
    name = wrong.found.prompt
    first = min(step.anchor for step in traces.reference if step.prompt == name)
    sizes = {f"prompt-{place + 1}": len(each.ids) for place, each in enumerate(prompts)}
    tokens = sizes.get(name.rpartition(", ")[2], first)
    case = Case.of(wrong, pair.model, pair.target, tokens, traces.cached.get(name, 0))
    outcome.cause = explain(case)
    return True


def _compare_runs(outcome: Outcome) -> None:
    """Answers and accepted runs of all steps, of which only some were traced."""
    traces = outcome.traces
    assert traces is not None
    exact = all(tolerance.near_tie == 0 for _, tolerance in traces.paths.values())
    for path in traces.answers:
        if path == "decode" or not exact:
            continue
        for place, (ours, plain) in enumerate(
            zip(traces.answers[path], traces.answers["decode"], strict=True)
        ):
            runs = traces.runs[path][place]
            if ours != plain or (runs is not None and runs != traces.runs["decode"][place]):
                outcome.cause = Cause(
                    "runs",
                    f"prompt {place + 1}: other {'tokens' if ours != plain else 'accepted runs'} "
                    "than decode's, at a step that was not traced",
                    "accepted_run",
                    path,
                )
                return


def _acceptance(outcome: Outcome, manifest: Manifest | None) -> None:
    """Everything agrees; is acceptance far below what training's validation saw?"""
    assert outcome.traces is not None
    runs = [run for each in outcome.traces.runs["decode"] for run in each or []]
    if not runs:
        return
    stats = Acceptance.of(runs, max(runs))
    outcome.steps = {"verify_steps": stats.verify_steps, "accept_length": stats.accept_length}
    trained = None if manifest is None else manifest.measured.get("replay_accept_length")
    if trained is None:
        return
    outcome.steps["trained_accept_length"] = trained
    gained, wanted = stats.accept_length - 1, float(trained) - 1
    if stats.verify_steps >= 20 and gained < 0.5 * wanted:
        outcome.notes.append(
            f"everything computes as in training, but acceptance is {stats.accept_length:.2f} on "
            f"these prompts and was {float(trained):.2f} in training's validation: look at the data "
            "(are the answers the target's own?), the system prompt, the template, the thinking mode"
        )
