"""The options of `domino eval-acceptance` and `domino check`, and which of them go together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from domino_kit.config import read_config, resolve_folder
from domino_kit.eval.prompt_set import check_source


@dataclass(frozen=True)
class Options:
    """The options of `domino eval-acceptance`, under the names of its flags.

    Making them raises ``ValueError`` for options that do not go together, a draft whose config cannot
    be read, and prompts that are not there.
    """

    draft: str
    prompts: str
    target: str | None = None
    compare: tuple[str, ...] = ()
    mode: Literal["replay", "decode", "both"] = "both"
    limit: int | None = None
    max_new_tokens: int = 256
    num_proposals: int | None = None
    batch_size: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    proposals: Literal["greedy", "sampled"] = "greedy"
    seed: int = 0
    thinking: bool | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    output: Path | None = None
    picture: Path | None = None
    min_accept_length: float | None = None
    engine: Literal["hf", "sglang", "both"] = "hf"
    url: str | None = None
    baseline_url: str | None = None
    concurrency: tuple[int, ...] = (1,)
    bucket: int | None = None
    lengths: tuple[int, ...] | None = None
    allow: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        replayed = self.engine != "sglang" and "replay" in self.modes
        if replayed and self.temperature > 0:
            raise ValueError(
                "replay measures greedy decoding; with --temperature use --mode decode."
            )
        if self.engine == "hf" and (self.url or self.baseline_url or self.extra):
            raise ValueError(
                "--url, --baseline-url and flags after -- are for a server; add --engine sglang."
            )
        if self.engine == "sglang" and self.compare:
            raise ValueError("--compare needs --engine hf or both: a server serves one draft.")
        if self.engine != "hf" and self.num_proposals is not None:
            raise ValueError(
                "--num-proposals does not go with a server, which drafts its block; leave it out "
                "(with --engine sglang, a shorter block is: -- --speculative-num-draft-tokens N)."
            )
        check_source(self.prompts)
        for draft in (self.draft, *self.compare):
            if draft != "off":
                read_config(resolve_folder(draft) / "config.json")

    @property
    def modes(self) -> list[str]:
        """The modes to run."""
        return ["replay", "decode"] if self.mode == "both" else [self.mode]


@dataclass(frozen=True)
class CheckOptions:
    """The options of `domino check`, under the names of its flags.

    Making them raises ``ValueError`` for options that do not go together.
    """

    draft: str
    target: str | None = None
    engine: Literal["hf", "sglang", "both"] = "hf"
    prompts: str | None = None
    limit: int | None = None
    max_new_tokens: int = 32
    static: bool = False
    allow: tuple[str, ...] = ()
    thinking: bool | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    url: str | None = None
    output: Path | None = None
    page: Path | None = None
    lengths: tuple[int, ...] | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.engine == "hf" and (self.url or self.extra):
            raise ValueError(
                "--url and flags after -- are for a server; add --engine sglang or both."
            )
        if self.url and self.extra:
            raise ValueError("SGLang flags after -- start a server, so they do not go with --url.")
        if self.static and (self.engine != "hf" or self.lengths is not None):
            raise ValueError("--static reads files only; leave --engine and --lengths out.")
        if self.prompts is not None:
            check_source(self.prompts)
