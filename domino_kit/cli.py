"""The `domino` command: its group, and what becomes of a user's mistake.

A command checks its options and recipe first and imports what does the work only then, so that help
and mistakes are answered at once.
"""

import os
import sys

import click

from domino_kit.commands.converting import export_command, import_command
from domino_kit.commands.demo import demo
from domino_kit.commands.measuring import check, eval_acceptance
from domino_kit.commands.serving import serve
from domino_kit.commands.training import prepare, prepare_features, train


@click.group(
    commands=[
        prepare, prepare_features, train, eval_acceptance, check, serve, export_command,
        import_command, demo,
    ],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)  # fmt: skip
@click.version_option(package_name="domino-kit", prog_name="domino")
def domino() -> None:
    """Train Domino drafts for speculative decoding, serve them, and measure what they give."""


def main(command: click.Command = domino, name: str | None = None) -> None:
    """Entry point: a user's mistake is one line and exit status 2.

    Set DOMINO_TRACEBACK=1 to see where an error was raised.
    """
    try:
        command.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ValueError, OSError) as error:
        if os.environ.get("DOMINO_TRACEBACK"):
            raise
        click.echo(f"Error: {_one_line(error)}", err=True)
        sys.exit(2)


def _one_line(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}."
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
