"""Training with only the target's ends in process: the same result, and what is not checked then."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from domino_kit.draft_contract import check_draft
from domino_kit.manifest import read_manifest
from domino_kit.parity import ParityError
from domino_kit.target_config import JsonConfig
from domino_kit.target_contract import compare_files, read_target_files
from domino_kit.train import prepare_features
from domino_kit.train.cached_features import read_index
from domino_kit.train.feature_source import open_source
from domino_kit.train.features import encode_row
from domino_kit.train.gate import check_checkpoint
from domino_kit.train.loop import train
from domino_kit.train.prepare_features import run_prepare_features
from domino_kit.train.report import write_checkpoint
from domino_kit.train.run import run_training
from domino_kit.train.setup import Run
from tests.faults import TRAINING_FAULTS
from tests.test_features_cached import build, changes, prepare
from tests.test_target_ends import split_parts
from tests.tiny_chat import save_target


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), tie_word_embeddings=False)


def ends_words(stored: Path, output: Path) -> list[str]:
    """Overrides for a run of the target's ends on stored features."""
    return [
        "target.load=ends", "features.backend=cached", f"features.folder={stored}",
        f"output.folder={output}", "output.validate_every=3",
    ]  # fmt: skip


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail("no model may be built")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


def assert_same_training(first: Run, second: Run) -> None:
    """Parameters, metrics and what the manifest says of the target, bit for bit."""
    assert first.identity == second.identity
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    lines = [
        [json.loads(line) for line in (run.recipe.output.folder / "metrics.jsonl").open()]
        for run in (first, second)
    ]
    for line in [*lines[0], *lines[1]]:
        line.pop("samples_per_second", None)
    assert lines[0] == lines[1]
    assert any("replay_accept_length" in line for line in lines[0])


@pytest.mark.parametrize(
    "more",
    [
        ["train.regress_steps=3"],
        ["train.distill=forward_kl", "train.distill_mix=0.5"],
        ["draft.projector=none"],
    ],
)
def test_ends_train_as_the_whole_target_bit_for_bit(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    stored = prepare(target_folder, tmp_path, *more)
    whole = build(target_folder, tmp_path, *more, "output.validate_every=3")
    start = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert train(whole, [], quiet=True) == 6
    no_model(monkeypatch)
    ends = build(target_folder, tmp_path, *more, *ends_words(stored, tmp_path / "ends"))
    assert whole.whole_target is not None and ends.whole_target is None
    assert train(ends, [], quiet=True) == 6
    assert_same_training(whole, ends)
    now = ends.model.state_dict()
    assert sum(not torch.equal(now[name], value) for name, value in start.items()) > 10
    contract, _, _ = compare_files(tmp_path / "ends", read_target_files(str(target_folder), False))
    assert contract.findings == []
    assert {"target_config", "target_weights", "gate"} <= set(contract.checked)
    (lacking,) = contract.unchecked
    assert lacking.startswith("gate: only the target's ends were in process")
    manifest = read_manifest(tmp_path / "run")
    assert manifest is not None and manifest.gate == "passed" and manifest.gate_lacks is None
    monkeypatch.undo()  # what is loaded may change when a run goes on
    again = build(target_folder, tmp_path, *more, f"output.folder={tmp_path / 'ends'}")
    assert train(again, [], quiet=True, resumed=True) == 6


@contextmanager
def as_if_served(target: Any) -> Iterator[Any]:
    """The features that a server of the target would return."""
    yield encode_row(target)


def test_a_target_that_transformers_does_not_know_trains_from_stored_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of parts and an unknown model type; the features were computed elsewhere."""
    folder = save_target(tmp_path / "target", tie_word_embeddings=False)
    known = build(folder, tmp_path, "output.validate_every=3")
    assert train(known, [], quiet=True) == 6
    split_parts(folder)
    no_model(monkeypatch)
    monkeypatch.setattr(
        prepare_features, "row_encoder", lambda *_, **__: as_if_served(known.target)
    )
    words = changes(folder, tmp_path, "target.load=ends", "features.backend=sglang")
    stored = tmp_path / "features"
    assert run_prepare_features(None, words, stored, quiet=True) == 0
    assert read_index(stored).source == "sglang"
    run = build(folder, tmp_path, *ends_words(stored, tmp_path / "unknown"))
    assert isinstance(run.target.text_config, JsonConfig)
    assert train(run, [], quiet=True) == 6
    for name, value in known.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name]), name
    contract, _, _ = compare_files(tmp_path / "unknown", read_target_files(str(folder), False))
    assert contract.findings == [] and "target_weights" in contract.checked
    again = build(
        folder, tmp_path, *ends_words(stored, tmp_path / "again"),
        f"draft.init_from={tmp_path / 'unknown'}",
    )  # fmt: skip
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_features_prepared_in_process_load_the_whole_target(
    target_folder: Path, tmp_path: Path
) -> None:
    """So one recipe does for both commands."""
    words = [*ends_words(tmp_path / "features", tmp_path / "run")]
    stored = prepare(target_folder, tmp_path, *words)
    run = build(target_folder, tmp_path, *words)
    with open_source(run) as source:
        source.encode(run.samples[0])
    assert read_index(stored).source == "hf" and run.whole_target is None


@pytest.mark.parametrize("fault", [f for f in TRAINING_FAULTS if f.gated], ids=lambda f: f.name)
def test_the_gate_finds_faults_without_the_target(
    target_folder: Path, tmp_path: Path, fault: Any
) -> None:
    stored = prepare(target_folder, tmp_path, *fault.changes)
    run = build(target_folder, tmp_path, *ends_words(stored, tmp_path / "run"), *fault.changes)
    torch.nn.init.normal_(run.model.embed_proj[2].weight, std=0.5)
    with pytest.MonkeyPatch.context() as patch, open_source(run) as source:
        fault.plant(patch)
        written = write_checkpoint(run, 0, ["test"], {}, 0.0)
        with pytest.raises(ParityError, match=f"replay differs at {fault.stage}: "):
            check_checkpoint(run, written, source)
    contract, _, _ = check_draft(written)
    assert [finding.name for finding in contract.errors] == ["gate"]


def test_a_dry_run_says_what_it_cannot_check(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = prepare(target_folder, tmp_path)
    words = changes(target_folder, tmp_path, *ends_words(stored, tmp_path / "run"))
    capsys.readouterr()
    assert run_training(None, words, dry_run=True, quiet=True, command=[])
    said = " ".join(capsys.readouterr().err.split())
    assert "check of checkpoints: only the target's ends were in process (target.load=ends)" in said
    assert "but not decoding, nor the target's own features and choices" in said
    assert "drafts as the training graph does" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["target.load=ends"], "target.load=ends needs features.backend=sglang or cached"),
        (
            ["target.load=ends", "features.backend=sglang", "draft.init=target"],
            "draft.init=target copies layers of the whole target",
        ),
        (
            ["target.embedding_name=x"],
            "target.embedding_name does nothing without target.load=ends",
        ),
        (["target.head_name=x"], "target.head_name does nothing without"),
        (["target.load=half"], "target.load"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, more: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(tmp_path / "target", tmp_path, *more)
