"""The command line as a user meets it: help, good runs, and every refusal in its own process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from domino_kit.checkpoint import load_draft
from tests.command import DOMINO, domino, refused
from tests.tiny_chat import chat_rows, save_target, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, data and a recipe; ``run`` is a short training of it."""
    folder = tmp_path_factory.mktemp("work")
    save_target(folder / "target", family="llama")
    write_jsonl(folder / "rows.jsonl", chat_rows(8))
    write_jsonl(folder / "prompts.jsonl", [{"id": i, "prompt": f"say {i}"} for i in range(3)])
    (folder / "recipe.yaml").write_text(
        f"""
target: {{name: {folder / "target"}}}
draft: {{num_layers: 1, target_layer_ids: [0, 2], block_size: 4, mask_token_id: 1,
         gru_hidden_dim: 8, emb_dim: 8}}
data: {{train: {folder / "rows.jsonl"}}}
train: {{steps: 2, num_anchors: 4, lr: 1e-3}}
output: {{folder: {folder / "run"}}}
""",
        encoding="utf-8",
    )
    result = domino("train", folder / "recipe.yaml", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_help_names_the_commands_and_shows_defaults() -> None:
    assert "eval-acceptance" in domino("--help").stdout
    shown = domino("train", "--help").stdout
    assert "train.lr  peak learning rate [default 0.0006]" in shown
    assert "draft.projector" in shown
    assert "default: 256" in domino("eval-acceptance", "--help").stdout


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        (["--help", "eval-acceptance --help"], ["torch", "transformers", "pydantic", "rich"]),
        (
            [
                "train --help",
                "train no-such-recipe",
                "train demo train.lrr=1",
                "prepare-features demo --output new train.lrr=1",
                "prepare --prompts none.jsonl --target here --output a.jsonl",
                "prepare --prompts hub/data --target here --output a.parquet",
                "eval-acceptance --draft none --prompts gsm8k",
                "eval-acceptance --draft . --prompts gms8k",
                "eval-acceptance --draft . --prompts gsm8k",
                "eval-acceptance --draft . --prompts gsm8k --url http://127.0.0.1",
                "check --draft . --static --engine both",
                "serve --draft . --device tpu",
                "serve --draft . --allow nothing",
                "export --draft none --format sglang --output new",
                "import . --output .",
                "demo --output .",
            ],
            ["torch", "transformers", "datasets"],
        ),
    ],
)
def test_help_and_mistakes_are_answered_before_anything_large_is_imported(
    tmp_path: Path, commands: list[str], heavy: list[str]
) -> None:
    code = f"""
import sys
from click.testing import CliRunner
from domino_kit.cli import domino
for command in {commands!r}:
    found = CliRunner().invoke(domino, command.split())
    refused = isinstance(found.exception, ValueError)
    assert refused or ("--help" in command and found.exit_code == 0), (command, found)
    assert not [name for name in {heavy!r} if name in sys.modules], command
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_a_run_ends_with_a_loadable_draft(place: Path) -> None:
    model, manifest = load_draft(place / "run", __import__("torch").float32, "cpu")
    assert model.config.block_size == 4
    assert manifest is not None
    assert manifest.command[1] == "train"
    assert manifest.recipe["train"]["lr"] == 1e-3


def test_dry_run_writes_a_loadable_checkpoint_and_trains_nothing(place: Path) -> None:
    result = domino("train", place / "recipe.yaml", "--dry-run", f"output.folder={place / 'dry'}")
    assert result.returncode == 0, result.stderr
    for words in ("expected memory", "parameters in the backbone", "lambda_base_start: 1.0"):
        assert words in result.stderr
    assert load_draft(place / "dry-dry-run", __import__("torch").float32, "cpu")[0]
    assert not (place / "dry").exists()


def test_evaluation_writes_the_report_and_the_picture(place: Path) -> None:
    result = domino(
        "eval-acceptance", "--draft", "run", "--compare", "off", "--prompts", "prompts.jsonl",
        "--max-new-tokens", "12", "--batch-size", "2", "--output", "out/report.json",
        "--picture", "out/report.png", cwd=place,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "token for token" in result.stdout
    assert "same run at every step" in result.stdout
    report = json.loads((place / "out" / "report.json").read_text())
    assert [(run["head"], run["mode"]) for run in report["runs"]] == [
        ("domino", "replay"), ("domino", "decode"), ("off", "replay"), ("off", "decode"),
    ]  # fmt: skip
    for run in report["runs"]:
        steps = [n for prompt in run["prompts"] for n in prompt["accepted_runs"]]
        assert run["verify_steps"] == len(steps) == sum(run["histogram"])
        assert run["accepted_drafts_per_step"] == pytest.approx(sum(steps) / len(steps))
        assert run["accept_length"] == pytest.approx(1 + sum(steps) / len(steps))
        assert (run["block_size"], run["num_proposals"]) == (4, 3)
        assert (run["tokens_per_second"] is None) == (run["mode"] == "replay")
        assert run["baseline_tokens_per_second"] > 0
    assert (place / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_too_low_an_acceptance_exits_1(place: Path) -> None:
    result = domino(
        "eval-acceptance", "--draft", "run", "--prompts", "prompts.jsonl", "--mode", "replay",
        "--max-new-tokens", "8", "--min-accept-length", "3.9", cwd=place,
    )  # fmt: skip
    assert result.returncode == 1
    assert "below 3.9" in result.stderr


def test_sampled_decoding_is_measured(place: Path) -> None:
    result = domino(
        "eval-acceptance", "--draft", "run", "--prompts", "prompts.jsonl", "--mode", "decode",
        "--max-new-tokens", "8", "--temperature", "0.8", "--proposals", "sampled", cwd=place,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_ctrl_c_saves_a_loadable_checkpoint(place: Path) -> None:
    folder = place / "stopped"
    process = subprocess.Popen(
        [DOMINO, "train", str(place / "recipe.yaml"), f"output.folder={folder}",
         "train.steps=100000", "output.log_every=1"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    _, manifest = load_draft(folder, __import__("torch").float32, "cpu")
    assert manifest is not None
    assert 0 < manifest.training["steps_done"] < 100000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.lrr=1"], ["train.lrr", "did you mean train.lr"]),
        (["trian.lr=1"], ["trian", "did you mean 'train'"]),
        (["lr=1"], ["'lr=1'", "section.key=value"]),
        (["train.lr=fast"], ["train.lr", "'fast'"]),
        (["train.steps=0"], ["train.steps", "0"]),
        (["train.steps=true"], ["steps", "true"]),
        (["train.epochs=1"], ["exactly one of train.steps and train.epochs"]),
        (["draft.projector=causal_v5"], ["draft.projector", "causal_v5"]),
        (["draft.shift_label=maybe"], ["draft.shift_label", "maybe"]),
        (["draft.projector=none", "draft.shift_label=true"], ["draft.shift_label=true"]),
        (["draft.target_layer_ids=[1,1]"], ["target_layer_ids", "distinct"]),
        (["draft.target_layer_ids=[9]"], ["target_layer_ids [9]", "out of range", "0 to 3"]),
        (["draft.target_layer_ids=[3]"], ["last layer 3", "allow_last_layer"]),
        (["draft.mask_token_id=3"], ["mask token id 3", "end token"]),
        (["draft.mask_token_id=0"], ["mask token id 0", "padding"]),
        (["draft.mask_token_id=5000"], ["mask token id 5000", "not a row"]),
        (["draft.mask_token_id=null"], ["draft.mask_token_id is not set"]),
        (["target.name=./nothing"], ["./nothing", "not a model folder"]),
        (["target.device=cuda"], ["cuda"]),
        (["data.train=none.jsonl"], ["none.jsonl", "does not exist"]),
        (["data.max_length=2"], ["no row of the data is left"]),
        (["output.folder={place}/run"], ["already exists"]),
        (["draft.init_from={place}/nothing"], ["nothing", "not a folder"]),
    ],
)
def test_bad_recipes_are_refused(place: Path, changes: list[str], words: list[str]) -> None:
    new = f"output.folder={place / 'refused'}"
    changes = [new, *(change.format(place=place) for change in changes)]
    refused(domino("train", place / "recipe.yaml", *changes, cwd=place), *words)
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist", "bundled recipes are"]),
        ("", ["empty"]),
        ("a: [", ["not valid YAML"]),
        ("- 1", ["mapping"]),
        ("train: 5", ["train"]),
    ],
)
def test_broken_recipe_files_are_named(place: Path, content: str | None, words: list[str]) -> None:
    path = place / "broken.yaml"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    refused(domino("train", path), "broken.yaml", *words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1, "messages": [{"role": "bot", "content": "x"}]}], ["bad.jsonl:1", "'bot'"]),
        ([{"id": 1, "input_ids": [10, 11], "loss_mask": [0, 0]}], ["bad.jsonl:1", "no supervised"]),
        ([{"id": 1, "text": "x"}], ["bad.jsonl:1", "'messages'"]),
    ],
)
def test_bad_data_is_refused(place: Path, rows: list[Any], words: list[str]) -> None:
    write_jsonl(place / "bad.jsonl", rows)
    result = domino(
        "train", "recipe.yaml", "data.train=bad.jsonl", "output.folder=refused", cwd=place
    )
    refused(result, *words)


def cut_weights(target: Path) -> None:
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_weights, ["cannot be loaded"]),
        (lambda target: (target / "config.json").write_text("{"), ["cannot be loaded"]),
        (lambda target: (target / "tokenizer.json").write_text("{"), ["tokenizer", "loaded"]),
        (lambda target: (target / "chat_template.jinja").unlink(), ["no chat template"]),
    ],
)
def test_damaged_targets_are_refused(
    place: Path, tmp_path: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    target = tmp_path / "damaged"
    shutil.copytree(place / "target", target)
    damage(target)
    changes = [f"target.name={target}", f"output.folder={tmp_path / 'run'}"]
    refused(domino("train", place / "recipe.yaml", *changes), *words)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_and_leaves_no_checkpoint(place: Path) -> None:
    folder = place / "full"
    result = domino("train", place / "recipe.yaml", f"output.folder={folder}", limit_kb=40)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "full" in result.stderr.strip().splitlines()[-1]
    assert not (folder / "config.json").exists()
    assert list(folder.glob("step-*")) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "nothing", "--prompts", "prompts.jsonl"], ["nothing", "not a folder"]),
        (["--draft", "run", "--prompts", "gms8k"], ["gms8k", "known benchmarks"]),
        (["--draft", "run", "--prompts", "gsm8k"], ["openai/gsm8k", "cannot be loaded"]),
        (["--draft", "run", "--prompts", "none.jsonl"], ["none.jsonl", "does not exist"]),
        (["--draft", "run", "--prompts", "rows.jsonl", "--num-proposals", "4"], ["allow 1 to 3"]),
        (["--draft", "run", "--prompts", "rows.jsonl", "--max-new-tokens", "9999"], ["positions"]),
        (["--draft", "run", "--prompts", "rows.jsonl", "--temperature", "1"], ["--mode decode"]),
        (["--draft", "run", "--prompts", "rows.jsonl", "--target", "./x"], ["not a model folder"]),
        (["--draft", "run", "--prompts", "gsm8k=rows.jsonl"], ["'question'"]),
        (["--draft", "run", "--prompts", "rows.jsonl", "--output", "rows.jsonl/a"], ["rows.jsonl"]),
    ],
)
def test_bad_evaluations_are_refused(place: Path, arguments: list[str], words: list[str]) -> None:
    refused(domino("eval-acceptance", *arguments, cwd=place), *words)


def nested(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a config's nested part; ``None`` removes a field."""

    def change(config: dict[str, Any]) -> None:
        config["dflash_config"].update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            del config["dflash_config"][name]

    return change


