"""Every bundled recipe runs dry on a small copy of its target; its numbers are those in the docs."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from domino_kit.modeling import DominoDraft
from domino_kit.train import gate, prepare_features
from domino_kit.train.cost import TargetCost, batch_operations, batch_shape
from domino_kit.train.dataset import Sample
from domino_kit.train.memory import describe_draft, estimate
from domino_kit.train.prepare_features import run_prepare_features
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.recipe_files import bundled_names, load_values
from domino_kit.train.run import run_training
from domino_kit.train.setup import Run, build_config, feature_layers
from tests.recipe_targets import (
    HEAD_WIDTHS,
    WIDTHS,
    empty_target,
    save_small_parts,
    save_small_target,
)
from tests.tiny_chat import write_jsonl

ROOT = Path(__file__).parent.parent
TARGETS = [name for name in bundled_names() if name != "demo"]
PUBLISHED = {
    "qwen3-0.6b": (83.9, 45.7),
    "qwen3-1.7b": (272.7, 49.1),
    "qwen3-4b": (537.4, 50.8),
    "qwen3-8b": (1048.6, 55.9),
}
"""Millions of parameters in backbone and head, from SpecForge's own model class."""
QWEN3_8B = SimpleNamespace(num_hidden_layers=36)
ROWS = [
    {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": text}]}
    for text in ("so", "yes", "it")
]


def named(name: str, *changes: str) -> Recipe:
    """A bundled recipe."""
    return read_recipe(name, ["data.train=rows.jsonl", "output.folder=run", *changes])


@pytest.fixture(scope="module", params=[n for n in TARGETS if named(n).target.load == "whole"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recipe's name and a folder with a small copy of its target, and rows."""
    folder = tmp_path_factory.mktemp("small")
    expected = named(request.param).target.expected
    yield request.param, save_small_target(folder / "target", expected)
    (folder / "target" / "model.safetensors").unlink()


def small_changes(recipe: Recipe) -> list[str]:
    """The draft's own widths, divided as the target's are."""
    draft = recipe.draft
    changes = [f"draft.gru_hidden_dim={1024 // WIDTHS}", f"draft.emb_dim={256 // WIDTHS}"]
    if draft.intermediate_size is not None:
        changes.append(f"draft.intermediate_size={draft.intermediate_size // WIDTHS}")
    if draft.head_dim is not None:
        changes.append(f"draft.head_dim={draft.head_dim // HEAD_WIDTHS}")
    return changes


@pytest.mark.parametrize("variant", ["domino", "dflash"])
def test_a_recipe_runs_dry_on_a_small_copy_of_its_target(
    small: tuple[str, Path],
    variant: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "ANSWER_TOKENS", 3)
    name, target = small
    recipe = named(f"{name}-{variant}")
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    changes = [
        f"target.name={target}", f"data.train={rows}", f"output.folder={tmp_path / 'run'}",
        *small_changes(recipe),
    ]  # fmt: skip
    assert run_training(
        f"{name}-{variant}", changes, dry_run=True, quiet=True, command=["domino", "train"]
    )
    said = capsys.readouterr().err
    for words in ("target: ", "parameters in the backbone", "expected memory", "estimated time"):
        assert words in said
    assert "not the target that the recipe is for: hidden_size" in said.replace("\n", " ")
    assert recipe.draft.mask_token_id is not None
    check_written(tmp_path / "run-dry-run" / "step-0", recipe, variant)


def check_written(written: Path, recipe: Recipe, variant: str) -> dict[str, Any]:
    """What a dry run wrote is a draft of the recipe's kind that passed the gate; its config."""
    config: dict[str, Any] = json.loads((written / "config.json").read_text())
    inner = config["dflash_config"]
    assert config["vocab_size"] == recipe.target.expected["vocab_size"]
    assert inner["mask_token_id"] == recipe.draft.mask_token_id
    assert (inner.get("projector_type") == "domino") == (variant == "domino")
    assert json.loads((written / "domino_manifest.json").read_text())["gate"] == "passed"
    return config


@pytest.mark.parametrize("variant", ["domino", "dflash"])
def test_a_recipe_for_the_ends_runs_dry_on_stored_features(
    variant: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target of parts that nothing here could run: the draft's shape is the recipe's alone."""
    source = f"kimi-k3-{variant}"
    recipe = named(source)
    target = save_small_parts(tmp_path / "target", recipe)
    width = recipe.target.expected["hidden_size"] // WIDTHS

    def encode(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(sample.input_ids)
        return torch.randn(length, 5 * width), torch.randn(length, width)

    @contextmanager
    def server(*_: Any, **__: Any) -> Iterator[Any]:
        yield encode

    monkeypatch.setattr(prepare_features, "row_encoder", server)
    rows, stored = write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "features"
    changes = [
        f"target.name={target}", f"data.train={rows}", f"output.folder={tmp_path / 'run'}",
        *small_changes(recipe),
    ]  # fmt: skip
    assert run_prepare_features(source, changes, stored, quiet=True) == 0
    changes += ["features.backend=cached", f"features.folder={stored}"]
    assert run_training(source, changes, dry_run=True, quiet=True, command=["domino", "train"])
    said = " ".join(capsys.readouterr().err.split())
    for words in ("expected memory", "estimated time", "only the target's ends were in process"):
        assert words in said
    assert f"hidden_size {width} (recipe: 7168)" in said
    config = check_written(tmp_path / "run-dry-run" / "step-0", recipe, variant)
    for field in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "block_size"):
        assert config[field] == getattr(recipe.draft, field)
    assert config["dflash_config"]["target_layer_ids"] == [7, 23, 51, 67, 83]
    assert (config["intermediate_size"], config["head_dim"]) == (14336 // WIDTHS, 64 // HEAD_WIDTHS)


def real_run(name: str) -> Run:
    """A recipe's run in its real sizes on the meta device, on full rows; nothing can be computed."""
    recipe = named(name)
    target = empty_target(recipe)
    tokenizer = SimpleNamespace(mask_token_id=None, pad_token_id=None)
    config, source = build_config(recipe, target, tokenizer, [])
    with torch.device("meta"):
        model = DominoDraft(config)
    length = recipe.data.max_length
    rows = [Sample(0, "row", [1] * length, [1] * length)] * 200
    identity: Any = None
    return Run(
        recipe, target, identity, model, source, rows, [], Counter(), 1, tokenizer, [], []
    )  # fmt: skip


def numbers(name: str) -> dict[str, Any]:
    """What docs/recipes.md says of a recipe, computed."""
    run = real_run(name)
    batch = batch_shape(run.samples[:2], run.recipe.train.num_anchors, run.model.config)
    whole = run.whole_target
    cost = batch_operations(batch, run.model.config, whole and TargetCost.of(whole))
    return {
        "layers": ", ".join(map(str, run.target.layer_ids)),
        "parameters": tuple(
            float(number) for number in re.findall(r"([\d.]+) M", describe_draft(run.model))
        ),
        "memory": estimate(run),
        "teraoperations": run.recipe.train.accumulation * cost.total / 1e12,
    }


@pytest.mark.parametrize("name", TARGETS)
def test_numbers_are_those_published_and_in_the_documentation(name: str) -> None:
    found = numbers(f"{name}-domino")
    backbone, head = found["parameters"]
    if name in PUBLISHED:
        assert (backbone, head) == PUBLISHED[name]
    plain = numbers(f"{name}-dflash")
    assert plain["parameters"] == (backbone, 0.0)
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
    cells = [cell.strip() for cell in row.strip("|").split("|")][2:]
    gigabytes = [f"{each['memory'].total / 2**30:.0f}" for each in (found, plain)]
    assert cells == [
        found["layers"], f"{backbone} + {head}", f"{found['memory'].target / 2**30:.1f}",
        " / ".join(gigabytes), f"{found['teraoperations']:.0f}",
    ]  # fmt: skip


@pytest.mark.parametrize(("layers", "ids"), [(1, [18]), (3, [1, 17, 33]), (5, [1, 9, 17, 25, 33])])
def test_fewer_layers_read_fewer_features_spread_evenly(layers: int, ids: list[int]) -> None:
    preset = named(f"qwen3-8b-domino-{layers}layer{'s' if layers > 1 else ''}")
    assert preset == named("qwen3-8b-domino", f"draft.num_layers={layers}")
    assert (preset.draft.num_layers, feature_layers(preset.draft, QWEN3_8B)) == (layers, ids)
    wider = named("qwen3-8b", f"draft.num_layers={layers}", "draft.num_features=5")
    assert feature_layers(wider.draft, QWEN3_8B) == [1, 9, 17, 25, 33]


def test_presets_come_in_any_order_and_the_later_wins() -> None:
    assert named("qwen3-4b-3layers-dflash") == named("qwen3-4b-dflash-3layers")
    assert named("qwen3-4b-dflash-domino").draft.projector == "domino"
    assert named("qwen3-4b").draft == named("qwen3-4b-domino").draft


def test_a_recipe_may_extend_a_bundled_one_or_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: qwen3-8b-dflash\ntarget: {name: me/tuned}\ntrain: {lr: 1e-4}\n"
    )
    (tmp_path / "longer.yaml").write_text("extends: mine.yaml\ntrain: {epochs: 9}\n")
    found = read_recipe(tmp_path / "longer.yaml", ["data.train=a", "output.folder=b"])
    assert (found.target.name, found.target.thinking) == ("me/tuned", False)
    assert (found.train.lr, found.train.epochs, found.train.num_anchors) == (1e-4, 9, 512)
    assert found.draft.mask_token_id == 151669


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: mine.yaml\n", "extends itself"),
        ("extends: qwen3-8c\n", "'qwen3-8c' does not exist; did you mean qwen3-8b"),
        ("extends: [a, b]\n", "extends is .'a', 'b'.*a bundled recipe or a file"),
        ("extends: qwen3-8b\ndraft: 3\n", "section 'draft' is 3"),
        ("extends: qwen3-8b\ntrain: {steps: 3}\n", "exactly one of train.steps and train.epochs"),
    ],
)
def test_a_wrong_extends_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_recipe(tmp_path / "mine.yaml", ["data.train=a", "output.folder=b"])


def test_reading_a_recipe_twice_gives_the_same() -> None:
    first = load_values("qwen3-8b-dflash")
    first["train"]["lr"] = 5
    assert load_values("qwen3-8b-dflash")["train"]["lr"] != 5
