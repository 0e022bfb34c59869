"""Features out of files: the same training bit for bit, what is refused, and going on after a kill."""

import json
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from domino_kit.train import prepare_features
from domino_kit.train.cached_features import (
    CachedFeatures,
    FeatureIndex,
    facts_of,
    read_index,
    tokens_hash,
)
from domino_kit.train.feature_source import row_encoder
from domino_kit.train.features import encode_row
from domino_kit.train.loop import train
from domino_kit.train.prepare_features import plan_shards, run_prepare_features
from domino_kit.train.recipe import read_recipe
from domino_kit.train.setup import Run, build_run
from tests.command import domino, refused
from tests.tiny_chat import chat_rows, save_target, write_jsonl


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), family="llama")


def changes(target: Path, folder: Path, *more: str) -> list[str]:
    """Overrides of a small recipe with held-out rows."""
    data, held = folder / "rows.jsonl", folder / "held.jsonl"
    if not data.exists():
        write_jsonl(data, chat_rows(12))
        write_jsonl(held, [{**row, "id": f"held-{row['id']}"} for row in chat_rows(22)[20:]])
    return [
        f"target.name={target}", f"data.train={data}", f"data.validation={held}",
        f"output.folder={folder / 'run'}", "draft.num_layers=2", "draft.target_layer_ids=[0,2]",
        "draft.block_size=4", "draft.mask_token_id=1", "draft.gru_hidden_dim=16",
        "draft.emb_dim=12", "train.steps=6", "train.num_anchors=5", "train.lr=1e-2", *more,
    ]  # fmt: skip


def build(target: Path, folder: Path, *more: str) -> Run:
    return build_run(read_recipe(None, changes(target, folder, *more)))


def prepare(target: Path, folder: Path, *more: str, **options: Any) -> Path:
    """Features of the small recipe in three or more shards."""
    output = folder / "features"
    assert run_prepare_features(
        None, changes(target, folder, *more), output, quiet=True, **options
    ) == 0  # fmt: skip
    return output


def small_shards(monkeypatch: pytest.MonkeyPatch, rows: int = 4) -> None:
    """Cut shards after so many rows, which tiny data would never fill."""

    def plan(samples: Any, facts: Any, shard_mb: int) -> list[prepare_features.Shard]:
        (whole,) = plan_shards(samples, facts, shard_mb)
        parts = range(0, len(whole.rows), rows)
        return [
            prepare_features.Shard(f"features-{number:05d}.safetensors", whole.rows[at : at + rows])
            for number, at in enumerate(parts)
        ]

    monkeypatch.setattr(prepare_features, "plan_shards", plan)


@pytest.mark.parametrize(
    "more", [[], ["train.regress_steps=3"], ["train.feature_cache_mb=0", "draft.projector=none"]]
)
def test_training_from_files_equals_online_training_bit_for_bit(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    small_shards(monkeypatch)
    output = prepare(target_folder, tmp_path, *more)
    assert len(list(output.glob("*.safetensors"))) == 4
    online = build(target_folder, tmp_path, *more)
    start = {name: value.clone() for name, value in online.model.state_dict().items()}
    assert train(online, [], quiet=True) == 6
    cached = build(
        target_folder, tmp_path, *more, f"output.folder={tmp_path / 'cached'}",
        "features.backend=cached", f"features.folder={output}",
    )  # fmt: skip
    assert train(cached, [], quiet=True) == 6
    moved = 0
    for name, value in online.model.state_dict().items():
        assert torch.equal(value, cached.model.state_dict()[name]), name
        moved += not torch.equal(value, start[name])
    assert moved > 10
    metrics = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("run", "cached")]
    losses = [
        [line["loss"] for line in map(json.loads, text.splitlines()) if line["phase"] != "validation"]
        for text in metrics
    ]  # fmt: skip
    assert losses[0] == losses[1] and losses[0]


