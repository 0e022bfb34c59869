"""`domino eval-acceptance` and `domino check`: what a draft gives, and whether it is as trained."""

from pathlib import Path
from typing import Any

import click

from domino_kit.commands.common import (
    ALLOW,
    DEFAULT_LENGTHS,
    DEVICE,
    DRAFT,
    DTYPE,
    SGLANG_FLAGS,
    TARGET,
    THINKING,
    TRUST,
    exit_status,
    lengths,
    whole_numbers,
)


@click.command("eval-acceptance")
@DRAFT
@TARGET
@click.option("--compare", multiple=True, metavar="FOLDER|off",
              help="Another draft, or `off`: the same without its head; repeatable.")  # fmt: skip
@click.option("--prompts", required=True, metavar="FILE|BENCHMARK[=FILE]",
              help="JSONL or parquet, or gsm8k, humaneval, mt-bench, alpaca, math500.")  # fmt: skip
@click.option("--mode", type=click.Choice(["replay", "decode", "both"]), default="both",
              help="Replay the target's answers, decode them, or both.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1),
              help="Use only the first prompts (with --lengths, default 8).")  # fmt: skip
@click.option("--lengths", is_flag=False, flag_value=DEFAULT_LENGTHS, callback=lengths,
              metavar="[N,N,…]", help="Ask the same questions after notes that make prompts of so "
              "many tokens; alone: powers of two up to the context.")  # fmt: skip
@click.option("--bucket", type=click.IntRange(1), metavar="N",
              help="Positions in a row of acceptance by position; default: powers of two.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, help="Tokens an answer.")
@click.option(
    "--num-proposals", type=click.IntRange(1), help="Drafts a step; default: block size - 1."
)
@click.option("--batch-size", type=click.IntRange(1), default=1, help="Answers decoded together.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="0 is off.")
@click.option("--proposals", type=click.Choice(["greedy", "sampled"]), default="greedy",
              help="How the draft proposes at a temperature.")  # fmt: skip
@click.option("--seed", type=int, default=0, help="Of sampled answers.")
@THINKING
@DEVICE
@DTYPE
@TRUST
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Report as PNG.")
@click.option("--min-accept-length", type=float, help="Exit 1 if the draft is below this.")
@ALLOW
@click.option("--engine", type=click.Choice(["hf", "sglang", "both"]), default="hf",
              help="Plain PyTorch, a real server, or both compared step by step.")  # fmt: skip
@click.option("--url", help="A running server with the draft; default: start one.")
@click.option("--baseline-url", help="A server without a draft, beside --url.")
@click.option("--concurrency", default="1", callback=whole_numbers, metavar="N,N,…",
              help="Requests at once, for the served speeds.")  # fmt: skip
@SGLANG_FLAGS
def eval_acceptance(**options: Any) -> None:
    """Measure acceptance length, with plain decoding beside it in the same run.

    With --engine sglang or both, a server is started (flags after -- go to SGLang) or --url asked.

    Exit status: 0; 1 if an answer or a run differs, the acceptance is too low or a server fails;
    2 on bad input.
    """
    from domino_kit.eval.options import Options

    chosen = Options(**options)
    from domino_kit.eval.run import run_evaluation

    raise SystemExit(exit_status(lambda: run_evaluation(chosen)))


@click.command()
@DRAFT
@TARGET
@click.option("--engine", type=click.Choice(["hf", "sglang", "both"]), default="hf",
              help="Plain PyTorch only, or also a real server (both: the same).")  # fmt: skip
@click.option("--prompts", metavar="FILE|BENCHMARK[=FILE]",
              help="Ask these instead of built-in prompts, as in eval-acceptance.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Use only the first prompts; default: 4.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=32, help="Tokens an answer.")
@click.option("--static", is_flag=True, help="Compare files only: seconds, no weights loaded.")
@THINKING
@DEVICE
@DTYPE
@TRUST
@click.option("--url", help="A running server with the draft and the probe; default: start one.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Report as JSON.")
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Report as HTML.")
@click.option("--lengths", is_flag=False, flag_value=DEFAULT_LENGTHS, callback=lengths,
              metavar="[N,N,…]",
              help="Also acceptance in longer contexts, as in eval-acceptance.")  # fmt: skip
@ALLOW
@SGLANG_FLAGS
def check(**options: Any) -> None:
    """Prove that a draft is served as it was trained, or name the stage that differs, and why.

    First the files (config, weights, target, tokenizer, template against the manifest), then every
    stage of a draft-verify step: recorded in training, training graph, replay, decode, server.

    Exit status: 0 as trained; 1 a mismatch; 2 it could not be checked.
    """
    from domino_kit.eval.options import CheckOptions

    chosen = CheckOptions(**options)
    from domino_kit.eval.check import run_check

    raise SystemExit(run_check(chosen))
