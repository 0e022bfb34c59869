"""Stage traces of served requests: how one is asked for, and the files that a server writes."""

import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from domino_kit.serve.plugin import PROBE_VARIABLE, TRACE_PARAM
from domino_kit.trace import Record

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
SUFFIX = ".safetensors"


def check_trace_name(name: object) -> str:
    """The name of a trace; ``ValueError`` for one that could not be a folder's everywhere."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise ValueError(
        f"custom_params.{TRACE_PARAM} is {name!r}; a trace's name has 1 to 100 letters, digits, "
        "hyphens and underscores."
    )


def write_record(folder: Path, number: int, record: Record) -> None:
    """Write the record of one step, whole or not at all; errors of files pass through."""
    fresh = folder / f".{number:05d}.new"
    save_file({stage: values.contiguous() for stage, values in record.items()}, fresh)
    fresh.replace(folder / f"{number:05d}{SUFFIX}")


def read_records(folder: Path, name: str) -> list[Record]:
    """The records of a traced request, step by step, for :func:`domino_kit.trace.assemble`.

    They are complete once the request is answered. Raises ``ValueError`` if there is none, one is
    missing in between, or one is unreadable.
    """
    place = folder / check_trace_name(name)
    files = sorted(place.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(
            f"{place} holds no step of a traced request; start the server with "
            f"{PROBE_VARIABLE}={folder}, and send custom_params {{{TRACE_PARAM!r}: {name!r}}} with "
            "a request of two tokens or more (see the server's output if you did)."
        )
    wanted = [f"{number:05d}{SUFFIX}" for number in range(len(files))]
    missing = sorted(set(wanted) - {file.name for file in files})
    if missing:
        raise ValueError(f"{place} lacks {missing[0]}, so its steps cannot be put together.")
    try:
        return [load_file(file) for file in files]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{place} has an unreadable record ({error}); trace it again.") from None
