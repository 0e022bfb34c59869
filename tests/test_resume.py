"""An interrupted run goes on exactly, from the newest whole checkpoint of the same run."""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from domino_kit.train import state
from domino_kit.train.run import run_training
from domino_kit.train.state import STATE_NAME, checkpoints
from tests.command import DOMINO, domino, refused
from tests.tiny_chat import chat_rows, save_target, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, data, and a whole run of 24 steps in ``whole``, with the state of every step."""
    folder = tmp_path_factory.mktemp("resume")
    save_target(folder / "target")
    write_jsonl(folder / "rows.jsonl", chat_rows(7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "KEPT_STATES", 99)
        changes = recipe(folder, "whole")
        assert run_training(None, changes, dry_run=False, quiet=True, command=[])
    return folder


def recipe(folder: Path, name: str, *changes: str) -> list[str]:
    return [
        f"target.name={folder / 'target'}", f"data.train={folder / 'rows.jsonl'}",
        f"output.folder={folder / name}", "draft.num_layers=1", "draft.target_layer_ids=[0,2]",
        "draft.block_size=4", "draft.mask_token_id=1", "draft.gru_hidden_dim=16",
        "draft.emb_dim=12", "train.num_anchors=5", "train.lr=1e-2", "train.steps=24",
        "train.batch_size=2", "train.accumulation=2", "train.regress_steps=4",
        "output.log_every=1", "output.save_every=1", *changes,
    ]  # fmt: skip


def assert_same_end(first: Path, second: Path) -> None:
    """Weights, moments and metrics, bit for bit."""
    for name in ("model.safetensors", f"latest/{STATE_NAME}"):
        one, other = load_file(first / name), load_file(second / name)
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].equal(other[key]), key
    metrics = []
    for folder in (first, second):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics.append([{k: v for k, v in e.items() if k != "samples_per_second"} for e in lines])
    assert metrics[0] == metrics[1]


def copied(place: Path, name: str, upto: int) -> Path:
    """The whole run as it lay after ``upto`` steps."""
    folder = place / name
    shutil.copytree(place / "whole", folder, symlinks=True)
    for path in checkpoints(folder):
        if int(path.name[5:]) > upto:
            shutil.rmtree(path)
    return folder


@pytest.mark.slow
def test_killed_ten_times(place: Path) -> None:
    """`kill -9` at random moments, most of them while a checkpoint is written."""
    draws, folder, kills = random.Random(3), place / "killed", 0
    while True:
        process = subprocess.Popen(
            [DOMINO, "train", "--resume", *recipe(place, "killed")],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if kills < 10:
            before = len(list(folder.glob("*")))
            deadline = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < deadline:
                if len(list(folder.glob("*"))) > before:  # it has begun to write
                    break
                time.sleep(0.005)
            time.sleep(draws.uniform(0, 0.3))
            process.kill()
            kills += 1
        _, said = process.communicate(timeout=300)
        if process.returncode == 0:
            break
        assert process.returncode == -9, said
    assert kills == 10
    assert not list(folder.glob(".step-*"))
    assert_same_end(place / "whole", folder)


def test_another_number_of_processes_goes_on(place: Path) -> None:
    folder = copied(place, "two", 9)
    result = domino("train", "--resume", "--nproc-per-node", "2", *recipe(place, "two"))
    assert result.returncode == 0, result.stderr
    assert "going on from step 9 of 24" in result.stderr
    one, other = (
        load_file(place / "whole" / "model.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    for key, value in one.items():
        assert float((value - other[key]).abs().max()) < 1e-4 * max(1.0, float(value.abs().max()))


def test_torn_and_mixed_checkpoints_are_skipped_by_name(place: Path) -> None:
    folder = copied(place, "torn", 12)
    torn = folder / "step-12" / STATE_NAME
    torn.write_bytes(torn.read_bytes()[:-100])
    shutil.copy(folder / "step-10" / "model.safetensors", folder / "step-11")
    (folder / "step-10" / STATE_NAME).unlink()
    result = domino("train", "--resume", *recipe(place, "torn"))
    assert result.returncode == 0, result.stderr
    for number, why in ((12, "is not readable"), (11, "and the weights are of different"),
                        (10, "it has no")):  # fmt: skip
        (line,) = [e for e in result.stderr.splitlines() if f"step-{number} is skipped" in e]
        assert why in line
    assert "going on from step 9 of 24" in result.stderr
    assert_same_end(place / "whole", folder)


def test_without_any_whole_checkpoint_nothing_is_started_over(place: Path) -> None:
    folder = copied(place, "none", 3)
    for path in checkpoints(folder):
        (path / STATE_NAME).unlink()
    refused(domino("train", "--resume", *recipe(place, "none")), "none of the 3 checkpoints")
    for path in checkpoints(folder):
        shutil.rmtree(path)
    result = domino("train", "--resume", *recipe(place, "none"))  # nothing there: from the start
    assert result.returncode == 0, result.stderr
    assert_same_end(place / "whole", folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.lr=2e-2"], ["train.lr was 0.01 and is now 0.02"]),
        (["train.steps=30"], ["train.steps was 24"]),
        (["draft.block_size=8"], ["draft.block_size was 4"]),
        (["data.max_rows=5"], ["data.max_rows"]),
    ],
)
def test_another_run_is_refused(place: Path, changes: list[str], words: list[str]) -> None:
    folder = copied(place, "foreign-" + changes[0].split("=")[0], 22)
    before = sorted(path.name for path in folder.rglob("*"))
    refused(domino("train", "--resume", *recipe(place, folder.name, *changes)), *words)
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_other_rows_are_refused(place: Path) -> None:
    copied(place, "other-rows", 22)
    data = write_jsonl(place / "others.jsonl", chat_rows(7)[::-1])
    refused(
        domino("train", "--resume", *recipe(place, "other-rows", f"data.train={data}")),
        "others.jsonl are not those",
    )


def test_a_folder_needs_resume_and_must_be_a_run(place: Path) -> None:
    refused(domino("train", *recipe(place, "whole")), "whole already exists", "--resume")
    (place / "notes").mkdir()
    refused(domino("train", "--resume", *recipe(place, "notes")), "is not the folder of a training")


def test_a_finished_run_stays_as_it_is(place: Path) -> None:
    shutil.copytree(place / "whole", place / "done", symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in (place / "done").glob("step-*")}
    result = domino("train", "--resume", *recipe(place, "done"))
    assert result.returncode == 0, result.stderr
    assert "step 24 of 24" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in (place / "done").glob("step-*")} == before


def test_old_checkpoints_are_removed(place: Path) -> None:
    result = domino("train", *recipe(place, "few", "output.max_checkpoints=3"))
    assert result.returncode == 0, result.stderr
    assert [path.name for path in checkpoints(place / "few")] == ["step-24", "step-23", "step-22"]
    states = [(path / STATE_NAME).exists() for path in checkpoints(place / "few")]
    assert states == [True, True, False]
    assert_same_end(place / "whole", place / "few")
