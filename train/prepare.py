"""`domino prepare`: prompts are answered by the target itself and become rows to train on.

Every user turn is answered in order, and later turns are asked after the target's own earlier
answers instead of those in the data. Each answer becomes a row of its own: the conversation up to
it, with weight 0 on the answers before, which are context only. So every answer is learnt exactly
once, and in the very context in which it was given. One row for the whole conversation would not
do: the templates of reasoning models drop the reasoning of all answers but the last one, so what
the target wrote would be learnt for the last turn only, and the earlier ones wrongly.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from domino_kit.decoding import Sampling
from domino_kit.serve.server import ServerError
from domino_kit.train.answers import Ask, Asking, Question, in_process
from domino_kit.train.answers_served import (
    by_chat,
    by_token_ids,
    check_rendered,
    open_servers,
)
from domino_kit.train.prepare_options import PrepareOptions, check_urls
from domino_kit.train.prepare_output import AnswerFile, read_sidecar, settings_hash, write_sidecar
from domino_kit.train.prepare_prompts import Conversation, read_conversations
from domino_kit.train.prepare_report import Progress, Say, Tally, notes_console
from domino_kit.train.prepare_rows import Rows
from domino_kit.train.prepare_target import PreparedTarget, read_target

SERVED_CONCURRENCY = 16


def run_prepare(options: PrepareOptions) -> int:
    """Answer the prompts, or only show rows that are there; returns the exit status.

    Raises ``ValueError`` in one sentence for bad input, ``ServerError`` if a server fails; what was
    answered until then is kept.
    """
    say = notes_console(options.quiet).print
    if options.prompts is not None:
        _answer(options, say)
    if options.show_mask:
        _show(options)
    return 0


def _answer(options: PrepareOptions, say: Say) -> None:
    engine = options.answered_by
    assert options.prompts is not None and options.target is not None
    conversations, dropped = _read(options, options.prompts)
    target = read_target(
        options.target, options.device, options.dtype, engine, options.trust_remote_code
    )
    settings = _settings(options, engine, target)
    asking = Asking(
        target.tokenizer, target.end_tokens, _sampling(options), options.max_new_tokens,
        options.thinking,
    )  # fmt: skip
    with ExitStack() as stack:
        paths = [path for path in (options.output, options.held_out_output) if path is not None]
        files = [stack.enter_context(AnswerFile(path, settings, say)) for path in paths]
        plan, context = _plan(options, engine, target, say)
        tally = Tally(dropped, sum(map(len, files)))
        rows = Rows(
            conversations, files, asking, tally, context, options.seed, settings_hash(settings),
            everything=options.limit is None,
        )  # fmt: skip
        facts = _facts(options, engine, target, settings)
        for file in files:
            write_sidecar(file.path, facts)
        if rows.missing:
            _ask(options, rows, target, asking, plan, say)
        else:
            _say_summary(options, rows, 1.0, say)
        _finish(options, rows, facts)


def _finish(options: PrepareOptions, rows: Rows, facts: dict[str, Any]) -> None:
    """Put the rows into order; raises ``ValueError`` if there is none at all."""
    tally = rows.tally
    for file in rows.files:
        file.sort(rows.names)
        kept = {"rows": len(file), "dropped": dict(tally.dropped)}
        write_sidecar(file.path, {**facts, **kept})
    if not sum(map(len, rows.files)):
        refusal = f"; {tally.first_refusal}" if tally.first_refusal else ""
        raise ValueError(
            f"no prompt of {options.prompts} could be answered: {_counted(tally.dropped)}{refusal}."
        )


def _read(options: PrepareOptions, prompts: str) -> tuple[list[Conversation], Counter[str]]:
    """The conversations to answer, at least one, and why others were dropped."""
    conversations, dropped = read_conversations(
        prompts, options.system, options.limit, options.held_out, options.split or "train",
        options.subset,
    )  # fmt: skip
    if not conversations:
        reasons = _counted(dropped) or "no rows"
        raise ValueError(f"--prompts {prompts} holds no prompt ({reasons}).")
    return conversations, dropped


def _counted(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


# -- settings -----------------------------------------------------------------------------------


def _sampling(options: PrepareOptions) -> Sampling:
    return Sampling(options.temperature, options.top_p, options.top_k)


def _settings(options: PrepareOptions, engine: str, target: PreparedTarget) -> dict[str, Any]:
    """What an answer depends on; the seed and the cut-offs only where they matter."""
    sampling = _sampling(options)
    settings: dict[str, Any] = {
        "target": target.fingerprint,
        "engine": engine,
        "dtype": None if engine == "server" else target.dtype,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "thinking": options.thinking,
        "system": options.system,
        "held_out": options.held_out,
    }
    if not sampling.greedy:
        settings |= {"top_p": options.top_p, "top_k": options.top_k, "seed": options.seed}
    return settings


def _facts(
    options: PrepareOptions, engine: str, target: PreparedTarget, settings: dict[str, Any]
) -> dict[str, Any]:
    """The provenance beside the output."""
    from domino_kit import __version__
    from domino_kit.manifest import library_versions

    return {
        "made_by": f"domino prepare {__version__}",
        "target": target.name,
        "prompts": options.prompts,
        "split": options.split,
        "subset": options.subset,
        "engine": engine,
        "settings": settings,
        "settings_hash": settings_hash(settings),
        "target_config_hash": target.config_hash,
        "chat_template_hash": target.template_hash,
        "libraries": library_versions(),
    }


# -- asking --------------------------------------------------------------------------------------


def _plan(
    options: PrepareOptions, engine: str, target: PreparedTarget, say: Say
) -> tuple[Any, int]:
    """The server to start, ``None`` for other engines, and the longest conversation in tokens."""
    if engine != "sglang":
        return None, target.context
    from domino_kit.serve.plain import plan_plain

    plan = plan_plain(
        options.target or "", options.device, target.dtype, options.extra, os.environ,
        trust_remote_code=options.trust_remote_code,
        seed=None if _sampling(options).greedy else options.seed,
    )  # fmt: skip
    for note in plan.notes:
        say(f"warning: {note}")
    return plan, plan.context


def _ask(
    options: PrepareOptions, rows: Rows, target: PreparedTarget, asking: Asking, plan: Any, say: Say
) -> None:
    """Answer what is missing; the summary comes however it ends."""
    if rows.tally.earlier:
        say(f"going on: {rows.tally.earlier} answers are there already, {rows.missing} to come")
    if not asking.sampling.greedy and (plan is not None or options.url):
        say(
            "note: what a server samples depends, beside the seed, on what it answers at the same "
            "time; another run may draw other answers"
        )
    concurrency = options.concurrency or (SERVED_CONCURRENCY if plan or options.url else 1)
    console = notes_console(options.quiet)
    progress = Progress(console, rows.missing)
    try:
        with _urls(options, plan, say) as urls, progress:

            async def run() -> None:
                async with _engine(options, urls, target, asking, rows, plan) as ask:
                    await rows.answer_all(ask, concurrency, progress)

            asyncio.run(run())
    except (ServerError, KeyboardInterrupt):
        say("stopped early; the same command goes on from here")
        raise
    finally:
        _say_summary(options, rows, progress.seconds, say)


@contextmanager
def _urls(options: PrepareOptions, plan: Any, say: Say) -> Iterator[list[str]]:
    """The servers to ask: those given, one of our own for the time of the block, or none."""
    if plan is None:
        yield check_urls(options.url)
        return
    from domino_kit.serve.plain import plain_server

    say("starting SGLang for the target")
    with plain_server(plan) as url:
        yield [url]


@asynccontextmanager
async def _engine(
    options: PrepareOptions,
    urls: list[str],
    target: PreparedTarget,
    asking: Asking,
    rows: Rows,
    plan: Any,
) -> AsyncIterator[Ask]:
    """The way to ask, ready to use."""
    if not urls:
        yield in_process(target.load(), asking)
        return
    concurrency = options.concurrency or SERVED_CONCURRENCY
    async with open_servers(urls, concurrency) as servers:
        if plan is None:
            yield by_chat(servers, asking, await servers.served_model(target.name))
            return
        first: Question | None = rows.first_question()
        if first is not None:
            await check_rendered(servers, asking, first)
        yield by_token_ids(servers, asking)


def _say_summary(options: PrepareOptions, rows: Rows, seconds: float, say: Say) -> None:
    for line in rows.tally.lines(options.max_new_tokens, seconds):
        say(line)
    say(f"{options.output}: {len(rows.files[0])} rows")
    if options.held_out_output is not None:
        say(f"{options.held_out_output}: {len(rows.files[1])} rows, held out")


# -- showing -------------------------------------------------------------------------------------


def _show(options: PrepareOptions) -> None:
    """Print the first rows of the output; target and thinking mode are its own unless given."""
    from domino_kit.train.show_mask import shown_rows

    facts = read_sidecar(options.output) or {}
    name = options.target or facts.get("target")
    if name is None:
        raise ValueError(
            f"nothing beside {options.output} says whose template its rows are for; give --target."
        )
    thinking = options.thinking
    if thinking is None and isinstance(facts.get("settings"), dict):
        thinking = facts["settings"].get("thinking")
    target = read_target(name, "cpu", "float32", "show", options.trust_remote_code)
    for shown in shown_rows(
        str(options.output), options.show_mask, target.tokenizer, thinking, target.end_tokens
    ):
        print(shown)
