"""The served measurement: the same prompts through the real engine, and a concurrency sweep."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from domino_kit.config import DraftConfig, read_config, resolve_folder
from domino_kit.eval.measure import Task, run_entry, short_name
from domino_kit.eval.served import ServedAnswer, ask_all
from domino_kit.serve.confirm import check_report, flush_cache, read_report
from domino_kit.serve.flags import POOL_FLAG, read_flags, whole_number
from domino_kit.serve.plan import ServeOptions, ServePlan, free_port, plan_serve
from domino_kit.serve.plugin import PLAIN_PARAM
from domino_kit.serve.server import Server, ServerError

Say = Callable[[str], None]
START_SECONDS = 1800.0


@dataclass(frozen=True)
class EngineOptions:
    """Where the server is, and what is asked of it.

    Without ``url`` a server is started for the draft with ``extra`` SGLang flags, and then one
    without a draft. ``baseline_url`` is a server without a draft beside ``url``.
    """

    concurrency: tuple[int, ...] = (1,)
    url: str | None = None
    baseline_url: str | None = None
    extra: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """All prompts at one concurrency: answers, and the seconds that the whole took."""

    concurrency: int
    answers: list[ServedAnswer]
    seconds: float

    def numbers(self) -> dict[str, float | None]:
        """Tokens per second of the whole, and medians over requests in milliseconds."""
        tokens = sum(len(answer.tokens) for answer in self.answers)
        gaps = [a.token_seconds for a in self.answers if a.token_seconds is not None]
        return {
            "tokens_per_second": tokens / self.seconds,
            "first_token_ms": 1e3 * statistics.median(a.first_token_seconds for a in self.answers),
            "inter_token_ms": 1e3 * statistics.median(gaps) if gaps else None,
        }


@dataclass(frozen=True)
class Engine:
    """A draft and the server that runs it: one to start (``plan``) or one that runs already."""

    name: str
    draft: Path
    config: DraftConfig
    block_size: int
    plan: ServePlan | None
    options: EngineOptions


def prepare_engine(
    draft: str,
    target: str,
    device: str,
    dtype: str,
    options: EngineOptions,
    *,
    compared: bool,
    warn: Say,
) -> Engine:
    """Check what can be checked before a start, or ask the running servers.

    ``compared`` says that runs are compared with replay and decode, which propose the whole block
    from the whole vocabulary. Raises ``ValueError`` in one sentence, ``ServerError`` for a server.
    """
    folder = resolve_folder(draft)
    if options.url is None:
        if options.baseline_url is not None:
            raise ValueError("--baseline-url needs --url, the server with the draft.")
        plan = plan_serve(
            ServeOptions(draft, target, port=free_port(), device=device, dtype=dtype,
                         allow=options.allow, extra=options.extra),
            os.environ,
        )  # fmt: skip
        for note in plan.notes:
            warn(f"warning: {note}")
        config, block_size = plan.config, plan.block_size
        pool = whole_number(read_flags(options.extra), POOL_FLAG, 0, lowest=0)
    else:
        if options.extra:
            raise ValueError("SGLang flags after -- start a server, so they do not go with --url.")
        plan, config = None, read_config(folder / "config.json")
        report = read_report(base_url(options.url))
        check_report(report, folder, config)
        block_size = report["draft"]["block_size"]
        pool = report["draft"]["candidate_pool_size"]
        if options.baseline_url is not None:
            _check_baseline(base_url(options.baseline_url))
    if compared and (block_size != config.block_size or pool):
        raise ValueError(
            f"--engine both compares with a block of {config.block_size} and the whole vocabulary, "
            f"but block {block_size} and candidate pool {pool} are served; serve the draft's own, "
            "or use --engine sglang."
        )
    return Engine(short_name(draft), folder, config, block_size, plan, options)


def _check_baseline(url: str) -> None:
    """Raise ``ServerError`` unless a server without a draft answers there."""
    try:
        state = httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json()
        algorithm = state["internal_states"][0].get("speculative_algorithm")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        raise ServerError(f"--baseline-url {url} is not an SGLang server that answers.") from None
    if algorithm is not None:
        raise ServerError(f"--baseline-url {url} runs a draft ({algorithm}); it must run without.")


def measure_served(task: Task, engine: Engine, say: Say) -> dict[str, Any]:
    """Answer all prompts at every concurrency, with and without the draft.

    Returns the report's served ``run``, the ``sweep``, the ``engine``'s facts, and the ``answers``.
    Raises ``ServerError`` if a server fails, or runs a draft with another config.
    """
    options, plan = engine.options, engine.plan
    counts = sorted(set(options.concurrency))
    try:
        with _server(options.url, plan, say, draft=True) as url:
            report = read_report(url)
            wanted = {} if plan is None else {"dtype": plan.dtype}
            check_report(
                report, engine.draft, engine.config, block_size=engine.block_size, **wanted
            )
            drafted = _levels(url, task, counts, say)
            plain = None
            if plan is None and options.baseline_url is None and report["draft"]["plain_requests"]:
                plain = _levels(url, task, counts, say, speculate=False)
        if plan is not None or options.baseline_url is not None:
            with _server(options.baseline_url, plan, say, draft=False) as url:
                plain = _levels(url, task, counts, say)
    except httpx.HTTPError as error:
        raise ServerError(f"a server stopped answering: {error}") from None
    return _report(task, engine, report, drafted, plain)


@contextmanager
def _server(url: str | None, plan: ServePlan | None, say: Say, *, draft: bool) -> Iterator[str]:
    """A running server's address, or a server of our own for the time of the block."""
    if url is not None:
        yield base_url(url)
        return
    assert plan is not None
    say(f"starting SGLang {'with' if draft else 'without'} the draft")
    command = plan.command if draft else without_draft(plan.command)
    with own_server(plan, command, draft=draft) as own:
        yield own


