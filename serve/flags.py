"""The SGLang flags that a user gives after ``--``: how they are read, and which do not fit."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from domino_kit.config import DraftConfig
from domino_kit.serve.plugin import PLATFORM_NAME

Flags = Mapping[str, str | None]
"""Flags under their main spelling, with the last value given; ``None`` without a value."""

ALIASES = {
    "--model": "--model-path",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
    "--attention-data-parallel-size": "--attn-dp-size",
}
OWNED = {
    "--model-path": "use --target before it",
    "--speculative-draft-model-path": "use --draft before it",
    "--speculative-algorithm": "leave it out, since it follows from the draft",
    "--speculative-draft-model-quantization": "leave it out, since drafts are not quantised",
    "--host": "give --host before it",
    "--port": "give --port before it",
    "--device": "give --device before it",
    "--dtype": "give --dtype before it",
    "--config": "give its options as flags, since a file could undo what was checked",
}
"""Flags that `domino serve` sets itself, and what to do instead."""

FOREIGN = (
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-token-map",
    "--speculative-adaptive",
    "--speculative-adaptive-config",
    "--speculative-draft-sink-size",
    "--enable-multi-layer-eagle",
    "--uno-lora-path",
)
"""Flags of other kinds of draft, which SGLang ignores, or overrides with a warning at best."""

FOREIGN_PREFIXES = ("--speculative-ngram-", "--speculative-dspark-")

SECURED = ("--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs")
"""Flags after which the server could not be confirmed: it is asked over plain HTTP, without a key."""

BLOCK_FLAGS = ("--speculative-num-draft-tokens", "--speculative-dflash-block-size")
POOL_FLAG = "--speculative-domino-candidate-pool-size"
CPU_ATTENTION = (
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--speculative-draft-attention-backend",
)
READ = (
    *OWNED,
    *FOREIGN,
    *SECURED,
    *BLOCK_FLAGS,
    *CPU_ATTENTION,
    POOL_FLAG,
    "--context-length",
    "--quantization",
    "--revision",
    "--trust-remote-code",
    "--sampling-backend",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--max-total-tokens",
    "--mem-fraction-static",
    "--page-size",
    "--speculative-draft-window-size",
    "--tp-size",
    "--pp-size",
    "--dp-size",
    "--attn-dp-size",
    "--enable-dp-attention",
)
"""Every flag that is looked at; all others pass unseen."""

UNITS: dict[str | None, int] = {
    None: 1,
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}


def read_flags(extra: Sequence[str]) -> dict[str, str | None]:
    """The flags among ``extra``.

    As in argparse, ``--flag=value`` counts, and so does an abbreviation that fits only one flag.
    """
    flags: dict[str, str | None] = {}
    for word, following in zip(extra, [*extra, "--"][1:], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            after = None if following.startswith("--") else following
            flags[_main_name(name)] = value if equals else after
    return flags


def _main_name(name: str) -> str:
    spellings = {**{flag: flag for flag in READ}, **ALIASES}
    if name not in spellings and len(name) > len("--"):
        fitting = [spelling for spelling in spellings if spelling.startswith(name)]
        name = fitting[0] if len(fitting) == 1 else name
    return spellings.get(name, name)


def whole_number(flags: Flags, flag: str, default: int, *, lowest: int = 1) -> int:
    """The number given for ``flag``; with SGLang's suffixes, such as 32k and 32Ki.

    Raises ``ValueError`` for anything but a whole number from ``lowest``.
    """
    if flag not in flags:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)?", flags[flag] or "", re.ASCII)
    number = Decimal(match[1]) * UNITS[match[2]] if match else None
    if number is None or number % 1 or number < lowest:
        raise ValueError(
            f"{flag} is {flags[flag] or 'without a value'}; it must be a whole number "
            f"from {lowest}."
        )
    return int(number)


def check_flags(flags: Flags, config: DraftConfig, device: str) -> tuple[int, list[str]]:
    """The block to serve and what a user should know about the flags, one line each.

    Raises ``ValueError`` for flags that do not fit the draft, the device or `domino serve`.
    """
    _check_owned(flags)
    block, notes = _served_block(flags, config)
    _check_parallel(flags, config, device)
    if device == "cpu":
        check_cpu_flags(flags)
    pool = whole_number(flags, POOL_FLAG, 0, lowest=0)
    if config.has_head and 0 < pool < config.vocab_size:
        notes.append(
            f"{POOL_FLAG} {pool} is approximate: acceptance can differ from `domino "
            "eval-acceptance`, which scores the whole vocabulary."
        )
    return block, notes


def _check_owned(flags: Flags) -> None:
    """Refuse what `domino serve` sets itself, and what belongs to other kinds of draft."""
    for flag in flags:
        if flag in OWNED:
            raise ValueError(f"{flag} after -- is set by domino serve itself; {OWNED[flag]}.")
        if flag in SECURED:
            raise ValueError(
                f"{flag} keeps domino serve from confirming what the server runs; put a proxy in "
                "front of it, or start SGLang yourself with the line that --print-command shows."
            )
        if flag in FOREIGN or flag.startswith(FOREIGN_PREFIXES):
            raise ValueError(
                f"{flag} belongs to other kinds of draft; this one proposes a block, whose length "
                "is set with --speculative-num-draft-tokens."
            )


def _served_block(flags: Flags, config: DraftConfig) -> tuple[int, list[str]]:
    """The block to serve and what to say about it.

    Raises ``ValueError`` for one longer than the draft's own, or two that differ.
    """
    trained = config.block_size
    given = {flag: whole_number(flags, flag, 0, lowest=2) for flag in BLOCK_FLAGS if flag in flags}
    for flag, value in given.items():
        if value > trained:
            raise ValueError(
                f"{flag} is {value}, but the draft was trained with a block of {trained}; give 2 "
                f"to {trained}, or leave it out."
            )
    if len(set(given.values())) > 1:
        raise ValueError(
            f"{' and '.join(f'{flag} {value}' for flag, value in given.items())} differ; give one."
        )
    block = next(iter(given.values()), trained)
    if block == trained:
        return block, []
    return block, [
        f"serving a block of {block} where the draft was trained with {trained}: its backbone then "
        f"sees {trained - block} mask rows fewer than in training, and acceptance may drop."
    ]


def _check_parallel(flags: Flags, config: DraftConfig, device: str) -> None:
    """Refuse the kinds of parallelism that SGLang, or the CPU platform, does not serve."""
    if whole_number(flags, "--pp-size", 1) > 1:
        raise ValueError("--pp-size must be 1: SGLang serves no DFlash draft in a pipeline.")
    spread = whole_number(flags, "--attn-dp-size", 1) > 1 or "--enable-dp-attention" in flags
    if spread and config.has_head:
        raise ValueError(
            "SGLang serves no Domino head with DP attention; leave out --attn-dp-size and "
            "--enable-dp-attention."
        )
    if device != "cpu":
        return
    if spread:
        raise ValueError(
            "DP attention is not implemented on a CPU; leave out --attn-dp-size and "
            "--enable-dp-attention."
        )
    for flag in ("--tp-size", "--dp-size"):
        if whole_number(flags, flag, 1) > 1:
            raise ValueError(f"{flag} must be 1 on a CPU, where one process serves; leave it out.")


def check_cpu_flags(flags: Flags) -> None:
    """Raise ``ValueError`` for a flag that the CPU platform does not implement."""
    for flag in CPU_ATTENTION:
        if flags.get(flag, PLATFORM_NAME) != PLATFORM_NAME:
            raise ValueError(
                f"{flag} is {flags[flag] or 'without a value'}, but {PLATFORM_NAME} is the only "
                "attention backend that runs on a CPU; leave it out."
            )
    if "--speculative-draft-window-size" in flags:
        raise ValueError(
            "--speculative-draft-window-size is not implemented on a CPU; leave it out."
        )
    if flags.get("--quantization", "unquant") != "unquant":
        raise ValueError(
            f"--quantization is {flags['--quantization'] or 'without a value'}, but quantised "
            "targets are not implemented on a CPU; leave it out."
        )
