"""`domino serve`: check, start SGLang, confirm what it serves, and stop it cleanly."""

import json
import os
from dataclasses import dataclass

import httpx
from rich.console import Console

from domino_kit.serve.confirm import (
    PROMPTS,
    Gain,
    check_report,
    contract_notes,
    measure_gain,
    read_report,
)
from domino_kit.serve.plan import ServeOptions, ServePlan, plan_serve
from domino_kit.serve.server import Server, ServerError, Stopped

REFUSED_ON_CPU = (
    "frequency, presence and repetition penalties, min_new_tokens, custom logit processors, "
    "return_hidden_states"
)


@dataclass(frozen=True)
class Confirm:
    """What is asked once the server is up: ``tokens`` 0 asks nothing; ``prompts`` a prompt file."""

    tokens: int = 64
    prompts: str | None = None
    limit: int = 4


def run_serve(
    options: ServeOptions, confirm: Confirm, *, start_seconds: float, print_command: bool
) -> int:
    """Serve until stopped; returns the exit status: 0 if stopped by a signal, 1 if it failed.

    Raises ``ValueError`` in one sentence for what is wrong before the start.
    """
    notes = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    plan = plan_serve(options, os.environ, check_port=not print_command)
    for note in plan.notes:
        notes.print(f"warning: {note}")
    if print_command:
        print(plan.shell_line())
        return 0
    prompts = _load_prompts(plan, confirm)
    try:
        with Server(plan.command, plan.environment, plan.host, plan.port) as server:
            server.wait_ready(start_seconds)
            try:
                _confirm(server, plan, prompts, confirm, notes)
            except httpx.HTTPError as error:
                if server.ended(within=10):
                    raise ServerError(server.why_ended()) from None
                raise ServerError(f"the server did not answer as it should: {error}") from None
            raise ServerError(server.why_ended())
    except Stopped:
        notes.print("stopped")
        return 0
    except ServerError as error:
        notes.print(f"Error: {error}")
        return 1


def _load_prompts(plan: ServePlan, confirm: Confirm) -> list[list[int]]:
    """Prompts as token ids, rendered as in training."""
    if confirm.tokens == 0:
        return []
    from domino_kit.chat_template import prompt_ids
    from domino_kit.eval.prompt_set import read_prompts
    from domino_kit.target import load_tokenizer

    tokenizer = load_tokenizer(plan.target, "--trust-remote-code" in plan.command)
    thinking = plan.manifest.target.thinking if plan.manifest is not None else None
    if confirm.prompts is not None:
        messages = [prompt.messages for prompt in read_prompts(confirm.prompts, confirm.limit)]
    else:
        messages = [[{"role": "user", "content": text}] for text in PROMPTS[: confirm.limit]]
    return [prompt_ids(tokenizer, each, thinking) for each in messages]


def _confirm(
    server: Server, plan: ServePlan, prompts: list[list[int]], confirm: Confirm, notes: Console
) -> None:
    """Check the running server and print the ready lines."""
    report = read_report(server.url)
    if report["process_group"] != server.pid:
        raise ServerError(f"another server answers at {server.url}; give another --port.")
    check_report(report, plan.draft, plan.config, block_size=plan.block_size, dtype=plan.dtype)
    for note in contract_notes(report):
        notes.print(f"warning: {note}")
    head = "Domino head active" if plan.config.has_head else "plain DFlash, no head"
    notes.print(f"draft {plan.draft}: {head}, block {plan.block_size}, {plan.dtype}")
    if prompts:
        plain = bool(report["draft"]["plain_requests"])
        exact = plan.dtype == "float32"
        gain = measure_gain(server.url, prompts, confirm.tokens, plain=plain, exact=exact)
        for line in describe_gain(gain):
            notes.print(line)
    if plan.device == "cpu":
        notes.print(f"refused per request on a CPU: {REFUSED_ON_CPU}")
    for line in ready_lines(server.url):
        notes.print(line)


def describe_gain(gain: Gain | None) -> list[str]:
    """The measured gain in words; a warning if speculation does not pay."""
    if gain is None:
        return ["acceptance was not measured: every answer had one token, which needs no draft"]
    lines = [
        f"acceptance length {gain.accept_length:.2f} (bonus token counted), "
        f"{gain.speed:.1f} tokens/s one request at a time"
    ]
    cost = gain.cycle_cost
    if cost is None or gain.plain_speed is None:
        return lines
    ratio = gain.speed / gain.plain_speed
    lines[0] += f"; plain decoding {gain.plain_speed:.1f} tokens/s, so {ratio:.2f} times as fast"
    if not gain.same_answers:
        lines.append(
            "warning: some greedy answers differ with and without the draft, as rounding in this "
            "dtype allows"
        )
    lines.append(f"one draft-verify cycle costs {cost:.2f} plain steps: the break-even acceptance")
    if gain.accept_length < cost:
        lines.append(
            f"warning: acceptance {gain.accept_length:.2f} is below the break-even of {cost:.2f}: "
            "on these prompts the draft makes this server slower"
        )
    return lines


def ready_lines(url: str) -> list[str]:
    """The address, the model's name, and a request to try."""
    models = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()
    name = models["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}
    return [
        f"ready: {url}/v1 model {name}",
        f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'",
    ]