@contextmanager
def own_server(
    plan: ServePlan,
    command: Sequence[str],
    *,
    draft: bool,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A quiet server of ``plan`` for the time of the block, on a port that is free now: its address.

    Raises ``ServerError`` if it does not start, or (``draft``) another server answers in its place.
    """
    words, port = list(command), free_port()  # the plan's own may have been taken since
    words[words.index("--port") + 1] = str(port)
    variables = {**plan.environment, **(environment or {})}
    with Server(words, variables, plan.host, port, log=None) as server:
        server.wait_ready(START_SECONDS)
        if draft and read_report(server.url)["process_group"] != server.pid:
            raise ServerError(f"another server answers at {server.url}; try again.")
        yield server.url


def base_url(url: str) -> str:
    """The address of a server, with or without ``/v1`` behind it."""
    return url.rstrip("/").removesuffix("/v1")


def without_draft(command: Sequence[str]) -> list[str]:
    """The same server's command without its draft: what users would run instead."""
    kept: list[str] = []
    skip = False
    for word in command:
        flag = word.startswith("--")
        skip = word.startswith("--speculative-") if flag else skip
        if not skip:
            kept.append(word)
    return kept


def _levels(
    url: str, task: Task, concurrency: Sequence[int], say: Say, *, speculate: bool = True
) -> list[Level]:
    sampling: dict[str, Any] = {
        "temperature": task.sampling.temperature,
        "top_p": task.sampling.top_p,
        "top_k": task.sampling.top_k or -1,
        "max_new_tokens": task.max_new_tokens,
    }
    if not speculate:
        sampling["custom_params"] = {PLAIN_PARAM: False}
    ask_all(url, task.prompt_ids[:1], sampling, 1)  # a first request pays for what is lazy
    levels = []
    for count in concurrency:
        say(f"served, {count} at a time{'' if speculate else ', without the draft'}")
        flush_cache(url)
        answers, seconds = ask_all(url, task.prompt_ids, sampling, count)
        levels.append(Level(count, answers, seconds))
    return levels


def _report(
    task: Task,
    engine: Engine,
    report: dict[str, Any],
    drafted: list[Level],
    plain: list[Level] | None,
) -> dict[str, Any]:
    first = drafted[0]
    proposals = engine.block_size - 1
    counted = [answer.cut_histogram(proposals) for answer in first.answers]
    speed = first.numbers()["tokens_per_second"]
    run = run_entry(
        task,
        draft=engine.name,
        head="domino" if engine.config.has_head else "none",
        mode="served",
        block_size=engine.block_size,
        num_proposals=proposals,
        histograms=counted,
        accepted=[answer.accepted_runs for answer in first.answers],
        speed=speed,
        baseline=None if plain is None else plain[0].numbers()["tokens_per_second"],
    )
    run["engine_histograms"] = [answer.histogram for answer in first.answers]
    return {
        "run": run,
        "answers": [answer.tokens for answer in first.answers],
        "plain_answers": None if plain is None else [a.tokens for a in plain[0].answers],
        "same_at_every_concurrency": all(
            [a.tokens for a in level.answers] == [a.tokens for a in first.answers]
            for level in drafted
        ),
        "sweep": sweep(drafted, plain),
        "engine": {
            **report,
            "command": None if engine.plan is None else engine.plan.command,
            "url": engine.options.url,
        },
    }


def add_served(
    result: dict[str, Any], served: dict[str, Any], prompt_ids: Sequence[str], *, greedy: bool
) -> None:
    """Put a served measurement beside what was measured in plain PyTorch.

    Greedy answers must equal plain decoding's: PyTorch's where there is one, else the server's own
    without a draft.
    """
    result["runs"].append(served["run"])
    plain = result.get("answers") or served["plain_answers"]
    result.setdefault("answers", served["answers"])
    result.setdefault("dtype", served["engine"]["draft"]["dtype"])
    result["sweep"], result["engine"] = served["sweep"], served["engine"]
    if greedy and plain is not None:
        result["lossless"]["checked"] = True
        pairs = zip(prompt_ids, served["answers"], plain, strict=True)
        result["lossless"]["different"] += [
            f"{served['run']['draft']} (served): {name}" for name, own, want in pairs if own != want
        ]
        if not served["same_at_every_concurrency"]:
            result["lossless"]["different"].append(
                f"{served['run']['draft']} (served): another answer at another concurrency"
            )


def sweep(drafted: list[Level], plain: list[Level] | None) -> dict[str, Any]:
    """Speed by concurrency with and without the draft, and where speculation stops paying.

    ``stops_paying_at`` is the measured concurrency from which on the server with the draft is
    slower; ``None`` if there is none, or nothing to compare with.
    """
    rows = []
    for place, level in enumerate(drafted):
        row: dict[str, Any] = {"concurrency": level.concurrency, "served": level.numbers()}
        if plain is not None:
            row["plain"] = plain[place].numbers()
            row["ratio"] = row["served"]["tokens_per_second"] / row["plain"]["tokens_per_second"]
        rows.append(row)
    stops = None
    for row in reversed(rows):
        if row.get("ratio", 1.0) >= 1.0:
            break
        stops = row["concurrency"]
    return {"levels": rows, "stops_paying_at": stops}
