"""Every benchmark runs in its small mode and writes what it promises; no speed is asserted."""

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

FOLDER = Path(__file__).parent.parent / "benchmarks"
VARIANTS = {
    "objective": {"plain", "chunked_checkpoint", "fused"},
    "attention": {"masked", "blocks"},
    "train_step": {"plain", "fast"},
    "scaling": {"fast"},
}
ROOFLINE = {"objective": VARIANTS["objective"], "train_step": {"fast"}}
"""Which variants stand beside the time of their products."""


@pytest.mark.parametrize("name", VARIANTS)
def test_quick_mode(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # as for `python benchmarks/NAME.py`
    module = importlib.import_module(name)
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(module.main, ["--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert {row["variant"] for row in rows} == VARIANTS[name]
    for row in rows:
        assert row["seconds"] > 0
        assert row.get("extra_peak_bytes", 0) >= 0
        assert row["shape"] and row["libraries"]["torch"] and row["threads"]
        assert ("roofline_seconds" in row) == (row["variant"] in ROOFLINE.get(name, ()))
    for word in ("shape", "variant", "seconds", "torch", *VARIANTS[name]):
        assert word in result.output


def test_extra_peak_counts_what_a_call_needs_and_not_what_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    measure, torch = importlib.import_module("measure"), importlib.import_module("torch")
    mb = 2**20

    def needs(extra: int, returned: int) -> object:
        spent = torch.ones(extra * mb // 4)
        return spent.sum(), torch.ones(returned * mb // 4) if returned else None

    found = measure.extra_peak(lambda: needs(256, 0))
    if found is None:
        pytest.skip("this system does not tell a process its peak")
    assert 250 * mb < found < 300 * mb
    assert measure.extra_peak(lambda: needs(0, 256)) < 40 * mb


def test_exponent_of_known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    measure = importlib.import_module("measure")
    assert measure.fitted_exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert measure.fitted_exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0)


def test_the_page_shows_every_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    performance = importlib.import_module("performance")
    printed, rows, chosen = {}, {}, {}
    for name in performance.SECTIONS:
        file = tmp_path / f"{name}.json"
        module = importlib.import_module(name)
        chosen[name] = performance.options(name, "runs/demo/domino", True)
        result = CliRunner().invoke(module.main, [*chosen[name], "--json", str(file)])
        assert result.exit_code == 0, result.output
        printed[name], rows[name] = result.output, json.loads(file.read_text())
    performance.write_page(printed, chosen, tmp_path / "performance.md")
    performance.write_picture(rows, tmp_path / "performance.png")
    page = (tmp_path / "performance.md").read_text()
    for name in performance.SECTIONS:
        assert f"`python benchmarks/{name}.py --quick`" in page
        assert all(row["variant"] in page for row in rows[name])
    assert (tmp_path / "performance.png").read_bytes()[:4] == b"\x89PNG"


def test_a_benchmark_runs_as_a_file_and_a_missing_draft_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    performance = importlib.import_module("performance")
    text, rows = performance.run_script("attention", ["--quick"], tmp_path)
    assert "blocks" in text and {row["variant"] for row in rows} == VARIANTS["attention"]
    result = CliRunner().invoke(performance.main, ["--draft", str(tmp_path / "none")])
    assert result.exit_code == 2 and "make demo" in result.output
