"""The options of `domino prepare`, and which of them go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from domino_kit.conversations import check_file, is_file


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command, under the names of its flags.

    Without ``prompts`` nothing is answered, and rows that are there can be shown. Making them raises
    ``ValueError`` for options that do not go together, and for a file of prompts that is not there.
    """

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
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.prompts is None:
            if not self.show_mask:
                raise ValueError(
                    "--prompts is missing: the file or hub data set whose prompts are asked."
                )
            return
        if self.target is None:
            raise ValueError("--target is missing: the model whose answers are wanted.")
        if bool(self.held_out) != (self.held_out_output is not None):
            raise ValueError(
                "--held-out FRACTION and --held-out-output FILE belong together; give both."
            )
        _check_prompts(self, self.prompts)
        _check_engine(self)
        _check_outputs(self)

    @property
    def answered_by(self) -> str:
        """The engine: ``hf``, ``sglang``, or ``server`` for one that runs already."""
        return "server" if self.url else self.engine or "hf"


def _check_prompts(options: PrepareOptions, prompts: str) -> None:
    if not is_file(prompts):
        return
    for flag in ("split", "subset"):
        if getattr(options, flag) is not None:
            raise ValueError(
                f"--{flag} is for a hub data set, but --prompts {prompts} is a file; leave it out."
            )
    check_file(Path(prompts).expanduser())


def _check_engine(options: PrepareOptions) -> None:
    if options.url and options.engine == "hf":
        raise ValueError("--url asks a server, so it does not go with --engine hf; use one.")
    check_urls(options.url)
    if options.extra and not options.extra[0].startswith("-"):
        raise ValueError(f"{options.extra[0]!r} is unexpected; SGLang flags are given after --.")
    if options.extra and options.answered_by != "sglang":
        raise ValueError(
            f"{options.extra[0]} after -- is for a server that this command starts, so it needs "
            "--engine sglang and no --url."
        )
    if options.answered_by == "hf" and (options.concurrency or 1) > 1:
        raise ValueError(
            f"--concurrency is {options.concurrency}, but --engine hf answers one prompt at a time; "
            "use --engine sglang for many at once."
        )


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
