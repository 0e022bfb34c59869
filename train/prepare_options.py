"""The options of `domino prepare`, and which of them go together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from domino_kit.conversations import is_file


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command, under the names of its flags."""

    output: Path
    prompts: str | None = None
    split: str | None = None
    subset: str | None = None
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


def check_options(options: PrepareOptions) -> str:
    """The engine; raises ``ValueError`` for options that do not go together."""
    if options.target is None:
        raise ValueError("--target is missing: the model whose answers are wanted.")
    engine = options.engine or ("sglang" if options.url else "hf")
    if options.url:
        if engine == "hf":
            raise ValueError("--url asks a server, so it does not go with --engine hf; use one.")
        check_urls(options.url)
    if options.extra and not options.extra[0].startswith("-"):
        raise ValueError(f"{options.extra[0]!r} is unexpected; SGLang flags are given after --.")
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
    for flag in ("split", "subset"):
        if getattr(options, flag) is not None and options.prompts and is_file(options.prompts):
            raise ValueError(
                f"--{flag} is for a hub data set, but --prompts {options.prompts} is a file; leave "
                "it out."
            )
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


def check_urls(urls: Sequence[str]) -> list[str]:
    """The addresses without ``/v1``; raises ``ValueError`` for what is not an address."""
    found = []
    for given in urls:
        try:
            url = httpx.URL(given)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(
                f"--url is {given!r}, which is not the address of a server; give one such as "
                "http://127.0.0.1:30000/v1."
            )
        found.append(given.rstrip("/").removesuffix("/v1"))
    return found
