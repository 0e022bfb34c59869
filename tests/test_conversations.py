"""Reading data files: every layout, and one clear error for every kind of broken input."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from domino_kit.conversations import parse_row, read_rows
from tests.tiny_chat import chat_rows, write_jsonl


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    rows = chat_rows(3)
    jsonl = write_jsonl(tmp_path / "a.jsonl", rows)
    parquet = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    assert [r.messages for r in read_rows(str(jsonl))] == [
        r.messages for r in read_rows(str(parquet))
    ]


def test_tool_calls_as_string_or_object_are_one() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    plain, text = (
        parse_row(
            {"messages": [{"role": "user", "content": "x"},
                          {"role": "assistant", "content": None, "tool_calls": calls}]}, "f:1",
        )
        for calls in ([call], json.dumps([call]))
    )  # fmt: skip
    assert plain.messages == text.messages
    assert plain.messages[1]["content"] == ""


def test_cut_answers_are_marked() -> None:
    record = {"prompt": "a", "completion": "b", "finish": "length"}
    assert parse_row(record, "f:1").cut
    assert not parse_row({**record, "finish": "stop"}, "f:1").cut


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1, 2], "f:4 is a list"),
        ({"text": "a"}, "'messages', 'conversations'"),
        ({"messages": []}, "a list of turns"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "turn 1 has the role 'bot'; allowed are"),
        ({"messages": [{"role": "user"}]}, "no text"),
        ({"messages": ["hello"]}, "turn 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
        ({"input_ids": [1]}, "no 'loss_mask'"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but 1"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "'input_ids'"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "0 and 1 only"),
        ({"input_ids": [], "loss_mask": []}, "empty"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{"}, "not JSON"),
    ],
)
def test_broken_rows_are_named(record: Any, words: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_row(record, "f:4")
    assert "f:4" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\n", "holds no rows"),
        ("cut.jsonl", b'{"prompt": "a", "compl', "cut.jsonl:1 is not a JSON object"),
        ("bytes.jsonl", b"\xff\xfe{}", "not UTF-8"),
        ("broken.parquet", b"PAR1 nothing", "not readable parquet"),
        ("table.csv", b"a,b\n", "use .jsonl or .parquet"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_rows(str(path))
    assert name in str(error.value)
    assert words in str(error.value)


def test_max_rows_stops_reading(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat_rows(5))
    path.write_text(path.read_text() + "broken\n")
    assert len(read_rows(str(path), max_rows=5)) == 5
