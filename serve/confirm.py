"""What `domino serve` confirms once the server answers: the draft in use, and what it gains."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from domino_kit.config import DraftConfig
from domino_kit.draft_contract import weights_identity
from domino_kit.serve.plugin import PLAIN_PARAM, REPORT_KEY
from domino_kit.serve.server import ServerError

PROMPTS = (
    "Write a short letter to a neighbour who has found my cat.",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words in a string.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
)
REQUEST_SECONDS = 300


@dataclass(frozen=True)
class Gain:
    """Greedy requests one after another: with the draft, and plainly where the server can.

    Speeds are tokens per second. ``accept_length`` counts the bonus token and leaves out the first
    token of each answer, which the prefill produced.
    """

    accept_length: float
    speed: float
    plain_speed: float | None
    same_answers: bool = True

    @property
    def cycle_cost(self) -> float | None:
        """One draft-verify cycle over one plain step; also the acceptance length to break even."""
        if self.plain_speed is None:
            return None
        return self.accept_length * self.plain_speed / self.speed


def read_report(url: str) -> dict[str, Any]:
    """What the plugin says about the running server; raises ``ServerError`` if it says nothing."""
    try:
        state = httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise ServerError(f"{url} is not an SGLang server that answers: {said[0]}.") from None
    states = state.get("internal_states") if isinstance(state, dict) else None
    reports = [each.get(REPORT_KEY) for each in states or [{}]]
    if None in reports:
        raise ServerError(
            "domino-kit's plugin is not active in the server, so nothing about the draft is "
            "certain; see the server's output for the reason."
        )
    return reports[0]


FACT_OF = {
    "head": "head_active",
    "mask_token_id": "mask_token_id",
    "shift_label": "label_mode",
    "target_layer_ids": "layer_ids",
}
"""Under which name of the contract each reported fact can be allowed."""


def check_report(report: dict[str, Any], draft: Path, config: DraftConfig, **wanted: Any) -> None:
    """Raise ``ServerError`` unless the server runs the draft as its config, and ``wanted``, say.

    Also for an error of the contract inside the server (``serve/live.py``), unless it only reports.
    """
    if report["hooks_missing"]:
        raise ServerError(
            f"the plugin could not apply {report['hooks_missing']} to this SGLang; install a "
            "tested version."
        )
    served = report["draft"]
    if served is None:
        raise ServerError("the server runs without a draft.")
    contract = report.get("contract") or {"mode": "stop", "findings": [], "allowed": []}
    reports_only = contract["mode"] == "report"
    for finding in contract["findings"]:
        if finding["severity"] == "error" and not reports_only:
            raise ServerError(f"{finding['name']}: {finding['message']}")
    accepted = (*FACT_OF.values(), "draft_weights") if reports_only else contract["allowed"]
    expected = {
        "head": config.has_head,
        "mask_token_id": config.mask_token_id,
        "shift_label": config.shift_label,
        "target_layer_ids": list(config.target_layer_ids),
        **wanted,
    }
    for name, value in expected.items():
        if served[name] != value and FACT_OF.get(name) not in accepted:
            what = "the Domino head is not active" if name == "head" else "the draft is misread"
            raise ServerError(
                f"{what}: the server has {name} {served[name]!r}, {draft} says {value!r}."
            )
    said = other_weights(served, draft)
    if said is not None and "draft_weights" not in accepted:
        raise ServerError(said)


def other_weights(served: dict[str, Any], draft: Path) -> str | None:
    """What to say if a server runs another checkpoint of the same config, ``None`` if not."""
    if served.get("weights") is None or served["weights"] == weights_identity(draft):
        return None
    return (
        f"the server was started with other weights than {draft} has: another checkpoint, or the "
        "folder has changed since; start the server again with this one."
    )


def contract_notes(report: dict[str, Any]) -> list[str]:
    """What the contract inside the server found, one line each, to be said as a warning."""
    findings = (report.get("contract") or {}).get("findings", [])
    return [f"{finding['name']}: {finding['message']}" for finding in findings]


def measure_gain(
    url: str, prompts: list[list[int]], max_new_tokens: int, *, plain: bool, exact: bool
) -> Gain | None:
    """Answer each prompt greedily, with and (``plain``) without the draft.

    ``prompts`` are token ids. The first prompt is sent once before, unmeasured. ``None`` if every
    answer has one token only, which comes from the prefill. Raises ``ServerError`` if the server
    reports no verify steps, or (``exact``) if answers differ; httpx's errors pass through.
    """
    _ask(url, prompts[0], max_new_tokens, speculate=True)
    answers, seconds = _ask_all(url, prompts, max_new_tokens, speculate=True)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    if tokens == len(prompts):
        return None
    if steps == 0:
        raise ServerError("the server reports no verify step: it is not speculating.")
    length, speed = (tokens - len(prompts)) / steps, tokens / seconds
    if not plain:
        return Gain(length, speed, None)
    own, plain_seconds = _ask_all(url, prompts, max_new_tokens, speculate=False)
    same = [each["output_ids"] for each in own] == [each["output_ids"] for each in answers]
    if exact and not same:
        raise ServerError(
            "greedy answers differ with and without the draft; do not use this server."
        )
    plain_tokens = sum(each["meta_info"]["completion_tokens"] for each in own)
    return Gain(length, speed, plain_tokens / plain_seconds, same)


def flush_cache(url: str) -> None:
    """Empty the prefix cache, where prompts of an earlier round would be found."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()


def _ask_all(
    url: str, prompts: list[list[int]], max_new_tokens: int, *, speculate: bool
) -> tuple[list[dict[str, Any]], float]:
    flush_cache(url)
    started = time.perf_counter()
    answers = [_ask(url, prompt, max_new_tokens, speculate=speculate) for prompt in prompts]
    return answers, time.perf_counter() - started


def _ask(url: str, prompt: list[int], max_new_tokens: int, *, speculate: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if not speculate:
        sampling["custom_params"] = {PLAIN_PARAM: False}
    body = {"input_ids": prompt, "sampling_params": sampling}
    response = httpx.post(f"{url}/generate", json=body, timeout=REQUEST_SECONDS)
    if response.status_code != 200:
        raise ServerError(f"the server refused a greedy request: {response.text[:300]}")
    return response.json()
