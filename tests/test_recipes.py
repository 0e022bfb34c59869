"""Every bundled recipe runs dry on a small copy of its target; counts are those that were published."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from domino_kit.modeling import DominoDraft
from domino_kit.target import Target
from domino_kit.train import gate
from domino_kit.train.memory import describe_draft
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.recipe_files import bundled_names, load_values
from domino_kit.train.run import run_training
from domino_kit.train.setup import build_config, feature_layers
from domino_kit.train.target_facts import empty_model
from tests.recipe_targets import HEAD_WIDTHS, WIDTHS, save_small_target, target_config
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
ROWS = [
    {"messages": [{"role": "user", "content": "say it"}, {"role": "assistant", "content": text}]}
    for text in ("so", "yes", "it")
]


def named(name: str, *changes: str) -> Recipe:
    """A bundled recipe."""
    return read_recipe(name, ["data.train=rows.jsonl", "output.folder=run", *changes])


@pytest.fixture(scope="module", params=TARGETS)
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
    written = tmp_path / "run-dry-run" / "step-0"
    config = json.loads((written / "config.json").read_text())
    inner = config["dflash_config"]
    assert config["vocab_size"] == recipe.target.expected["vocab_size"]
    assert inner["mask_token_id"] == recipe.draft.mask_token_id
    assert (inner.get("projector_type") == "domino") == (variant == "domino")
    assert json.loads((written / "domino_manifest.json").read_text())["gate"] == "passed"


def real_draft(recipe: Recipe) -> tuple[DominoDraft, list[int]]:
    """A draft of the real sizes on the meta device, and its feature layers."""
    model = empty_model(target_config(recipe.target.expected))
    target = Target(model, feature_layers(recipe.draft, model.config.get_text_config()))
    tokenizer = SimpleNamespace(mask_token_id=None, pad_token_id=None)
    config, _ = build_config(recipe, target, tokenizer, [])
    with torch.device("meta"):
        return DominoDraft(config), list(config.target_layer_ids)


@pytest.mark.parametrize("name", TARGETS)
def test_parameters_and_layers_are_those_published_and_in_the_documentation(name: str) -> None:
    model, layers = real_draft(named(f"{name}-domino"))
    said = describe_draft(model)
    found = tuple(float(number) for number in re.findall(r"([\d.]+) M", said))
    if name in PUBLISHED:
        assert found == PUBLISHED[name]
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
    cells = [cell.strip() for cell in row.split("|")]
    assert f"{', '.join(map(str, layers))}" in cells
    assert f"{found[0]} + {found[1]}" in cells
    plain, _ = real_draft(named(f"{name}-dflash"))
    assert (
        describe_draft(plain)
        == f"draft: {found[0]} M parameters in the backbone, 0.0 M in the head"
    )


@pytest.mark.parametrize(("layers", "ids"), [(1, [18]), (3, [1, 17, 33]), (5, [1, 9, 17, 25, 33])])
def test_fewer_layers_read_fewer_features_spread_evenly(layers: int, ids: list[int]) -> None:
    preset = named(f"qwen3-8b-domino-{layers}layer{'s' if layers > 1 else ''}")
    assert preset == named("qwen3-8b-domino", f"draft.num_layers={layers}")
    model, found = real_draft(preset)
    assert (len(model.layers), found) == (layers, ids)
    assert real_draft(named("qwen3-8b", f"draft.num_layers={layers}", "draft.num_features=5"))[
        1
    ] == ([1, 9, 17, 25, 33])


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
