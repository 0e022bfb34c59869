"""`domino eval-acceptance`: load everything, measure, report."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from domino_kit.chat_template import prompt_ids, render
from domino_kit.config import read_config, resolve_folder
from domino_kit.contract import check_allowed
from domino_kit.decoding import Sampling
from domino_kit.eval.engine import EngineOptions, add_served, measure_served, prepare_engine
from domino_kit.eval.lengths import choose_questions, length_rows, lengthen, longest_prompt
from domino_kit.eval.measure import Task, check_lengths, equal_proposals, load_candidates, measure
from domino_kit.eval.options import Options
from domino_kit.eval.positions import verdict
from domino_kit.eval.prompt_set import Prompt, read_prompts
from domino_kit.eval.report import (
    DEFINITIONS,
    disagreements,
    print_report,
    write_json,
    write_picture,
)
from domino_kit.fingerprint import json_hash
from domino_kit.manifest import library_versions, read_manifest, target_name, thinking_mode
from domino_kit.serve.flags import read_flags, whole_number
from domino_kit.target import (
    choose_device,
    choose_dtype,
    end_token_ids,
    load_target_model,
    load_tokenizer,
)
from domino_kit.target_contract import read_target_files

MOST_NOTES = 1000
QUESTIONS = 8
"""With --lengths: prompts read for notes, and the questions asked without --limit."""


def run_evaluation(options: Options) -> int:
    """Measure and print; returns the exit status (1: results differ or acceptance is too low).

    Raises ``ValueError`` in one sentence for anything that cannot be measured.
    """
    notes = Console(stderr=True, markup=False)
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.proposals)
    for path in (options.output, options.picture):
        if path is not None:  # better now than after the measurement
            path.parent.mkdir(parents=True, exist_ok=True)
    wanted = options.limit if options.lengths is None else MOST_NOTES
    prompts = read_prompts(options.prompts, wanted)
    name, thinking = _target(options)
    device = choose_device(options.device)
    engine = None
    if options.engine != "hf":
        engine = prepare_engine(
            options.draft, name, device, options.dtype, _server(options),
            compared=options.engine == "both", warn=notes.print,
        )  # fmt: skip
    tokenizer = load_tokenizer(name, options.trust_remote_code)
    lengths: list[int] = []
    if options.lengths is not None:
        lengths, prompts = _longer(options, prompts, name, tokenizer, thinking)
    task = Task(
        prompts=prompts,
        prompt_ids=[prompt_ids(tokenizer, prompt.messages, thinking) for prompt in prompts],
        max_new_tokens=options.max_new_tokens,
        end_tokens=[],
        num_proposals=0 if engine is None else engine.block_size - 1,
        batch_size=options.batch_size,
        sampling=sampling,
        seed=options.seed,
        bucket=options.bucket,
        replay_batch=1 if lengths else 32,  # a long text fills a batch
    )
    facts = {
        "target": name,
        "thinking": thinking,
        "device": device,
        "rendered_prompts_hash": _rendered_hash(tokenizer, prompts, thinking),
    }
    with notes.status("measuring") as status:
        result: dict[str, Any] = {"runs": [], "lossless": {"checked": False, "different": []}}
        if options.engine != "sglang":
            result = _measure_hf(options, task, facts, tokenizer, notes.print, status.update)
        if engine is not None:
            served = measure_served(task, engine, status.update)
            ids = [prompt.prompt_id for prompt in prompts]
            add_served(result, served, ids, greedy=sampling.greedy)
    if lengths:
        _add_lengths(result["runs"], lengths, task.prompt_ids)
    report = {**facts, **_settings(options), **result}
    print_report(report, Console(markup=False))
    if options.output is not None:
        write_json(report, options.output)
    if options.picture is not None:
        write_picture(report, options.picture)
    return _status(report, options.min_accept_length, notes)


def _server(options: Options) -> EngineOptions:
    """The server to start or to ask."""
    trust = ("--trust-remote-code",) if options.trust_remote_code and options.url is None else ()
    extra = (*trust, *options.extra)
    return EngineOptions(
        options.concurrency, options.url, options.baseline_url, extra, options.allow
    )


def _longer(
    options: Options, prompts: list[Prompt], name: str, tokenizer: Any, thinking: bool | None
) -> tuple[list[int], list[Prompt]]:
    """The lengths to measure, and the same questions lengthened to each in turn."""
    drafts = [source for source in (options.draft, *options.compare) if source != "off"]
    configs = [read_config(resolve_folder(source) / "config.json") for source in drafts]
    drafted = min(config.max_position_embeddings for config in configs)
    target = read_target_files(name, options.trust_remote_code).text_config
    context = min(
        drafted,
        getattr(target, "max_position_embeddings", None) or drafted,
        whole_number(read_flags(options.extra), "--context-length", drafted),
    )
    block_size = max(config.block_size for config in configs)
    longest = longest_prompt(context, options.max_new_tokens, block_size)
    lengths, prompts, count = choose_questions(
        tokenizer, prompts, thinking, options.lengths or (), options.limit or QUESTIONS, longest
    )
    longer = [lengthen(tokenizer, prompts, thinking, length, count) for length in lengths]
    return lengths, [prompt for group in longer for prompt in group]


def _add_lengths(
    runs: list[dict[str, Any]], lengths: list[int], prompt_ids: list[list[int]]
) -> None:
    """Give every run its acceptance by length of the context."""
    sizes = [len(ids) for ids in prompt_ids]
    for run in runs:
        accepted = [prompt["accepted_runs"] for prompt in run["prompts"]]
        pairs = list(zip(sizes, accepted, strict=True))
        rows = length_rows(lengths, pairs, run["num_proposals"])
        run["lengths"] = {"rows": rows, "verdict": verdict(rows)}


def _measure_hf(
    options: Options,
    task: Task,
    facts: dict[str, Any],
    tokenizer: Any,
    warn: Callable[[str], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Replay and decode in plain PyTorch."""
    device = facts["device"]
    hf_model = load_target_model(
        facts["target"], choose_dtype(options.dtype, device), device, options.trust_remote_code
    )
    candidates = load_candidates(
        options.draft,
        options.compare,
        facts["target"],
        hf_model,
        tokenizer,
        task.prompts,
        facts["thinking"],
        check_allowed(options.allow),
        warn,
    )
    wanted = task.num_proposals or options.num_proposals
    task = replace(
        task,
        end_tokens=end_token_ids(hf_model, tokenizer),
        num_proposals=equal_proposals(candidates, wanted),
    )
    check_lengths(task, candidates)
    dtype = str(hf_model.dtype).removeprefix("torch.")
    result = {"dtype": dtype, **measure(task, candidates, options.modes, say)}
    del hf_model, candidates
    gc.collect()
    torch.cuda.empty_cache()  # a server that starts now needs the memory
    return result


