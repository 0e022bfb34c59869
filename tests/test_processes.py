"""Several real processes: the same result as one, whoever has rows or anchors, and a clean end."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from domino_kit.checkpoint import load_draft
from domino_kit.train.processes import Processes
from tests.command import domino, refused
from tests.processes_worker import steps
from tests.tiny_chat import chat_rows, save_target, write_jsonl

WORKER = Path(__file__).with_name("processes_worker.py")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def row(place: int, words: int) -> dict[str, Any]:
    return {"id": f"row-{place}", "prompt": f"say {place}", "completion": "w " * words}


def no_anchor(place: int) -> dict[str, Any]:
    """Only its first token is supervised, and no block can stand before it."""
    return {"id": f"bare-{place}", "input_ids": [5, 6, 7, 8, 9], "loss_mask": [1, 0, 0, 0, 0]}


def changes(target: Path, data: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"target.name={target}", f"data.train={data}", f"output.folder={folder}",
        "draft.num_layers=1", "draft.target_layer_ids=[0,2]", "draft.block_size=4",
        "draft.mask_token_id=1", "draft.gru_hidden_dim=16", "draft.emb_dim=12",
        "train.num_anchors=5", "train.lr=1e-3", "train.steps=20", "data.min_supervised=1", *more,
    ]  # fmt: skip


def launched(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count),
             "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *arguments]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_processes_learns_the_same(
    tmp_path: Path, target_folder: Path, count: int
) -> None:
    """Gradients and parameters after 20 steps, against one process, in float32."""
    short = [row(place, 1) for place in range(4)]
    long = [row(place, 9 + 5 * place) for place in range(4, 9)]
    grouped = [*short, *long]
    scattered = [each for pair in zip(short, long, strict=False) for each in pair] + [no_anchor(0)]
    cases: dict[str, tuple[list[str], int]] = {}
    for name, rows, batch, accumulation in [
        ("grouped", grouped, 4, 1),
        ("scattered", scattered, 2, 2),
        ("uneven", grouped[:7], 3, 3),  # 9 rows a step of 7: an epoch ends inside of it
        ("mostly-bare", [*(no_anchor(place) for place in range(6)), long[0]], 4, 1),
        ("regression", scattered, 4, 1),
    ]:
        data = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        more = [f"train.batch_size={batch}", f"train.accumulation={accumulation}"]
        if name == "regression":
            more.append("train.regress_steps=5")
        cases[name] = (changes(target_folder, data, tmp_path / "run", *more), 20)
    result = launched(count, str(WORKER), str(tmp_path), json.dumps(cases))
    assert result.returncode == 0, result.stderr[-3000:]
    for name, (recipe, number) in cases.items():
        wanted = steps(recipe, number, Processes())
        found = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(count)]
        for key, value in wanted.items():
            scale = float(value.abs().max())
            assert float((found[0][key] - value).abs().max()) <= 1e-6 * max(scale, 1.0), (name, key)
            assert all(torch.equal(found[0][key], other[key]) for other in found[1:]), (name, key)


def test_a_process_without_anchors_takes_part(tmp_path: Path, target_folder: Path) -> None:
    """Two processes of the real command; one has no anchor in training and in validation."""
    data = write_jsonl(tmp_path / "rows.jsonl", [no_anchor(0), row(1, 20)])
    held = write_jsonl(tmp_path / "held.jsonl", [no_anchor(7), row(8, 12)])
    folder = tmp_path / "run"
    started = time.monotonic()
    result = domino(
        "train", "--nproc-per-node", "2",
        *changes(target_folder, data, folder, f"data.validation={held}",
                 "output.validate_every=4", "output.log_every=1"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - started < 300
    assert len(re.findall("no anchor in row bare-0", result.stderr)) == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["phase"] == "train"] == list(range(1, 21))
    assert [e["step"] for e in lines if e["phase"] == "validation"] == [4, 8, 12, 16, 20]
    _, manifest = load_draft(folder, torch.float32, "cpu")
    assert manifest is not None and manifest.gate == "passed"


def test_mistakes_are_one_line(tmp_path: Path, target_folder: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(3))
    own = changes(target_folder, data, tmp_path / "run", "train.batch_size=2")
    refused(domino("train", "--nproc-per-node", "2", *own, "train.stepz=1"), "train.stepz")
    result = domino("train", "--nproc-per-node", "3", *own)
    assert result.returncode == 2
    said = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert said and "3 processes cannot share the 2 rows" in said[0]
    result = domino("train", "--nproc-per-node", "2", *own, f"draft.init_from={tmp_path / 'no'}")
    assert result.returncode == 2
    assert result.stderr.count("Error: ") == 1 and "is not a folder" in result.stderr
    assert not (tmp_path / "run").exists()


def test_parts_are_even_and_in_order() -> None:
    items = list(range(10))
    parts = [Processes(rank, 4).share(items) for rank in range(4)]
    assert [each for part in parts for each in part] == items
    assert sorted(map(len, parts)) == [2, 2, 3, 3]
    assert [Processes(rank, 3).share(["only"]) for rank in range(3)].count(["only"]) == 1
