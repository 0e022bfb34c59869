"""Requests to a running SGLang server: streamed answers, their times, and their accepted runs."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

REQUEST_SECONDS = 1800.0


@dataclass
class ServedAnswer:
    """One streamed answer.

    ``tokens`` without the prompt; ``arrivals`` are seconds from the request to each piece and
    ``pieces`` the tokens in each; ``histogram`` the engine's count of steps by accepted drafts,
    drafts beyond a cut included (``None`` from a server without a draft).
    """

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    histogram: list[int] | None = None
    verify_steps: int = 0
    prefills: int = 1

    @property
    def surplus(self) -> int:
        """Tokens that the last step verified beyond the end of the answer."""
        counts = enumerate(self.histogram or [])
        verified = sum((run + 1) * count for run, count in counts) + self.prefills
        return verified - len(self.tokens)

    @property
    def accepted_runs(self) -> list[int] | None:
        """The run of every step under the rule of :mod:`domino_kit.acceptance`.

        A piece of the stream is a step, so its size minus the bonus token is the run. ``None`` if
        the server merged pieces or computed a prompt again, where only the histogram is left.
        """
        if self.prefills != 1 or len(self.pieces) != self.verify_steps + 1 or self.pieces[0] != 1:
            return None
        runs = [size - 1 for size in self.pieces[1:]]
        if runs and self.surplus > 0:
            runs[-1] += 1  # the cut fell on drafts: the last token kept is one of them
        return runs

    def cut_histogram(self, num_proposals: int) -> list[int] | None:
        """Steps by accepted drafts under that same rule, or ``None`` if it cannot be known.

        The engine counts all drafts of the last step. Which bin that is follows from the stream,
        or is clear when only one bin can have produced the surplus. A request that was retracted
        has steps that no other way of decoding has.
        """
        if self.prefills != 1:
            return None
        counts = list(self.histogram or [])
        counts += [0] * (num_proposals + 1 - len(counts))
        if self.surplus == 0:
            return counts
        runs = self.accepted_runs
        if runs is not None:
            last = runs[-1] + self.surplus - 1
        else:
            able = [run for run, count in enumerate(counts) if count and run >= self.surplus]
            if len(able) != 1:
                return None
            last = able[0]
        if not 0 <= last <= num_proposals or counts[last] == 0:
            return None
        counts[last] -= 1
        counts[last + 1 - self.surplus] += 1
        return counts

    @property
    def first_token_seconds(self) -> float:
        """From the request to its first token."""
        return self.arrivals[0]

    @property
    def token_seconds(self) -> float | None:
        """Mean time between tokens after the first piece."""
        later = len(self.tokens) - self.pieces[0]
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else None


class RequestFailed(ValueError):
    """A request that the server refused or dropped."""


async def ask(
    client: httpx.AsyncClient, prompt: Sequence[int], sampling: dict[str, Any]
) -> ServedAnswer:
    """Stream one answer to a prompt of token ids; raises :class:`RequestFailed`."""
    answer = ServedAnswer()
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    started = time.perf_counter()
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")
            raise RequestFailed(f"the server refused a request: {said[:300]}")
        async for event in _events(response):
            if "error" in event:
                raise RequestFailed(f"the server ended a request: {event['error']}")
            _add(answer, event, time.perf_counter() - started)
    if not answer.tokens:
        raise RequestFailed("the server ended a request without an answer.")
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _add(answer: ServedAnswer, event: dict[str, Any], seconds: float) -> None:
    meta = event["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise RequestFailed(f"the server ended a request: {reason.get('message')}")
    new = meta["completion_tokens"] - len(answer.tokens)
    if new > 0:
        answer.tokens += event["output_ids"][-new:]
        answer.arrivals.append(seconds)
        answer.pieces.append(new)
    if reason:
        answer.histogram = meta.get("spec_correct_drafts_histogram")
        answer.verify_steps = meta.get("spec_verify_ct", 0)
        answer.prefills = 1 + meta.get("num_retractions", 0)


async def _ask_all(
    url: str, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]], concurrency: int
) -> list[ServedAnswer]:
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits) as client:

        async def one(prompt: Sequence[int], settings: dict[str, Any]) -> ServedAnswer:
            async with gate:
                return await ask(client, prompt, settings)

        return list(await asyncio.gather(*map(one, prompts, sampling)))


def ask_all(
    url: str,
    prompts: Sequence[Sequence[int]],
    sampling: dict[str, Any] | Sequence[dict[str, Any]],
    concurrency: int,
) -> tuple[list[ServedAnswer], float]:
    """All answers in the prompts' order, at most ``concurrency`` at once, and the seconds taken.

    ``sampling`` is for all prompts, or one for each. Raises :class:`RequestFailed`, also where the
    server cannot be reached.
    """
    each = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling
    started = time.perf_counter()
    try:
        answers = asyncio.run(_ask_all(url, prompts, each, concurrency))
    except httpx.HTTPError as error:
        said = str(error) or type(error).__name__
        raise RequestFailed(f"{url} did not answer: {said}.") from None
    return answers, time.perf_counter() - started
