"""A server that returns a target's hidden states, through SGLang's own flags: its command."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from domino_kit.serve.checks import check_environment, check_sglang, check_target_family
from domino_kit.serve.plan import cpu_flags, free_port, server_environment
from domino_kit.serve.plugin import CPU_POOL_TOKENS, HIDDEN_VARIABLE
from domino_kit.serve.server import Server

START_SECONDS = 1800.0


def feature_flags(layer_ids: Sequence[int]) -> list[str]:
    """The flags that make a server return the outputs of these layers, all of them in one piece.

    The algorithm only names the layers' numbering: no draft is loaded. A cached prefix, and every
    chunk of a long prompt but the last, would return no rows.
    """
    return [
        "--enable-return-aux-hidden-states", "--speculative-algorithm", "DFLASH",
        "--return-aux-hidden-state-layer-ids", *map(str, layer_ids),
        "--disable-radix-cache", "--chunked-prefill-size", "-1",
    ]  # fmt: skip


def feature_command(
    target: str,
    layer_ids: Sequence[int],
    *,
    device: str,
    dtype: str,
    longest: int,
    trust_remote_code: bool,
    port: int,
) -> list[str]:
    """SGLang's command for a target whose rows have up to ``longest`` tokens."""
    # -P: a checkout in the working folder must not hide the installed entry points.
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", target]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", device, "--dtype", dtype]
    command += feature_flags(layer_ids)
    if trust_remote_code:
        command.append("--trust-remote-code")
    if device == "cpu":
        pool = max(CPU_POOL_TOKENS, longest + 64)
        # Unchunked prefill makes SGLang reserve more than all memory for activations of a GPU.
        command += ["--max-total-tokens", str(pool), "--mem-fraction-static", "0.5"]
        command += cpu_flags({"--max-total-tokens": str(pool)})
    return command


@contextmanager
def feature_server(
    target: str,
    layer_ids: Sequence[int],
    *,
    model_type: str,
    device: str,
    dtype: str,
    longest: int,
    last_hidden: bool,
    trust_remote_code: bool,
    environ: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """A quiet server of features for the time of the block: its address.

    Raises ``ValueError`` for what can be known before, ``ServerError`` if it does not start.
    """
    environ = os.environ if environ is None else environ
    check_sglang(environ)
    check_environment(environ, device)
    check_target_family(target, model_type)
    port = free_port()
    command = feature_command(
        target, layer_ids, device=device, dtype=dtype, longest=longest,
        trust_remote_code=trust_remote_code, port=port,
    )  # fmt: skip
    variables = server_environment(device) | ({HIDDEN_VARIABLE: "1"} if last_hidden else {})
    with Server(command, variables, "127.0.0.1", port, log=None) as server:
        server.wait_ready(START_SECONDS)
        yield server.url