def test_stored_rows_are_the_encoder_s_own(target_folder: Path, tmp_path: Path) -> None:
    run = build(target_folder, tmp_path)
    output = prepare(target_folder, tmp_path, hidden=True)
    index = read_index(output)
    assert index.facts == facts_of(run, hidden=True)
    assert index.source == "hf" and index.toolkit_version
    with_hidden = CachedFeatures(output, facts_of(run, hidden=True), run.target.device)
    without = CachedFeatures(output, facts_of(run, hidden=False), run.target.device)
    encode = encode_row(run.target)
    for sample in [*run.samples, *run.validation]:
        features, hidden = encode(sample)
        assert torch.equal(with_hidden(sample)[0], features)
        assert torch.equal(with_hidden(sample)[1], hidden)
        assert without(sample)[1].shape == (len(sample.input_ids), 0)
    assert features.shape == (len(sample.input_ids), 64)


def test_only_what_is_needed_is_written(target_folder: Path, tmp_path: Path) -> None:
    output = prepare(target_folder, tmp_path)
    (file,) = output.glob("*.safetensors")
    with safe_open(file, framework="pt") as reader:
        names = list(reader.keys())
    rows = read_index(output).rows
    assert sorted(names) == sorted(f"{row.tokens}.features" for row in rows)
    assert not read_index(output).facts.hidden
    assert len(rows) == 14
    assert sorted(path.name for path in output.iterdir()) == [file.name, "index.json"]


def test_equal_rows_are_stored_once(target_folder: Path, tmp_path: Path) -> None:
    rows = chat_rows(3)
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {**rows[1], "id": "again"}])
    write_jsonl(tmp_path / "held.jsonl", [{**rows[0], "id": "held"}])
    output = prepare(target_folder, tmp_path)
    assert [row.id for row in read_index(output).rows] == ["row-0", "row-1", "row-2"]


def opening(target: Path, folder: Path, output: Path, *more: str) -> Callable[[], None]:
    """Open a folder of features for a run, and read all of its rows."""

    def act() -> None:
        run = build(
            target, folder, "features.backend=cached", f"features.folder={output}", *more
        )  # fmt: skip
        with row_encoder(run, needs_hidden=run.recipe.needs_hidden) as encode:
            for sample in run.samples:
                encode(sample)

    return act


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["draft.target_layer_ids=[0,1]"], [r"layer_ids \[0, 2\]", r"needs \[0, 1\]"]),
        (["draft.target_layer_ids=[2,0]"], [r"layer_ids \[0, 2\]", r"needs \[2, 0\]"]),
        (["target.dtype=bfloat16"], ["dtype float32", "needs bfloat16"]),
        (["train.regress_steps=2"], ["no last hidden rows", "--hidden", "regress_steps=0"]),
        (["data.max_length=35"], ["14 rows, but not row 'row-0'", "35 tokens", "and 13 more"]),
    ],
)
def test_features_of_something_else_are_refused(
    target_folder: Path, tmp_path: Path, more: list[str], words: list[str]
) -> None:
    output = prepare(target_folder, tmp_path)
    with pytest.raises(ValueError) as caught:
        opening(target_folder, tmp_path, output, *more)()
    for word in [*words, "index.json"]:
        assert caught.match(word)


def test_another_target_is_refused_even_where_only_a_middle_layer_differs(
    target_folder: Path, tmp_path: Path
) -> None:
    output = prepare(target_folder, tmp_path)
    other = save_target(tmp_path / "other", family="llama")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="a target with other weights"):
        opening(other, tmp_path, output)()
    other = save_target(tmp_path / "third", family="llama", seed=1)
    with pytest.raises(ValueError, match="another embedding"):
        opening(other, tmp_path, output)()


