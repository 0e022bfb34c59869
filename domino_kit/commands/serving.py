"""`domino serve`: a draft with its target behind SGLang."""

from typing import Any

import click

from domino_kit.commands.common import ALLOW, DRAFT, SGLANG_FLAGS, TARGET


@click.command()
@DRAFT
@TARGET
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=30000, help="Port to listen on.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
              default="auto", help="auto: float32 on CPU, bfloat16 on GPU.")  # fmt: skip
@click.option("--print-command", is_flag=True, help="Print SGLang's command line and stop.")
@click.option("--check-tokens", type=click.IntRange(0), default=64,
              help="Length of the greedy answers after the start; 0 asks nothing.")  # fmt: skip
@click.option("--check-prompts", metavar="FILE", help="Ask these prompts instead of built-in ones.")
@click.option("--start-timeout", type=click.FloatRange(1), default=1800, metavar="SECONDS",
              help="How long the server may take to start.")  # fmt: skip
@ALLOW
@SGLANG_FLAGS
def serve(
    print_command: bool,
    check_tokens: int,
    check_prompts: str | None,
    start_timeout: float,
    **options: Any,
) -> None:
    """Serve a draft with its target through SGLang; everything after -- goes to SGLang.

    Exit status: 0 when stopped by Ctrl-C or SIGTERM; 1 if the server failed; 2 on bad input.
    """
    from domino_kit.serve.plan import ServeOptions

    chosen = ServeOptions(**options)
    from domino_kit.serve.run import Confirm, run_serve

    raise SystemExit(
        run_serve(
            chosen,
            Confirm(check_tokens, check_prompts),
            start_seconds=start_timeout,
            print_command=print_command,
        )
    )
