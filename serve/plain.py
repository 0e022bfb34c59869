"""A server of the target alone, without a draft: what is checked before it starts, and its run."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from domino_kit.serve.checks import (
    check_cpu_target,
    check_environment,
    check_sglang,
    context_length,
    read_served_config,
)
from domino_kit.serve.flags import (
    FOREIGN,
    OWNED,
    SECURED,
    check_cpu_flags,
    read_flags,
    whole_number,
)
from domino_kit.serve.plan import cpu_flags, free_port, resolve_device, server_environment
from domino_kit.serve.plugin import CPU_POOL_TOKENS
from domino_kit.serve.server import Server, ServerError

HOST = "127.0.0.1"
START_SECONDS = 1800.0


@dataclass(frozen=True)
class PlainPlan:
    """A server that passed every check that needs no server.

    ``environment`` is what to add to the process's own, ``context`` the most tokens that a prompt
    and its answer may have together, and ``notes`` are warnings, one line each.
    """

    command: list[str]
    environment: dict[str, str]
    context: int
    notes: list[str]


def plan_plain(
    target: str,
    device: str,
    dtype: str,
    extra: Sequence[str],
    environ: Mapping[str, str],
    *,
    trust_remote_code: bool = False,
) -> PlainPlan:
    """Check target, flags and environment, and build SGLang's command without a draft.

    ``extra`` are SGLang flags, ``environ`` the process's environment. Raises ``ValueError`` in one
    sentence that says what to change.
    """
    notes = check_sglang(environ)
    words = list(extra)
    if trust_remote_code and "--trust-remote-code" not in read_flags(words):
        words.append("--trust-remote-code")
    flags = read_flags(words)
    _check_flags(flags)
    device = resolve_device(device)
    check_environment(environ, device)
    config = read_served_config(target, flags)
    context = whole_number(flags, "--context-length", context_length(config.get_text_config()))
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--host", HOST, "--port", "0", "--device", device, "--dtype", dtype]
    if device == "cpu":
        check_cpu_flags(flags)
        check_cpu_target(target, config)
        command += cpu_flags(flags)
        context = min(context, whole_number(flags, "--max-total-tokens", CPU_POOL_TOKENS))
    return PlainPlan([*command, *words], server_environment(device), context, notes)


def _check_flags(flags: Mapping[str, str | None]) -> None:
    for flag in flags:
        if flag.startswith("--speculative-") or flag in FOREIGN:
            raise ValueError(
                f"{flag} after -- belongs to a draft, but the target answers without one; leave it "
                "out."
            )
        if flag in OWNED:
            raise ValueError(
                f"{flag} after -- is set by domino itself; leave it out, or use the option of the "
                "same meaning before --."
            )
        if flag in SECURED:
            raise ValueError(
                f"{flag} after -- would keep domino from asking its own server; leave it out, or "
                "start the server yourself and give its address with --url."
            )


@contextmanager
def plain_server(plan: PlainPlan) -> Iterator[str]:
    """A quiet server for the time of the block, on a port that is free now: its address.

    Raises ``ServerError`` if it does not start, and says why it ended if it dies meanwhile.
    """
    words, port = list(plan.command), free_port()
    words[words.index("--port") + 1] = str(port)
    with Server(words, plan.environment, HOST, port, log=None) as server:
        server.wait_ready(START_SECONDS)
        try:
            yield server.url
        except ServerError:
            if server.ended(within=1):
                raise ServerError(server.why_ended()) from None
            raise
