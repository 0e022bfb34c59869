"""wandb and trackio: the numbers of metrics.jsonl, one run over interruptions, and what is missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from domino_kit.train.loop import train
from domino_kit.train.recipe import read_recipe
from domino_kit.train.run import run_training
from domino_kit.train.tracking import ID_NAME, load_tracker
from tests.test_features_cached import build, changes
from tests.tiny_chat import save_target


class Recorder:
    """A tracker with the documented functions, which keeps what they were given."""

    class Error(Exception):
        """As ``wandb.Error``."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.started, self.logged, self.finished = refuses, [], [], 0

    def init(self, **options: Any) -> None:
        if self.refuses:
            raise self.Error(self.refuses)
        self.started.append(options)

    def log(self, values: dict[str, float], *, step: int) -> None:
        assert len(self.started) == self.finished + 1, "log belongs between init and finish"
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


WORDS = ("output.log_every=1", "output.validate_every=3", "output.save_every=3")


def lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """``metrics.jsonl`` as a tracker should have got it."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [
        (line.pop("step"), {f"{phase}/{name}": value for name, value in line.items()})
        for line in found
        for phase in [line.pop("phase")]
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_metrics_and_goes_on_with_its_run(
    name: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)  # type: ignore[arg-type]
    words = (*WORDS, f"output.tracker={name}", "output.tracker_project=mine")
    run = build(target_folder, tmp_path, *words)
    assert train(run, [], quiet=True) == 6
    folder = tmp_path / "run"
    assert recorder.finished == 1 and recorder.logged == lines(folder)
    assert {step for step, _ in recorder.logged} == {1, 2, 3, 4, 5, 6}
    (options,) = recorder.started
    run_id = (folder / ID_NAME).read_text()
    assert (options["project"], options["name"]) == ("mine", f"run-{run_id}")
    assert options["config"] == run.recipe.model_dump(mode="json")
    assert options.get("id") == (run_id if name == "wandb" else None)
    again = build(target_folder, tmp_path, *words)
    assert train(again, [], quiet=True, resumed=True) == 6
    assert recorder.finished == 2 and recorder.started[1] == options
    assert options["resume"] == "allow"


def test_what_is_missing_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    words = changes(tmp_path / "no-such-target", tmp_path, "output.tracker=trackio")
    with pytest.raises(ValueError, match=r"trackio, which cannot be .*'domino-kit\[trackio\]'"):
        run_training(None, words, dry_run=True, quiet=True, command=[])
    with pytest.raises(ValueError, match="tracker"):
        read_recipe(None, [*words, "output.tracker=mlflow"])
    assert load_tracker(read_recipe(None, [*words, "output.tracker=none"])) is None


def test_a_refusal_of_wandb_is_one_sentence(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Recorder("no API key"))  # type: ignore[arg-type]
    run = build(target_folder, tmp_path, "output.tracker=wandb")
    with pytest.raises(ValueError, match=r"output\.tracker=wandb cannot start: no API key"):
        train(run, [], quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_real_tracker_offline(
    name: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where the optional package is installed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    pytest.importorskip(name)
    run = build(target_folder, tmp_path, *WORDS, f"output.tracker={name}")
    assert train(run, [], quiet=True) == 6
    again = build(target_folder, tmp_path, *WORDS, f"output.tracker={name}")
    assert train(again, [], quiet=True, resumed=True) == 6
    assert any(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
