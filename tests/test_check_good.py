"""`domino check` raises no false alarm: good checkpoints of many shapes, and after a round trip."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from domino_kit.eval.check import run_check
from domino_kit.eval.options import CheckOptions
from domino_kit.interop import export_draft, import_draft
from tests.serving import Pair, trained_pair

# Label modes, block sizes, draft layers, target families, tied and untied heads, plain DFlash.
SHAPES: list[dict[str, Any]] = [
    {"family": family, "tied": tied, "shift_label": shift, "block_size": block, "layers": layers}
    for family, tied, shift, block, layers in [
        ("llama", True, True, 4, 1), ("llama", False, False, 4, 3), ("llama", True, False, 8, 2),
        ("llama", False, True, 16, 1), ("llama", True, True, 2, 1), ("llama", False, False, 6, 2),
        ("qwen3", True, True, 16, 1), ("qwen3", False, False, 8, 3), ("qwen3", True, False, 4, 1),
        ("qwen3", False, True, 8, 2), ("qwen3", True, True, 5, 3), ("qwen3", False, False, 16, 1),
        ("qwen2", True, True, 4, 2), ("qwen2", False, False, 8, 1), ("qwen2", True, False, 6, 1),
        ("qwen3_moe", True, True, 4, 1), ("qwen3_moe", False, False, 8, 2),
        ("qwen3_moe", True, False, 4, 3),
    ]
] + [
    {"family": family, "tied": tied, "shift_label": False, "block_size": block, "layers": layers,
     "projector": "none"}
    for family, tied, block, layers in [
        ("llama", True, 4, 1), ("qwen3", False, 8, 2), ("qwen2", True, 16, 1),
    ]
]  # fmt: skip


def checked(pair: Pair, folder: Path) -> dict[str, Any]:
    """The report, from exit status 0."""
    output = folder / "check.json"
    status = run_check(
        CheckOptions(
            str(pair.draft), str(pair.target), device="cpu", limit=1, max_new_tokens=12,
            output=output, page=folder / "check.html",
        )
    )  # fmt: skip
    report = json.loads(output.read_text())
    assert status == 0, report["explanation"]
    return report


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: "-".join(map(str, each.values())))
def test_a_good_checkpoint_passes(tmp_path: Path, shape: dict[str, Any]) -> None:
    report = checked(trained_pair(tmp_path, steps=12, **shape), tmp_path)
    assert report["contract"]["findings"] == []
    assert report["contract"]["unchecked"] == []
    paths = {each["path"] for each in report["stages"]}
    assert paths == {"training run", "replay", "decode"}
    stages = {each["stage"] for each in report["stages"]}
    assert ("gru_states" in stages) == ("projector" not in shape)
    assert {"features", "context_keys", "hidden", "proposals", "accepted_run"} <= stages
    assert "as trained" in (tmp_path / "check.html").read_text()


@pytest.mark.parametrize("form", ["sglang", "specforge", "automodel", "vllm-speculators"])
def test_a_round_trip_leaves_the_check_green(tmp_path: Path, form: Any) -> None:
    pair = trained_pair(tmp_path, steps=12, layers=2)
    export_draft(str(pair.draft), form, tmp_path / "theirs", "keep", None)
    import_draft(str(tmp_path / "theirs"), tmp_path / "ours", {}, None)
    report = checked(Pair(pair.target, tmp_path / "ours"), tmp_path)
    assert report["contract"]["findings"] == []
    assert "training run" in {each["path"] for each in report["stages"]}


def test_what_only_loading_shows_can_be_allowed(tmp_path: Path) -> None:
    """A value between the sampled rows changed: the stages still run once that is accepted."""
    pair = trained_pair(tmp_path, steps=12)
    path = pair.draft / "latest" / "domino_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["weight_hashes"]["fc.weight"] = "0" * 64
    path.write_text(json.dumps(manifest))
    output = tmp_path / "check.json"
    for allow, status in (((), 1), (("weights",), 0)):
        options = CheckOptions(
            str(pair.draft), str(pair.target), device="cpu", limit=1, max_new_tokens=12,
            allow=allow, output=output,
        )  # fmt: skip
        assert run_check(options) == status
        report = json.loads(output.read_text())
        assert report["contract"]["allowed"] == list(allow)
        assert bool(report["stages"]) == bool(allow)
    assert [each["name"] for each in report["contract"]["findings"]] == ["weights"]


def test_the_static_check_of_a_large_draft_stays_small(tmp_path: Path) -> None:
    """An 8B target and its draft as sparse files: under 1 GiB of memory, headers and rows only."""
    script = Path(__file__).parent.parent / "benchmarks" / "static_check.py"
    output = tmp_path / "rows.json"
    subprocess.run(
        [sys.executable, str(script), "--json", str(output), "--folder", str(tmp_path)],
        check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=300,
    )  # fmt: skip
    (found,) = json.loads(output.read_text())
    assert found["stored_gib"] > 15
    assert found["peak_gib"] < 1
    assert found["verdict"] == "as trained"
