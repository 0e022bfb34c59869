"""The files that `domino prepare` writes: rows as they come, what was there already, provenance.

A row is written whole, with its line end, and synced before the next one: after a kill at most the
last line is torn, and the next run cuts that off. Rows are written as answers finish, so that
nothing finished is lost to a slower one before it, and a complete file is put into the prompts'
order at the end, in one rename. A run that was killed and started again thus ends with the same
file as one that was not.
"""

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from domino_kit.checkpoint import write_whole
from domino_kit.fingerprint import json_hash

SIDECAR = ".meta.json"


@dataclass(frozen=True)
class Done:
    """An answer that was there already: its message, and the hash of what it answers."""

    message: dict[str, Any]
    prompt: str


def settings_hash(settings: dict[str, Any]) -> str:
    """What identifies the settings of an answer, short enough for every row."""
    return json_hash(settings)[:12]


def answer_row(
    name: str,
    messages: Sequence[dict[str, Any]],
    finish: str,
    settings: str,
    tools: list[Any] | None,
) -> dict[str, Any]:
    """A training row; ``messages`` end with the answer, and only that one is to be learnt."""
    turns = [
        {**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in messages[:-1]
    ]
    row: dict[str, Any] = {"id": name, "messages": [*turns, messages[-1]]}
    if tools is not None:
        # As a string: objects of many shapes in one column are no table for other readers.
        row["tools"] = json.dumps(tools, ensure_ascii=False)
    return {**row, "finish": finish, "settings": settings}


def prompt_hash(messages: Sequence[dict[str, Any]]) -> str:
    """Of the turns before an answer, whatever they weigh."""
    return json_hash([{k: v for k, v in turn.items() if k != "weight"} for turn in messages])


class AnswerFile:
    """One output file, locked while it is open; opening reads what is there.

    ``done`` are its rows by id. Raises ``ValueError`` if it was made with other settings, is not an
    output of this command, or is being written by another process.
    """

    def __init__(self, path: Path, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        self.path = path
        self.done: dict[str, Done] = {}
        self._settings, self._say = settings, say
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def __enter__(self) -> "AnswerFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("ab+")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path} is being written by another domino prepare; wait for it, or "
                    "choose another --output."
                ) from None
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        wanted = settings_hash(self._settings)
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._say(f"{self.path}: cut off line {number}, which is torn ({len(line)} bytes)")
                self._file.truncate(self._end)
                break
            row = _parse(line, f"{self.path}:{number}")
            if row["settings"] != wanted:
                raise ValueError(
                    f"{self.path}:{number} was made with other settings{self._difference()}; choose "
                    "another --output, or use the same settings to go on with this one."
                )
            self._note(row["id"], len(line))
            *asked, message = row["messages"]
            self.done[row["id"]] = Done(message, prompt_hash(asked))

    def _difference(self) -> str:
        """Which settings differ, where the file beside the output says so."""
        there = (read_sidecar(self.path) or {}).get("settings")
        if not isinstance(there, dict):
            return ""
        parts = [
            f"{name} {there.get(name)!r} there and {value!r} now"
            for name, value in self._settings.items()
            if there.get(name) != value
        ]
        return f" ({', '.join(parts)})" if parts else ""

    def _note(self, name: str, size: int) -> None:
        self._places[name] = (self._end, size)
        self._end += size

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; it is on the disk when this returns."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._note(row["id"], len(line))

    def sort(self, names: Sequence[str]) -> None:
        """Put the rows into the order of ``names``; others follow in their own order."""
        present = [name for name in names if name in self._places]
        known = set(present)
        order = [*present, *(name for name in self._places if name not in known)]
        if order == list(self._places):
            return
        fresh = self.path.with_name(f".{self.path.name}.new")
        with self.path.open("rb") as source, fresh.open("wb") as sink:
            for name in order:
                start, size = self._places[name]
                source.seek(start)
                sink.write(source.read(size))
            sink.flush()
            os.fsync(sink.fileno())
        fresh.replace(self.path)

    def __len__(self) -> int:
        return len(self._places)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    fields = {"id": str, "messages": list, "finish": str, "settings": str}
    if not isinstance(row, dict) or not all(
        isinstance(row.get(name), kind) for name, kind in fields.items()
    ):
        raise ValueError(
            f"{where} is not a row that domino prepare wrote (it has id, messages, finish and "
            "settings); choose another --output, which is never overwritten."
        )
    return row


# -- provenance ----------------------------------------------------------------------------------


def sidecar_path(data: Path) -> Path:
    """Where the provenance of a data file lies."""
    return data.with_name(data.name + SIDECAR)


def write_sidecar(data: Path, facts: dict[str, Any]) -> None:
    """Write the provenance of a data file beside it."""
    write_whole(sidecar_path(data), json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def read_sidecar(data: Path) -> dict[str, Any] | None:
    """The provenance beside a data file, ``None`` where there is none that can be read."""
    try:
        facts = json.loads(sidecar_path(data).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def provenance(data: str, given: str) -> str:
    """Where the answers of ``data`` come from: as ``given``, or from the file beside the data."""
    facts = read_sidecar(Path(data).expanduser()) if given == "unknown" else None
    if facts is None:
        return given
    settings = facts.get("settings")
    shown = ", ".join(f"{k} {v}" for k, v in settings.items()) if isinstance(settings, dict) else ""
    return f"domino prepare: answers of {facts.get('target')} ({shown})"