HEADLESS = dict.fromkeys(
    ("projector_type", "shift_label", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nested(target_layer_ids=[0, 0]), ["config.json", "target_layer_ids [0, 0]", "duplicates"]),
        (nested(target_layer_ids=[0, 9]), ["target_layer_ids [9]", "out of range"]),
        (nested(mask_token_id=None), ["mask_token_id is missing"]),
        (nested(mask_token_id=5000), ["mask_token_id 5000"]),
        (nested(projector_type="causal_v5"), ["'causal_v5'", "ignore the head"]),
        (nested(shift_label="true"), ["shift_label is 'true'"]),
        (nested(shift_label=None), ["shift_label is missing"]),
        (nested(gru_hidden_dim=9), ["prefix_gru.weight", "gru_hidden_dim"]),
        (nested(**HEADLESS), ["head would be ignored"]),
        (lambda config: config.update(partial_rotary_factor=0.25), ["partial_rotary_factor"]),
    ],
)
def test_broken_draft_configs_are_refused(
    place: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(place / "run" / "latest", draft)
    config = json.loads((draft / "config.json").read_text())
    change(config)
    (draft / "config.json").write_text(json.dumps(config))
    refused(
        domino("eval-acceptance", "--draft", draft, "--prompts", place / "prompts.jsonl"), *words
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("prefix_gru.weight_hh_l0"), ["lacks tensor 'prefix_gru.weight_hh_l0'"]),
        (lambda t: t.update(extra=t["norm.weight"].clone()), ["unknown tensor 'extra'"]),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :32].clone()}), ["'fc.weight'"]),
    ],
)
def test_broken_draft_weights_are_refused(
    place: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(place / "run" / "latest", draft)
    tensors = load_file(draft / "model.safetensors")
    change(tensors)
    save_file(tensors, draft / "model.safetensors")
    refused(
        domino("eval-acceptance", "--draft", draft, "--prompts", place / "prompts.jsonl"), *words
    )


def test_a_draft_for_another_target_is_refused(place: Path) -> None:
    save_target(place / "other", family="llama", seed=1)
    refused(
        domino("eval-acceptance", "--draft", "run", "--prompts", "prompts.jsonl",
               "--target", place / "other", cwd=place),
        "the weights of target", "not those in training", "--allow target_weights",
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["trian"], ["train", "--dry"]])
def test_unknown_commands_and_flags_are_errors(arguments: list[str]) -> None:
    result = domino(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "No such" in result.stderr or "Did you mean" in result.stderr
