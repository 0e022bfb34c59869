"""Reading conversations: JSONL, parquet or a hub data set, in every common layout."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
MESSAGE_EXTRAS = ("reasoning_content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class Row:
    """One conversation: ``messages``, or ready ``input_ids`` with their ``loss_mask``.

    ``where`` names file and line for error messages. ``cut`` says that the last answer stopped at a
    length limit (``"finish": "length"``), so the end token after it is not the target's own.
    """

    where: str
    row_id: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    category: str | None = None
    cut: bool = False


def read_rows(
    source: str, split: str = "train", max_rows: int | None = None, subset: str | None = None
) -> list[Row]:
    """All rows of a file or hub data set; ``split`` and ``subset`` are of the latter.

    Raises ``ValueError`` naming file, line and field for anything that is not a conversation.
    """
    rows: list[Row] = []
    for where, record in read_records(source, split, subset):
        rows.append(parse_row(record, where))
        if max_rows is not None and len(rows) == max_rows:
            break
    if not rows:
        raise ValueError(f"{source} holds no rows.")
    return rows


def read_records(
    source: str, split: str = "train", subset: str | None = None
) -> Iterator[tuple[str, Any]]:
    """Raw records of a file or hub data set, each with where it stands."""
    if is_file(source):
        return _read_file(Path(source).expanduser())
    return _read_hub(source, split, subset)


def is_file(source: str) -> bool:
    """Whether a source of data names a file, there or not, and no hub data set."""
    path = Path(source).expanduser()
    known = path.suffix in (".jsonl", ".json", ".parquet")
    return known or path.exists() or source.startswith("/")


def check_file(path: Path) -> None:
    """Raise ``ValueError`` unless a data file is there and holds anything."""
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"data file {path} {what}.")
    if path.stat().st_size == 0:
        raise ValueError(f"data file {path} is empty.")


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    check_file(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in (".jsonl", ".json"):
        return _read_jsonl(path)
    raise ValueError(f"data file {path} has an unknown type; use .jsonl or .parquet.")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    yield where, json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{where} is not a JSON object ({error.msg}); the file needs one complete "
                        "object a line, and this line may be cut."
                    ) from None
        except UnicodeDecodeError:
            raise ValueError(f"data file {path} is not UTF-8 text.") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data file {path} is not readable parquet: {error}") from None
    for number, record in enumerate(table.to_pylist(), start=1):
        yield f"{path}:row {number}", {k: v for k, v in record.items() if v is not None}


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, subset, split=split, streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name!r} is not a data file, and as a hub data set it cannot be loaded: {first_line}"
        ) from None
    for number, record in enumerate(loaded, start=1):
        yield f"{name}[{split}]:row {number}", {k: v for k, v in record.items() if v is not None}


def parse_row(record: Any, where: str) -> Row:
    """One record in any layout: messages, conversations, prompt/completion or input_ids."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a {type(record).__name__}, not an object with fields.")
    row_id = str(record.get("id", where))
    category = record.get("category")
    finish = record.get("finish", record.get("finish_reason"))
    common: dict[str, Any] = {
        "cut": finish == "length",
        "where": where,
        "row_id": row_id,
        "category": None if category is None else str(category),
    }
    if "input_ids" in record:
        ids, mask = _parse_ids(record, where)
        return Row(**common, input_ids=ids, loss_mask=mask)
    for key in ("messages", "conversations"):
        if key in record:
            messages = _parse_messages(record[key], f"{where}, field {key!r}")
            tools = _from_json(record.get("tools"), f"{where}, field 'tools'")
            return Row(**common, messages=messages, tools=tools or None)
    if "prompt" in record and "completion" in record:
        messages = _side_messages(record, "prompt", "user", where)
        messages += _side_messages(record, "completion", "assistant", where)
        return Row(**common, messages=messages)
    raise ValueError(
        f"{where} has fields {sorted(record)}; it needs 'messages', 'conversations', "
        "'prompt' and 'completion', or 'input_ids' and 'loss_mask'."
    )


def _parse_ids(record: dict[str, Any], where: str) -> tuple[list[int], list[int]]:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if mask is None:
        raise ValueError(f"{where} has 'input_ids' but no 'loss_mask' that marks the answers.")
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        whole = isinstance(values, list) and all(type(value) is int for value in values)
        if not whole:
            raise ValueError(f"{where}, field {name!r}: a flat list of whole numbers is needed.")
    if len(ids) != len(mask):
        raise ValueError(f"{where}: {len(ids)} input_ids but {len(mask)} loss_mask entries.")
    if not ids or min(ids) < 0:
        raise ValueError(f"{where}: input_ids is empty or has a negative id.")
    if not set(mask) <= {0, 1}:
        raise ValueError(f"{where}: loss_mask may hold 0 and 1 only.")
    return ids, mask


def _side_messages(record: dict[str, Any], key: str, role: str, where: str) -> list[dict[str, Any]]:
    """A prompt or completion, which is a text or a list of turns."""
    if isinstance(record[key], str):
        return [{"role": role, "content": record[key]}]
    return _parse_messages(record[key], f"{where}, field {key!r}")


def _parse_messages(turns: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: a list of turns is needed, found {turns!r:.80}.")
    return [_parse_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]


def _parse_turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {turn!r:.80}, not an object with a role and a text.")
    role = turn.get("role", turn.get("from"))
    if role not in ROLES:
        allowed = ", ".join(sorted(ROLES))
        raise ValueError(f"{where} has the role {role!r}; allowed are {allowed}.")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _join_parts(content, where)
    if not isinstance(content, str):
        raise ValueError(f"{where} has no text: 'content' (or 'value') is {content!r:.80}.")
    message: dict[str, Any] = {"role": ROLES[role], "content": content}
    if _weight(turn, where) == 0:
        message["weight"] = 0
    for key in MESSAGE_EXTRAS:
        if turn.get(key) is not None:
            message[key] = turn[key]
    if "tool_calls" in message:
        message["tool_calls"] = _from_json(message["tool_calls"], f"{where}, 'tool_calls'")
    return message


def _weight(turn: dict[str, Any], where: str) -> int:
    """1, or 0 for an answer that is context only, as in OpenAI's format for fine-tuning."""
    weight = turn.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise ValueError(f"{where} has the weight {weight!r:.80}; allowed are 0 and 1.")
    return int(weight)


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or "text" not in part:
            raise ValueError(f"{where} has the content part {part!r:.80}; only text can be used.")
        texts.append(part["text"])
    return "".join(texts)


def _from_json(value: Any, where: str) -> Any:
    """Tool fields come as objects or as JSON strings of them; templates want objects."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is a string that is not JSON ({error.msg}).") from None
