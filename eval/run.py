"""`domino eval-acceptance`: load everything, measure, report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from domino_kit.chat_template import prompt_ids, render
from domino_kit.checkpoint import resolve_folder
from domino_kit.contract import json_hash, library_versions, read_manifest
from domino_kit.decoding import Sampling
from domino_kit.eval.measure import Task, check_lengths, equal_proposals, load_candidates, measure
from domino_kit.eval.prompt_set import Prompt, read_prompts
from domino_kit.eval.report import (
    DEFINITIONS,
    disagreements,
    print_report,
    write_json,
    write_picture,
)
from domino_kit.target import (
    choose_device,
    choose_dtype,
    end_token_ids,
    load_target_model,
    load_tokenizer,
)


@dataclass(frozen=True)
class Options:
    """The options of the command, under the names of its flags."""

    draft: str
    prompts: str
    target: str | None = None
    compare: tuple[str, ...] = ()
    mode: Literal["replay", "decode", "both"] = "both"
    limit: int | None = None
    max_new_tokens: int = 256
    num_proposals: int | None = None
    batch_size: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    proposals: Literal["greedy", "sampled"] = "greedy"
    seed: int = 0
    thinking: bool | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    output: Path | None = None
    picture: Path | None = None
    min_accept_length: float | None = None

    @property
    def modes(self) -> list[str]:
        """The modes to run."""
        return ["replay", "decode"] if self.mode == "both" else [self.mode]

    @property
    def sampling(self) -> Sampling:
        """How the target samples."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.proposals)


def run_evaluation(options: Options) -> int:
    """Measure and print; returns the exit status (1: results differ or acceptance is too low).

    Raises ``ValueError`` in one sentence for anything that cannot be measured.
    """
    notes = Console(stderr=True, markup=False)
    if "replay" in options.modes and not options.sampling.greedy:
        raise ValueError("replay measures greedy decoding; with --temperature use --mode decode.")
    for path in (options.output, options.picture):
        if path is not None:  # better now than after the measurement
            path.parent.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.prompts, options.limit)
    name, thinking = _target(options)
    device = choose_device(options.device)
    tokenizer = load_tokenizer(name, options.trust_remote_code)
    hf_model = load_target_model(
        name, choose_dtype(options.dtype, device), device, options.trust_remote_code
    )
    candidates = load_candidates(
        options.draft, options.compare, name, hf_model, tokenizer, thinking, notes.print
    )
    task = Task(
        prompts=prompts,
        prompt_ids=[prompt_ids(tokenizer, prompt.messages, thinking) for prompt in prompts],
        max_new_tokens=options.max_new_tokens,
        end_tokens=end_token_ids(hf_model, tokenizer),
        num_proposals=equal_proposals(candidates, options.num_proposals),
        batch_size=options.batch_size,
        sampling=options.sampling,
        seed=options.seed,
    )
    check_lengths(task, candidates)
    with notes.status("measuring") as status:
        result = measure(task, candidates, options.modes, status.update)
    facts = {
        "target": name,
        "thinking": thinking,
        "dtype": str(hf_model.dtype).removeprefix("torch."),
        "device": device,
        "rendered_prompts_hash": _rendered_hash(tokenizer, prompts, thinking),
    }
    report = {**facts, **_settings(options), **result}
    print_report(report, Console(markup=False))
    if options.output is not None:
        write_json(report, options.output)
    if options.picture is not None:
        write_picture(report, options.picture)
    return _status(report, options.min_accept_length, notes)


def _target(options: Options) -> tuple[str, bool | None]:
    """The target's name and thinking mode: as given, else as the draft was trained."""
    manifest = read_manifest(resolve_folder(options.draft))
    if manifest is None:
        if options.target is None:
            raise ValueError(
                f"draft {options.draft} has no manifest that names its target; give --target."
            )
        return options.target, options.thinking
    thinking = manifest.target.thinking if options.thinking is None else options.thinking
    return options.target or manifest.target.name, thinking


def _rendered_hash(tokenizer: Any, prompts: list[Prompt], thinking: bool | None) -> str:
    return json_hash(
        [render(tokenizer, p.messages, thinking, add_generation_prompt=True) for p in prompts]
    )


def _settings(options: Options) -> dict[str, Any]:
    return {
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "sampling": {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "proposals": options.proposals,
            "seed": options.seed,
        },
        "prompts_source": options.prompts,
        "libraries": library_versions(),
        "definitions": DEFINITIONS,
    }


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
