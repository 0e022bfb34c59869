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
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_kit.decoding import Sampling
from domino_kit.serve.server import ServerError
from domino_kit.train.answers import Ask, Asking, Question, in_process
from domino_kit.train.answers_served import (
    by_chat,
    by_token_ids,
    check_rendered,
    check_urls,
    open_servers,
)
from domino_kit.train.prepare_output import AnswerFile, read_sidecar, settings_hash, write_sidecar
from domino_kit.train.prepare_prompts import read_conversations
from domino_kit.train.prepare_report import Progress, Say, Tally, notes_console
from domino_kit.train.prepare_rows import Rows
from domino_kit.train.prepare_target import PreparedTarget, read_target

SERVED_CONCURRENCY = 16


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command, under the names of its flags."""

    output: Path
    prompts: str | None = None
    target: str | None = None
    engine: str | None = None
    url: tuple[str, ...] = ()
    concurrency: int | None = None
    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: bool | None = None
    system: str | None = None
    limit: int | None = None
    held_out: float = 0.0
    held_out_output: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    show_mask: int = 0
    quiet: bool = False
    extra: tuple[str, ...] = field(default=())


def run_prepare(options: PrepareOptions) -> int:
    """Answer the prompts, or only show rows that are there; returns the exit status.

    Raises ``ValueError`` in one sentence for bad input, ``ServerError`` if a server fails; what was
    answered until then is kept.
    """
    say = notes_console(options.quiet).print
    if options.prompts is not None:
        _answer(options, say)
    elif not options.show_mask:
        raise ValueError("--prompts is missing: the file or hub data set whose prompts are asked.")
    if options.show_mask:
        _show(options)
    return 0


def _answer(options: PrepareOptions, say: Say) -> None:
    engine = _check_options(options)
    assert options.prompts is not None and options.target is not None
    conversations, dropped = read_conversations(
        options.prompts, options.system, options.limit, options.held_out
    )
    if not conversations:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise ValueError(f"--prompts {options.prompts} holds no prompt ({reasons or 'no rows'}).")
    target = read_target(
        options.target, options.device, options.dtype, engine, options.trust_remote_code
    )
    settings = _settings(options, engine, target)
    with ExitStack() as stack:
        files = [stack.enter_context(AnswerFile(options.output, settings, say))]
        if options.held_out_output is not None:
            files.append(stack.enter_context(AnswerFile(options.held_out_output, settings, say)))
        asking = Asking(
            target.tokenizer, target.end_tokens, _sampling(options), options.max_new_tokens,
            options.thinking,
        )  # fmt: skip
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
        for file in files:
            file.sort(rows.names)
            kept = {"rows": len(file), "dropped": dict(tally.dropped)}
            write_sidecar(file.path, {**facts, **kept})
    if not sum(map(len, files)):
        raise ValueError(
            f"no prompt of {options.prompts} could be answered: "
            f"{', '.join(f'{count} {reason}' for reason, count in tally.dropped.items())}"
            f"{'; ' + tally.first_refusal if tally.first_refusal else ''}."
        )


# -- options -------------------------------------------------------------------------------------


def _check_options(options: PrepareOptions) -> str:
    """The engine; raises ``ValueError`` for options that do not go together."""
    if options.target is None:
        raise ValueError("--target is missing: the model whose answers are wanted.")
    engine = options.engine or ("sglang" if options.url else "hf")
    if options.url:
        if engine == "hf":
            raise ValueError("--url asks a server, so it does not go with --engine hf; use one.")
        check_urls(options.url)
    for word in options.extra:
        if not word.startswith("-"):
            if word == options.extra[0]:
                raise ValueError(f"{word!r} is unexpected; SGLang flags are given after --.")
            break
    if options.extra and (engine == "hf" or options.url):
        raise ValueError(
            f"{options.extra[0]} after -- is for a server that this command starts, so it needs "
            "--engine sglang and no --url."
        )
    if engine == "hf" and (options.concurrency or 1) > 1:
        raise ValueError(
            f"--concurrency is {options.concurrency}, but --engine hf answers one prompt at a time; "
            "use --engine sglang for many at once."
        )
    if bool(options.held_out) != (options.held_out_output is not None):
        raise ValueError(
            "--held-out FRACTION and --held-out-output FILE belong together; give both."
        )
    _check_outputs(options)
    return "server" if options.url else engine


def _check_outputs(options: PrepareOptions) -> None:
    named = {"--output": options.output, "--held-out-output": options.held_out_output}
    seen: dict[Path, str] = {}
    if options.prompts is not None and Path(options.prompts).expanduser().exists():
        seen[Path(options.prompts).expanduser().resolve()] = "--prompts"
    for flag, path in named.items():
        if path is None:
            continue
        if path.suffix != ".jsonl":
            raise ValueError(
                f"{flag} is {path}; its name must end in .jsonl, by which domino train knows it."
            )
        place = path.resolve()
        if place in seen:
            raise ValueError(f"{flag} and {seen[place]} are the same file {path}; give two files.")
        seen[place] = flag


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
        say("note: a server samples anew each time; with another run, other answers are drawn")
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