def _target(options: Options) -> tuple[str, bool | None]:
    """The target's name and thinking mode: as given, else as the draft was trained."""
    manifest = read_manifest(resolve_folder(options.draft))
    name = target_name(options.draft, options.target, manifest)
    return name, thinking_mode(options.thinking, manifest)


def _rendered_hash(tokenizer: Any, prompts: list[Prompt], thinking: bool | None) -> str:
    return json_hash(
        [render(tokenizer, p.messages, thinking, add_generation_prompt=True) for p in prompts]
    )


def _settings(options: Options) -> dict[str, Any]:
    return {
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "engine_used": options.engine,
        "sampling": {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "proposals": options.proposals,
            "seed": options.seed,
        },
        "prompts_source": options.prompts,
        "allowed": list(options.allow),
        "libraries": library_versions(),
        "definitions": DEFINITIONS,
    }


def _status(report: dict[str, Any], min_accept_length: float | None, notes: Console) -> int:
    failed = False
    dtypes = {report["dtype"], report.get("engine", report).get("draft", report)["dtype"]}
    exact = dtypes == {"float32"}
    if exact and (report["lossless"]["different"] or disagreements(report)):
        notes.print("failed: in float32, answers and accepted runs must be equal")
        failed = True
    first = report["runs"][0]
    if min_accept_length is not None and first["accept_length"] < min_accept_length:
        notes.print(
            f"failed: accept length {first['accept_length']:.3f} is below {min_accept_length}"
        )
        failed = True
    return int(failed)
