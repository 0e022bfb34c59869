"""`domino eval-acceptance`: load everything, measure, report."""

from pathlib import Path
from typing import Any

from rich.console import Console

from domino_kit.chat_template import prompt_ids, render
from domino_kit.checkpoint import resolve_folder
from domino_kit.contract import json_hash, library_versions, read_manifest
from domino_kit.decoding import Sampling
from domino_kit.eval.measure import Task, check_lengths, equal_proposals, load_candidates, measure
from domino_kit.eval.prompt_set import read_prompts
from domino_kit.eval.report import (
    DEFINITIONS,
    disagreements,
    print_report,
    write_json,
    write_picture,
)
from domino_kit.target import end_token_ids, load_target_model, load_tokenizer
from domino_kit.train.setup import choose_device, choose_dtype


def run_evaluation(
    *,
    draft: str,
    target: str | None,
    compare: tuple[str, ...],
    prompts: str,
    mode: str,
    limit: int | None,
    max_new_tokens: int,
    num_proposals: int | None,
    batch_size: int,
    temperature: float,
    top_p: float,
    top_k: int,
    proposals: Any,
    thinking: bool | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    output: Path | None,
    picture: Path | None,
    min_accept_length: float | None,
) -> int:
    """Measure and print; returns the exit status (1: results differ or acceptance is too low).

    Raises ``ValueError`` in one sentence for anything that cannot be measured.
    """
    console, notes = Console(), Console(stderr=True)
    sampling = Sampling(temperature, top_p, top_k, proposals)
    modes = ["replay", "decode"] if mode == "both" else [mode]
    if "replay" in modes and not sampling.greedy:
        raise ValueError("replay measures greedy decoding; with --temperature use --mode decode.")
    loaded = read_prompts(prompts, limit)
    manifest = read_manifest(resolve_folder(draft))
    if target is None:
        if manifest is None:
            raise ValueError(f"draft {draft} has no manifest that names its target; give --target.")
        target = manifest.target.name
    if thinking is None and manifest is not None:
        thinking = manifest.target.thinking
    device = choose_device(device)
    tokenizer = load_tokenizer(target, trust_remote_code)
    hf_model = load_target_model(target, choose_dtype(dtype, device), device, trust_remote_code)
    candidates = load_candidates(draft, compare, hf_model, tokenizer, thinking, notes.print)
    task = Task(
        prompts=loaded,
        prompt_ids=[prompt_ids(tokenizer, prompt.messages, thinking) for prompt in loaded],
        max_new_tokens=max_new_tokens,
        end_tokens=end_token_ids(hf_model, tokenizer),
        num_proposals=equal_proposals(candidates, num_proposals),
        batch_size=batch_size,
        sampling=sampling,
    )
    check_lengths(task, candidates)
    with notes.status("measuring") as status:
        result = measure(task, candidates, modes, lambda text: status.update(text))
    rendered = [render(tokenizer, p.messages, thinking, add_generation_prompt=True) for p in loaded]
    report = {
        "target": target,
        "thinking": thinking,
        "dtype": str(hf_model.dtype).removeprefix("torch."),
        "device": device,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "sampling": {"temperature": temperature, "top_p": top_p, "top_k": top_k,
                     "proposals": proposals},
        "prompts_source": prompts,
        "rendered_prompts_hash": json_hash(rendered),
        "libraries": library_versions(),
        "definitions": DEFINITIONS,
        **result,
    }  # fmt: skip
    print_report(report, console)
    if output is not None:
        write_json(report, output)
    if picture is not None:
        write_picture(report, picture)
    return _status(report, min_accept_length, notes)


def _status(report: dict[str, Any], min_accept_length: float | None, notes: Console) -> int:
    failed = False
    exact = report["dtype"] == "float32"
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
