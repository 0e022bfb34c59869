"""What several commands share: options, how their values are read, and the exit status."""

from collections.abc import Callable
from pathlib import Path

import click

DEFAULT_LENGTHS = "powers of two"


def _facts(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Facts that can be allowed."""
    from domino_kit.contract import check_allowed

    return check_allowed(value)


def _draft(_: click.Context, __: click.Parameter, value: str) -> str:
    """A folder that is there."""
    from domino_kit.config import resolve_folder

    resolve_folder(value)
    return value


def new_folder(_: click.Context, __: click.Parameter, value: Path) -> Path:
    """A folder that is not there yet."""
    if value.exists():
        raise ValueError(f"{value} already exists; remove it, or choose another with --output.")
    return value


def whole_numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers from 1, separated by commas."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,4,16.")
    return tuple(map(int, parts))


def lengths(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """None without the flag, nothing for the flag alone, else its numbers."""
    if value is None:
        return None
    return () if value == DEFAULT_LENGTHS else whole_numbers(context, parameter, value)


ALLOW = click.option(
    "--allow", multiple=True, metavar="FACT", callback=_facts,
    help="Accept a fact that differs from training, by its name in the error; repeatable.",
)  # fmt: skip
DRAFT = click.option(
    "--draft", required=True, metavar="FOLDER", callback=_draft, help="Draft checkpoint."
)
TARGET = click.option(
    "--target", metavar="NAME", help="Target model; default: the one in the manifest."
)
THINKING = click.option(
    "--thinking/--no-thinking", default=None, help="Thinking mode; default: as trained."
)
DEVICE = click.option("--device", default="auto", help="auto, cpu or cuda.")
DTYPE = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
    help="Compute type; auto: float32 on CPU, bfloat16 on GPU.",
)  # fmt: skip
TRUST = click.option("--trust-remote-code", is_flag=True, help="Run the target's own model code.")
NEW_FOLDER = click.option(
    "--output", required=True, type=click.Path(path_type=Path), callback=new_folder,
    help="Folder to write; must not exist yet.",
)  # fmt: skip
SGLANG_FLAGS = click.argument(
    "extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG FLAGS]"
)


def exit_status(run: Callable[[], int]) -> int:
    """The exit status of ``run``: 1, with one line, if a server fails or a draft differs."""
    from domino_kit.parity import ParityError
    from domino_kit.serve.server import ServerError

    try:
        return run()
    except (ServerError, ParityError) as error:
        click.echo(f"Error: {error}", err=True)
        return 1
