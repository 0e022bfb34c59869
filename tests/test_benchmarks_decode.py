"""The benchmarks of rollout and replay run, agree with their baselines, and write what they say."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def rows_of(name: str, output: Path, patch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The rows that a benchmark's quick mode writes; it asserts that all variants agree."""
    patch.syspath_prepend(BENCHMARKS)
    for module in (name, "measure"):  # run as files, they are no modules of the toolkit
        patch.delitem(sys.modules, module, raising=False)
    script = importlib.import_module(name)
    result = CliRunner().invoke(
        script.main, ["--quick", *arguments, "--json", str(output)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return json.loads(output.read_text())


@pytest.mark.sglang
@pytest.mark.parametrize("pool", [0, 20])
def test_rollout(pool: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's proposals, ours, and ours with the GRU's inputs from a table."""
    pytest.importorskip("sglang")
    rows = rows_of(
        "rollout", tmp_path / "rows.json", monkeypatch,
        "--table", "--batches", "1,9", "--pools", str(pool),
    )  # fmt: skip
    found = [(row["shape"]["B"], row["variant"]) for row in rows]
    variants = ("sglang", "ours", "ours, table")
    assert found == [(batch, variant) for batch in (1, 9) for variant in variants]
    assert all(row["seconds"] > 0 and row["roofline_seconds"] > 0 for row in rows)
    assert all("extra_peak_bytes" in row for row in rows)


def test_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding one by one and in batches, and replay."""
    rows = rows_of("replay", tmp_path / "rows.json", monkeypatch)
    variants = ["decode, 1 at once", "decode, 8 at once", "replay", "of it, the target's passes"]
    assert [row["variant"] for row in rows] == variants
    assert all(row["seconds"] > 0 and row["shape"]["texts"] == 3 for row in rows)
    assert 1 < rows[0]["accept"] < 4, "some drafts must be accepted, some not"
