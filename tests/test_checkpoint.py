"""Checkpoints: golden round trip, other tools' spellings, strict errors, never half-written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from domino_kit.checkpoint import atomic_folder, load_draft, save_draft
from domino_kit.manifest import read_manifest
from tests.tiny import tiny_draft


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "draft"
    save_draft(path, tiny_draft(), None, torch.float32)
    return path


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_draft()
    save_draft(tmp_path / "a", model, None, dtype)
    loaded, manifest = load_draft(tmp_path / "a", dtype, "cpu")
    assert manifest is None
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype))
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == str(dtype)[6:]


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"draft_model.{name}",
        lambda name: f"dflash_module.{name}",
        lambda name: f"model.{name}",
        lambda name: f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name,
        lambda name: f"draft_model.logit_head.{name}" if "gru" in name else f"draft_model.{name}",
        lambda name: {"fc.weight": "encoder.fc.weight",
                      "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name),
    ],
)  # fmt: skip
def test_other_tools_names_are_read(folder: Path, rename: Callable[[str], str]) -> None:
    before = load_draft(folder, torch.float32, "cpu")[0].state_dict()
    tensors = load_file(folder / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    renamed["rotary_emb.inv_freq"] = torch.ones(4)
    save_file(renamed, folder / "model.safetensors")
    after = load_draft(folder, torch.float32, "cpu")[0].state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sharded_weights_are_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, folder / "a.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, folder / "b.safetensors")
    where = {n: "a.safetensors" if n in names[:5] else "b.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    load_draft(folder, torch.float32, "cpu")
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors"):
        load_draft(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("prefix_gru.weight_hh_l0"), "lacks tensor 'prefix_gru.weight_hh_l0'"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "unknown tensor 'extra'"),
        (lambda t: t.update({"lm_head.weight": torch.ones(1)}), "unknown tensor 'lm_head.weight'"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), "fc.weight' has shape [32, 32]"),
        (lambda t: t.update({"prefix_gru.weight_ih_l0": torch.ones(3, 32)}), "3 * gru_hidden_dim"),
        (lambda t: t.update({"embed_proj.2.weight": torch.ones(31, 10)}), "vocab_size, emb_dim"),
        (lambda t: t.update({"model.fc.weight": torch.ones(1)}), "there twice"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit_weights(folder, change)
    with pytest.raises(ValueError) as error:
        load_draft(folder, torch.float32, "cpu")
    assert words in str(error.value)
    assert "draft" in str(error.value)


def test_a_head_that_the_config_would_ignore_is_refused(folder: Path) -> None:
    def hide(config: dict[str, Any]) -> None:
        config["dflash_config"] = {
            k: config["dflash_config"][k] for k in ("mask_token_id", "target_layer_ids")
        }

    edit_config(folder, hide)
    with pytest.raises(ValueError, match="head would be ignored"):
        load_draft(folder, torch.float32, "cpu")


def test_sizes_in_the_config_are_checked_against_the_weights(folder: Path) -> None:
    edit_config(folder, lambda c: c["dflash_config"].update(gru_hidden_dim=13))
    with pytest.raises(ValueError, match="gru_hidden_dim"):
        load_draft(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a readable safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08" * 100), "not a readable"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickled"),
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not readable JSON"),
        (lambda f: (f / "domino_manifest.json").write_text("{}"), "domino_manifest.json is broken"),
        (lambda f: (f / "domino_manifest.json").write_text(""), "domino_manifest.json is broken"),
    ],
)
def test_broken_files_are_named(folder: Path, break_it: Callable[[Path], Any], words: str) -> None:
    break_it(folder)
    with pytest.raises(ValueError) as error:
        load_draft(folder, torch.float32, "cpu")
    assert words in str(error.value)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors"):
        load_draft(folder, torch.float32, "cpu")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load_draft(tmp_path / "nowhere", torch.float32, "cpu")
    assert read_manifest(tmp_path) is None


def test_an_existing_folder_is_never_overwritten(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="already exists"):
        save_draft(folder, tiny_draft(seed=1), None, torch.float32)
    assert (folder / "model.safetensors").read_bytes() == before
    save_draft(folder, tiny_draft(seed=1), None, torch.float32, replace=True)
    assert (folder / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize("existed", [True, False])
def test_an_error_while_writing_leaves_everything_as_it_was(tmp_path: Path, existed: bool) -> None:
    path = tmp_path / "run" / "step-1"
    if existed:
        path.mkdir(parents=True)
        (path / "old").write_text("old")

    def fail_half_way() -> None:
        with atomic_folder(path, replace=True) as temporary:
            (temporary / "new").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert [p.name for p in path.parent.iterdir()] == (["step-1"] if existed else [])
    assert not existed or (path / "old").read_text() == "old"


def test_a_full_disk_is_an_oserror_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own error type becomes an OSError (a really full disk: test_cli.py)."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("domino_kit.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_draft(tmp_path / "draft", tiny_draft(), None, torch.float32)
    assert list(tmp_path.iterdir()) == []