def test_a_row_that_is_missing_is_named(target_folder: Path, tmp_path: Path) -> None:
    output = prepare(target_folder, tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", chat_rows(14))
    with pytest.raises(ValueError, match=r"not row 'row-12' \(\d+ tokens\) and 1 more; prepare"):
        opening(target_folder, tmp_path, output)()


def damage_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def damage_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-4000:-3000] = bytes(1000)
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "said"),
    [(damage_end, "bytes and is torn"), (damage_middle, "is torn: row"), (Path.unlink, "missing")],
)
def test_a_torn_shard_is_named_and_only_that_one_is_redone(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    small_shards(monkeypatch)
    output = prepare(target_folder, tmp_path)
    good = {file.name: file.read_bytes() for file in output.iterdir()}
    kept = {file.name: file.stat().st_mtime_ns for file in output.iterdir()}
    damage(output / "features-00001.safetensors")
    with pytest.raises(ValueError, match=said) as caught:
        opening(target_folder, tmp_path, output)()
    assert caught.match("features-00001.safetensors") and caught.match("prepare-features again")
    prepare(target_folder, tmp_path)
    assert {file.name: file.read_bytes() for file in output.iterdir()} == good
    redone = {f.name for f in output.iterdir() if f.stat().st_mtime_ns != kept[f.name]}
    assert redone == {"features-00001.safetensors", "index.json"}
    opening(target_folder, tmp_path, output)()


def test_other_features_are_never_written_over(target_folder: Path, tmp_path: Path) -> None:
    output = prepare(target_folder, tmp_path)
    with pytest.raises(ValueError, match=r"layer_ids \[0, 2\]"):
        prepare(target_folder, tmp_path, "draft.target_layer_ids=[1,2]")
    with pytest.raises(ValueError, match="holds no last hidden rows"):
        prepare(target_folder, tmp_path, "train.regress_steps=2", hidden=None)
    (output / "index.json").unlink()  # also while it is unfinished
    with pytest.raises(ValueError, match=r"layer_ids \[0, 2\]"):
        prepare(target_folder, tmp_path, "draft.target_layer_ids=[1,2]")


def test_more_rows_add_to_what_is_there(target_folder: Path, tmp_path: Path) -> None:
    """The index then has all rows; shards whose rows changed are written again."""
    prepare(target_folder, tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", chat_rows(16))
    output = prepare(target_folder, tmp_path)
    assert len(read_index(output).rows) == 18
    opening(target_folder, tmp_path, output)()


@pytest.mark.parametrize("finished", [True, False])
def test_a_shorter_run_leaves_nothing_of_a_longer_one(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    small_shards(monkeypatch)
    output = prepare(target_folder, tmp_path)
    if not finished:
        (output / "index.json").unlink()
        damage_end(output / "features-00003.safetensors")
        (output / ".features-00004.safetensors.new").write_bytes(b"half")
    prepare(target_folder, tmp_path, "data.max_rows=4")
    left = {file.name: file.read_bytes() for file in output.iterdir()}
    assert sorted(left) == [
        "features-00000.safetensors",
        "features-00001.safetensors",
        "index.json",
    ]
    output.rename(tmp_path / "shortened")
    fresh = prepare(target_folder, tmp_path, "data.max_rows=4")
    assert {file.name: file.read_bytes() for file in fresh.iterdir()} == left


def test_what_is_left_of_other_features_is_not_removed(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    output = prepare(target_folder, tmp_path)
    for name in ("index.json", "features-00000.safetensors", "features-00001.safetensors"):
        (output / name).unlink()
    before = sorted(output.iterdir())
    words = ["data.max_rows=4", "draft.target_layer_ids=[1,2]"]
    with pytest.raises(ValueError, match=r"features-0000[23].* layer_ids \[0, 2\]"):
        prepare(target_folder, tmp_path, *words)
    assert sorted(output.iterdir()) == before


def test_room_is_made_by_what_an_earlier_run_left(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    output = prepare(target_folder, tmp_path)
    (output / "features-00000.safetensors").unlink()
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(prepare_features.shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    prepare(target_folder, tmp_path, "data.max_rows=2")


def test_a_killed_preparation_goes_on_where_it_was(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in the middle of writing the third shard; the same bytes as without a kill."""
    small_shards(monkeypatch)
    whole = prepare(target_folder, tmp_path)
    good = {file.name: file.read_bytes() for file in whole.iterdir()}
    output = tmp_path / "killed"
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "import pytest\n"
        "from domino_kit.train import prepare_features\n"
        "from tests.test_features_cached import small_shards\n"
        "small_shards(pytest.MonkeyPatch())\n"
        "save, calls = prepare_features.save_file, []\n"
        "def slow(tensors, path, metadata):\n"
        "    save(tensors, path, metadata)\n"
        "    calls.append(path)\n"
        "    if len(calls) == 3:\n"
        "        data = Path(path).read_bytes()\n"
        "        Path(path).write_bytes(data[:len(data) // 2])\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
        "prepare_features.save_file = slow\n"
        f"prepare_features.run_prepare_features(None, {changes(target_folder, tmp_path)!r}, "
        f"Path({str(output)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    names = sorted(file.name for file in output.iterdir())
    assert names == [
        ".features-00002.safetensors.new", "features-00000.safetensors",
        "features-00001.safetensors",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"is not finished \(no index.json\)"):
        opening(target_folder, tmp_path, output)()
    # As after a crash of the machine: a whole name with half of its bytes.
    (output / names[0]).rename(output / "features-00002.safetensors")
    before = (output / "features-00000.safetensors").stat().st_mtime_ns
    time.sleep(0.01)
    assert run_prepare_features(None, changes(target_folder, tmp_path), output, quiet=True) == 0
    assert {file.name: file.read_bytes() for file in output.iterdir()} == good
    assert (output / "features-00000.safetensors").stat().st_mtime_ns == before


def test_too_small_a_disk_is_refused_before_anything_is_written(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(prepare_features.shutil, "disk_usage", lambda _: Usage(0, 0, 100_000))
    with pytest.raises(ValueError, match=r"need 0.2 MB, but .* has 0.1 MB free; choose a larger"):
        prepare(target_folder, tmp_path)
    assert not (tmp_path / "features").exists()


def test_the_projected_size_is_about_the_written_one(target_folder: Path, tmp_path: Path) -> None:
    run = build(target_folder, tmp_path)
    facts = facts_of(run, hidden=True)
    (shard,) = plan_shards([*run.samples, *run.validation], facts, 512)
    output = prepare(target_folder, tmp_path, hidden=True)
    written = sum(file.stat().st_size for file in output.iterdir())
    values = sum(len(s.input_ids) for _, s in shard.rows) * 96 * 4
    assert values < written <= shard.size(facts) < 1.3 * values
    assert len(plan_shards(run.samples, facts, 0)) == len(run.samples)


def test_the_command_says_what_it_does_and_refuses_in_one_line(
    target_folder: Path, tmp_path: Path
) -> None:
    words = changes(target_folder, tmp_path)
    output = tmp_path / "features"
    result = domino("prepare-features", *words, "--output", output)
    assert result.returncode == 0, result.stderr
    assert "14 rows, 64 columns of float32: 0.2 MB to write" in result.stderr
    assert "GB free at" in result.stderr
    assert f"features.backend=cached features.folder={output}" in result.stderr
    again = domino("prepare-features", *words, "--output", output)
    assert again.returncode == 0 and "0.0 MB to write (1 of 1 shards are there)" in again.stderr
    cached = ["features.backend=cached", f"features.folder={output}"]
    tried = domino("train", *words, *cached, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    wrong = domino("train", *words, *cached, "draft.target_layer_ids=[1,2]", "--dry-run")
    refused(wrong, "index.json", "[0, 2]", "[1, 2]")
    assert not (tmp_path / "run").exists()
    index = json.loads((output / "index.json").read_text())
    index["surplus"] = 1
    (output / "index.json").write_text(json.dumps(index))
    refused(domino("train", *words, *cached), "index.json is broken", "surplus")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["features.backend=cached"], "features.folder goes with features.backend=cached"),
        (["features.folder=x"], "features.folder goes with features.backend=cached"),
        (["features.backend=disk"], "features.backend"),
        (["features.kind=hf"], "unknown key features.kind"),
        (["features.url=http://a:1"], "features.url needs features.backend=sglang"),
        (["features.backend=sglang", "features.url=here"], "give an address such as"),
    ],
)
def test_the_section_is_strict(tmp_path: Path, more: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_recipe(None, changes(tmp_path / "target", tmp_path, *more))


def test_a_folder_that_is_none_is_named(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist .* domino prepare-features"):
        opening(target_folder, tmp_path, tmp_path / "nowhere")()


def test_hashes_depend_on_the_tokens_alone(target_folder: Path, tmp_path: Path) -> None:
    run = build(target_folder, tmp_path)
    first, second = run.samples[:2]
    again = type(first)(9, "other", list(first.input_ids), [0] * len(first.input_ids))
    assert tokens_hash(first) == tokens_hash(again) != tokens_hash(second)
    assert FeatureIndex.model_fields["format"].default == 1
