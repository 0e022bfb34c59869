"""The manifest: what identifies a target, and what a difference means."""

import json
from pathlib import Path

import pytest
import torch

from domino_kit.contract import (
    TargetIdentity,
    compare_targets,
    json_hash,
    library_versions,
    read_manifest,
    target_identity,
    tensor_hash,
)
from tests.tiny import tiny_target
from tests.tiny_chat import THINKING, tiny_tokenizer


def identity(
    seed: int = 0, template: str | None = None, thinking: bool | None = None
) -> TargetIdentity:
    tokenizer = tiny_tokenizer() if template is None else tiny_tokenizer(template)
    return target_identity("t", tiny_target(seed=seed), tokenizer, thinking)


def test_the_same_target_is_recognised_in_another_precision() -> None:
    weight = torch.randn(5, 7).bfloat16()
    assert tensor_hash(weight) == tensor_hash(weight.float())
    assert tensor_hash(weight) != tensor_hash(weight.T)
    assert compare_targets(identity(), identity()) == ([], [])


def test_other_weights_are_an_error() -> None:
    errors, _ = compare_targets(identity(), identity(seed=1))
    assert len(errors) == 2
    assert "embedding" in errors[0]


def test_another_template_or_mode_is_a_warning() -> None:
    errors, warnings = compare_targets(identity(), identity(template=THINKING, thinking=False))
    assert errors == []
    assert len(warnings) == 2


def test_json_hash_ignores_the_order_of_keys() -> None:
    assert json_hash({"a": 1, "b": 2}) == json_hash({"b": 2, "a": 1})


def test_versions_name_what_decides_the_numbers() -> None:
    assert {"python", "torch", "transformers"} <= library_versions().keys()


@pytest.mark.parametrize("content", ["", "{", json.dumps({"seed": 1}), json.dumps([1])])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "domino_manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"domino_manifest\.json is broken"):
        read_manifest(tmp_path)
