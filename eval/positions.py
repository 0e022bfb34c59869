"""Acceptance by position: where each verify step stands in its text, and whether acceptance falls."""

import math
from collections.abc import Sequence
from typing import Any

from domino_kit.acceptance import Acceptance

FIRST_BUCKET = 64
MIN_STEPS, MIN_DROP, MIN_ERRORS = 30, 0.15, 3.0
RULE = (
    f"acceptance falls if a later row's accept length is more than {MIN_DROP:.0%} and more than "
    f"{MIN_ERRORS:g} standard errors of the difference below the best earlier row, both with at "
    f"least {MIN_STEPS} steps; steps count as independent"
)
CAUSES = (
    "common causes of a fall are a draft trained on shorter rows, and a RoPE base or table that "
    "differs from training; other rows hold other text, too (--lengths asks the same questions)"
)


def whole_steps(
    prompt_tokens: int, runs: Sequence[int], num_proposals: int
) -> list[tuple[int, int]]:
    """Anchor position and run of every step of an answer that had room for all its drafts.

    The first anchor stands at ``prompt_tokens``, each later one at the run + 1 after the one
    before. Drafts beyond the end of an answer never count, so the steps that can reach it are
    shorter wherever they stand: by position they would look like a decay, and are left out.
    """
    end = prompt_tokens + sum(run + 1 for run in runs)  # the last token, or one behind a cut
    steps = []
    position = prompt_tokens
    for run in runs:
        if position + num_proposals < end:
            steps.append((position, run))
        position += run + 1
    return steps


def bucket_of(position: int, width: int | None) -> tuple[int, int]:
    """First and last position of a bucket: ``width`` positions, or 0-63, 64-127, 128-255, …"""
    if width is not None:
        first = position // width * width
        return first, first + width - 1
    if position < FIRST_BUCKET:
        return 0, FIRST_BUCKET - 1
    first = 1 << (position.bit_length() - 1)
    return first, 2 * first - 1


def positions_table(
    prompts: Sequence[tuple[int, Sequence[int] | None]],
    num_proposals: int,
    bucket: int | None = None,
) -> dict[str, Any]:
    """Acceptance by position, from each prompt's length in tokens and the runs of its answer.

    ``None`` for runs whose order is unknown. Returns ``buckets`` (``from`` and ``to`` position,
    with :func:`numbers`; empty ones are left out), ``left_out_steps`` (see :func:`whole_steps`),
    ``left_out_prompts``, and the ``verdict``, ``None`` unless acceptance falls.
    """
    runs_in: dict[tuple[int, int], list[int]] = {}
    known = [(length, runs) for length, runs in prompts if runs is not None]
    for length, runs in known:
        for position, run in whole_steps(length, runs, num_proposals):
            runs_in.setdefault(bucket_of(position, bucket), []).append(run)
    rows = [
        {"from": first, "to": last, **numbers(runs, num_proposals)}
        for (first, last), runs in sorted(runs_in.items())
    ]
    kept = sum(row["verify_steps"] for row in rows)
    return {
        "buckets": rows,
        "left_out_steps": sum(len(runs) for _, runs in known) - kept,
        "left_out_prompts": len(prompts) - len(known),
        "verdict": verdict(rows),
    }


def numbers(runs: Sequence[int], num_proposals: int) -> dict[str, Any]:
    """Steps, accept length (bonus counted) and its standard error; ``None`` where there is none."""
    stats = Acceptance.of(runs, num_proposals)
    steps, mean = stats.verify_steps, stats.accepted_drafts_per_step
    squares = sum(count * (run - mean) ** 2 for run, count in enumerate(stats.counts))
    return {
        "verify_steps": steps,
        "accept_length": stats.accept_length if steps else None,
        "standard_error": math.sqrt(squares / (steps - 1) / steps) if steps > 1 else None,
    }


def verdict(rows: Sequence[dict[str, Any]]) -> str | None:
    """The largest fall from an earlier to a later row in one sentence, by :data:`RULE`."""
    enough = [row for row in rows if row["verify_steps"] >= MIN_STEPS]
    falls = []
    for place, low in enumerate(enough[1:], start=1):
        best = max(enough[:place], key=lambda row: row["accept_length"])
        gap = best["accept_length"] - low["accept_length"]
        error = math.hypot(best["standard_error"], low["standard_error"])
        if gap > MIN_DROP * best["accept_length"] and gap > MIN_ERRORS * error:
            falls.append((gap / best["accept_length"], best, low))
    if not falls:
        return None
    drop, best, low = max(falls, key=lambda fall: fall[0])
    return (
        f"acceptance falls by {drop:.0%}, from {best['accept_length']:.2f} at {_place(best)} to "
        f"{low['accept_length']:.2f} at {_place(low)}"
    )


def _place(row: dict[str, Any]) -> str:
    if "length" in row:
        return f"contexts of {row['length']} tokens"
    return f"positions {row['from']}-{row['to']}"
