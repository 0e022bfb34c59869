"""`domino serve`, first half: check everything and build SGLang's command, without importing it."""

import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_kit.config import DraftConfig, read_config
from domino_kit.serve.checks import (
    check_draft_files,
    check_environment,
    check_port_free,
    check_sglang,
    check_target,
    quantized,
    read_served_config,
)
from domino_kit.serve.flags import (
    POOL_FLAG,
    Flags,
    check_flags,
    read_flags,
)
from domino_kit.serve.plugin import ALLOW_VARIABLE, CPU_POOL_TOKENS, PLATFORM_NAME

if TYPE_CHECKING:
    from domino_kit.manifest import Manifest

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ServeOptions:
    """The options of the command, under the names of its flags.

    ``extra`` is everything after ``--`` and goes to SGLang unchanged.
    """

    draft: str
    target: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    device: str = "auto"
    dtype: str = "auto"
    allow: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServePlan:
    """A server that passed every check that needs no server.

    ``environment`` is what to add to the process's own; ``block_size`` is the served one, which may
    be shorter than ``config.block_size``; ``notes`` are warnings, one line each, and
    ``block_note`` is the one about the block.
    """

    command: list[str]
    environment: dict[str, str]
    target: str
    draft: Path
    config: DraftConfig
    manifest: "Manifest | None"
    device: str
    dtype: str
    block_size: int
    host: str
    port: int
    notes: list[str]
    block_note: str = ""

    def shell_line(self) -> str:
        """The command with its environment, as one line to copy into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


def plan_serve(
    options: ServeOptions, environ: Mapping[str, str], *, check_port: bool = True
) -> ServePlan:
    """Check everything that can be known before a start, and build SGLang's command.

    ``environ`` is the process's environment. Without ``check_port`` the port may be in use, as
    beside a running server. Raises ``ValueError`` in one sentence that says what to change.
    """
    _check_options(options)
    notes = check_sglang(environ)
    draft, config, manifest = _read_draft(options.draft)
    flags = read_flags(options.extra)
    device = resolve_device(options.device)
    dtype = _resolve_dtype(options.dtype, device, config)
    check_environment(environ, device)
    block_size, flag_notes = check_flags(flags, config, device)
    target = _target_name(options, manifest)
    target_config = read_served_config(target, flags)
    check_target(target, target_config, config, flags, device)
    if check_port:
        check_port_free(options.host, options.port)
    notes += [*flag_notes, *_notes(target, target_config, manifest, flags)]
    notes += _check_contract(options, draft, target, target_config, manifest, flags)
    return ServePlan(
        command=_command(options, target, draft, config, device, dtype, flags),
        # A shorter block was asked for by its flag, and a note says what that means.
        environment=server_environment(
            device, (*options.allow, *(["block_size"] if block_size != config.block_size else []))
        ),
        target=target,
        draft=draft,
        config=config,
        manifest=manifest,
        device=device,
        dtype=dtype,
        block_size=block_size,
        host=options.host,
        port=options.port,
        notes=notes,
        block_note=flag_notes[0] if block_size != config.block_size else "",
    )


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resolve_device(wanted: str) -> str:
    """``cpu`` or ``cuda``; raises ``ValueError`` if there is no GPU for ``cuda``."""
    from domino_kit.target import choose_device

    return choose_device(wanted)


def _read_draft(name: str) -> "tuple[Path, DraftConfig, Manifest | None]":
    from domino_kit.checkpoint import resolve_folder
    from domino_kit.manifest import read_manifest

    folder = resolve_folder(name)
    config = read_config(folder / "config.json")
    check_draft_files(folder)
    return folder, config, read_manifest(folder)


def _check_options(options: ServeOptions) -> None:
    if options.device not in DEVICES:
        raise ValueError(
            f"--device is {options.device!r}; use {', '.join(DEVICES)} (and CUDA_VISIBLE_DEVICES "
            "to choose a GPU)."
        )
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype is {options.dtype!r}; use one of {', '.join(DTYPES)}.")
    if not 1 <= options.port <= 65535:
        raise ValueError(f"--port is {options.port}; use 1 to 65535.")


def _resolve_dtype(wanted: str, device: str, config: DraftConfig) -> str:
    if wanted == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    if device == "cuda" and config.has_head and wanted != "bfloat16":
        raise ValueError(
            f"--dtype {wanted} cannot be served on a GPU, where SGLang runs a Domino head in "
            "bfloat16 only; leave --dtype out."
        )
    return wanted


def _target_name(options: ServeOptions, manifest: "Manifest | None") -> str:
    from domino_kit.manifest import target_name

    name = target_name(options.draft, options.target, manifest)
    given = options.target is not None
    return str(Path(name).expanduser()) if given and name[:1] == "~" else name  # SGLang knows no ~


def _notes(target: str, target_config: Any, manifest: "Manifest | None", flags: Flags) -> list[str]:
    """What a user should know about the target but may well want."""
    notes = []
    if manifest is not None and manifest.target.name != target:
        notes.append(
            f"the draft was trained for {manifest.target.name!r}; acceptance is low unless "
            f"{target!r} is the same model."
        )
    said = quantized(target_config, flags)
    if said is not None:
        notes.append(
            f"the target is quantised ({said}): the draft is passed as unquantised, and only "
            "unquantised targets were verified."
        )
    return notes


def _check_contract(
    options: ServeOptions,
    draft: Path,
    target: str,
    target_config: Any,
    manifest: "Manifest | None",
    flags: Flags,
) -> list[str]:
    """Compare the files with what was trained; returns warnings.

    How requests write their prompts is up to them, so those facts only warn. Raises ``ValueError``
    for any other difference that is not allowed.
    """
    from domino_kit.contract import PROMPT_FACTS, check_allowed
    from domino_kit.target_contract import compare_files, prompt_notes, read_tokenizer, target_files

    allowed = check_allowed(options.allow)
    if "--revision" in flags:  # its files may lie beside the default ones, which say nothing here
        tokenizer, why = None, "--revision chooses other files than the default ones"
    else:
        tokenizer, why = read_tokenizer(target, "--trust-remote-code" in flags)
    files = target_files(target, target_config, tokenizer, why)
    if "--revision" in flags:
        files = replace(files, folder=None)
    contract, _, _ = compare_files(draft, files)
    if "--context-length" in flags:
        contract.only_warn(["context_length"])
    contract.only_warn(PROMPT_FACTS)
    contract.allow(allowed)
    contract.stop()
    found = [f"{finding.name}: {finding.message}" for finding in contract.warnings]
    return found + prompt_notes(manifest, tokenizer)


def server_environment(device: str, allow: tuple[str, ...] = ()) -> dict[str, str]:
    """What to add to the environment of a server on ``device``."""
    environment = {ALLOW_VARIABLE: ",".join(allow)} if allow else {}
    if device == "cpu":
        # A GPU that is there must not be found: in places SGLang asks PyTorch, not the platform.
        environment |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    return environment


def _command(
    options: ServeOptions,
    target: str,
    draft: Path,
    config: DraftConfig,
    device: str,
    dtype: str,
    flags: Flags,
) -> list[str]:
    # -P: a checkout in the working folder must not hide the installed entry points.
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--speculative-algorithm", "DOMINO" if config.has_head else "DFLASH"]
    command += ["--speculative-draft-model-path", str(draft)]
    # Without it a draft inherits the target's quantisation, and then nothing is accepted.
    command += ["--speculative-draft-model-quantization", "unquant"]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--device", device, "--dtype", dtype]
    if config.has_head and POOL_FLAG not in flags:
        # The exact rollout, which is what evaluation measures; SGLang's own default of 2048
        # candidates is approximate.
        command += [POOL_FLAG, "0"]
    if device == "cpu":
        command += cpu_flags(flags)
    return [*command, *options.extra]


def cpu_flags(flags: Flags) -> list[str]:
    """What a server on a CPU needs, except where the user says otherwise."""
    words = []
    for flag, value in {
        "--attention-backend": [PLATFORM_NAME],
        "--sampling-backend": ["pytorch"],
        "--disable-cuda-graph": [],
        "--disable-overlap-schedule": [],
        "--sleep-on-idle": [],  # a scheduler that waits by spinning takes a whole core
    }.items():
        if flag not in flags:
            words += [flag, *value]
    if not {"--max-total-tokens", "--mem-fraction-static"} & set(flags):
        # SGLang sizes the cache by the machine's memory, as if that were a GPU's.
        words += ["--max-total-tokens", str(CPU_POOL_TOKENS)]
    return words
