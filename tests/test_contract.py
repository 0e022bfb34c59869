"""The contract: what identifies draft and target, and what a difference is called."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_kit.contract import FACTS, Contract, check_allowed
from domino_kit.conversations import Row
from domino_kit.draft_contract import check_draft, explain_layer_ids
from domino_kit.fingerprint import (
    json_hash,
    same_sums,
    sampled_rows,
    target_fingerprints,
    tensor_fingerprint,
    tensor_hash,
    weight_sums,
)
from domino_kit.manifest import (
    TargetIdentity,
    library_versions,
    matrix_hashes,
    read_manifest,
    target_identity,
)
from domino_kit.target_contract import (
    check_loaded,
    check_prompts,
    compare_files,
    describe_prompts,
    prompt_notes,
    read_target_files,
)
from tests.serving import Pair, trained_pair
from tests.tiny import tiny_target
from tests.tiny_chat import THINKING, save_target, tiny_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("pair"), steps=2)


@pytest.fixture
def copy(pair: Pair, tmp_path: Path) -> Pair:
    """A copy that a test may spoil."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    return Pair(target, shutil.copytree(pair.draft / "latest", tmp_path / "draft"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def names(pair: Pair) -> list[str]:
    """Facts that differ by the files of both."""
    contract, _, _ = compare_files(pair.draft, read_target_files(str(pair.target), False))
    return [finding.name for finding in contract.errors]


# -- fingerprints --------------------------------------------------------------------------------


def test_the_same_weight_is_recognised_in_another_precision() -> None:
    weight = torch.randn(50, 7).bfloat16()
    for fingerprint in (tensor_hash, tensor_fingerprint):
        assert fingerprint(weight) == fingerprint(weight.float())
        assert fingerprint(weight) != fingerprint(weight.T.contiguous())
        assert fingerprint(weight) != fingerprint(weight[torch.randperm(50)])


@pytest.mark.parametrize(("count", "wanted"), [(1, 4), (4, 4), (5, 4), (151936, 32)])
def test_sampled_rows_reach_from_the_first_to_the_last(count: int, wanted: int) -> None:
    rows = sampled_rows(count, wanted)
    assert rows == sorted(set(rows))
    assert len(rows) == min(count, wanted)
    assert rows[0] == 0 and rows[-1] == count - 1


def test_sums_tell_another_order_from_other_values() -> None:
    weight = torch.randn(30, 30)
    sums = weight_sums(weight)
    assert same_sums(weight.T, sums)
    assert same_sums(weight[torch.randperm(30)], sums)
    assert not same_sums(weight + 0.01, sums)
    assert not same_sums(torch.randn(30, 30), sums)


def test_json_hash_ignores_the_order_of_keys() -> None:
    assert json_hash({"a": 1, "b": 2}) == json_hash({"b": 2, "a": 1})


def test_every_part_of_a_target_has_a_fingerprint(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t", tie_word_embeddings=False)
    before = target_fingerprints(folder)
    assert {"model.layers.0", "model.layers.3", "lm_head.weight"} <= before.keys()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1.05
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    after = target_fingerprints(folder)
    assert [group for group in before if before[group] != after[group]] == ["model.layers.2"]


# -- the draft's own files -----------------------------------------------------------------------


def test_a_good_pair_has_no_findings(pair: Pair) -> None:
    contract, config, manifest = compare_files(
        pair.draft, read_target_files(str(pair.target), False)
    )
    assert contract.findings == []
    assert contract.unchecked == []
    assert {"weights", "target_weights", "mask_token_id", "chat_template"} <= set(contract.checked)
    assert config is not None and manifest is not None
    assert manifest.draft == config.model_dump(mode="json")


@pytest.mark.parametrize(
    ("found", "words"),
    [([2, 0], "another order"), ([1, 3], r"off by one \(by \+1\)"), ([0, 1], "other layers")],
)
def test_layer_ids_are_explained(found: list[int], words: str) -> None:
    import re

    assert re.search(words, explain_layer_ids(found, [0, 2]))


def test_a_target_that_is_not_there_is_not_guessed(copy: Pair) -> None:
    """Files of another layout cannot be compared, which is said instead of an error."""
    tensors = load_file(copy.target / "model.safetensors")
    renamed = {name.replace("model.", "transformer."): each for name, each in tensors.items()}
    save_file(renamed, copy.target / "model.safetensors", metadata={"format": "pt"})
    contract, _, _ = compare_files(copy.draft, read_target_files(str(copy.target), False))
    assert contract.errors == []
    assert any(line.startswith("target_weights: ") for line in contract.unchecked)


def test_a_draft_without_manifest_is_checked_as_far_as_its_files_go(copy: Pair) -> None:
    (copy.draft / "domino_manifest.json").unlink()
    contract, config, manifest = compare_files(
        copy.draft, read_target_files(str(copy.target), False)
    )
    assert config is not None and manifest is None
    assert contract.findings == []
    unknown = {line.partition(":")[0] for line in contract.unchecked}
    assert {"manifest", "mask_token_id", "weights", "target_weights", "tokenizer"} <= unknown
    assert {"config", "tensors", "mask_special", "context_length"} <= set(contract.checked)


def test_a_manifest_of_an_earlier_version_is_read(copy: Pair) -> None:
    new = ("draft", "weights", "weight_hashes", "weight_sums", "allowed", "gate", "gate_lacks")

    def strip(manifest: dict[str, Any]) -> None:
        for field in new:
            del manifest[field]
        for field in ("config", "weights", "embedding_rows", "head_rows"):
            del manifest["target"][field]

    edit(copy.draft / "domino_manifest.json", strip)
    edit(copy.draft / "config.json", lambda c: c["dflash_config"].update(mask_token_id=9))
    assert names(copy) == ["mask_token_id"]


@pytest.mark.parametrize("content", ["", "{", json.dumps({"seed": 1}), json.dumps([1])])
def test_a_broken_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "domino_manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"domino_manifest\.json is broken"):
        read_manifest(tmp_path)
    contract, _, _ = check_draft(tmp_path)
    assert [finding.name for finding in contract.errors] == ["config", "manifest"]


# -- findings ------------------------------------------------------------------------------------


def test_allowing_downgrades_and_remembers() -> None:
    contract = Contract()
    contract.error("weights", "W.")
    contract.error("mask_token_id", "M.")
    contract.allow(["weights"])
    assert [finding.name for finding in contract.errors] == ["mask_token_id"]
    assert contract.allowed == ["weights"]
    with pytest.raises(ValueError, match=r"M\. \(or accept it with --allow mask_token_id\)"):
        contract.stop()
    contract.make_errors(["weights"])
    assert [finding.name for finding in contract.errors] == ["mask_token_id"]


@pytest.mark.parametrize("name", ["config", "tensors", "weight"])
def test_only_facts_can_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"names no fact that can be allowed; known: .*weights"):
        check_allowed([name])
    assert check_allowed(["weights", "weights"]) == ("weights",)
    assert all(FACTS.values())


def test_versions_name_what_decides_the_numbers() -> None:
    assert {"python", "torch", "transformers"} <= library_versions().keys()


# -- a loaded target -----------------------------------------------------------------------------


def identity(seed: int = 0) -> TargetIdentity:
    return target_identity("t", tiny_target(seed=seed), tiny_tokenizer(), None)


def test_other_weights_are_an_error() -> None:
    same, other = Contract(), Contract()
    check_loaded(same, identity(), "t", matrix_hashes(tiny_target()))
    check_loaded(other, identity(), "t", matrix_hashes(tiny_target(seed=1)))
    assert same.findings == []
    assert [finding.name for finding in other.errors] == ["embedding", "head"]


# -- prompts -------------------------------------------------------------------------------------


def rows(*systems: str | None) -> list[Row]:
    found = []
    for place, system in enumerate(systems):
        before = [] if system is None else [{"role": "system", "content": system}]
        messages = [
            *before,
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho"},
        ]
        found.append(Row(f"row {place}", str(place), messages))
    return found


def trained_on(pair: Pair, prompts: list[dict[str, Any]], thinking: bool | None) -> Any:
    manifest = read_manifest(pair.draft)
    assert manifest is not None
    target = manifest.target.model_copy(update={"thinking": thinking})
    data = {**manifest.data, "system_prompts": prompts}
    return manifest.model_copy(update={"data": data, "target": target})


def test_system_prompts_are_counted_and_compared(pair: Pair) -> None:
    tokenizer = tiny_tokenizer()
    found = describe_prompts(rows("Be brief.", "Be brief.", None), tokenizer, None)
    assert [(each["system"], each["share"]) for each in found] == [
        ("Be brief.", 0.6667),
        (None, 0.3333),
    ]
    manifest = trained_on(pair, found, None)
    for system, expected in ((None, []), ("Be brief.", []), ("Be long.", ["system_prompt"])):
        contract = Contract()
        messages = rows(system)[0].messages[:-1]
        check_prompts(contract, manifest, tokenizer, [messages], None)
        assert [finding.name for finding in contract.errors] == expected
    assert "Be brief." in prompt_notes(manifest, tokenizer)[0]


def test_thinking_matters_only_where_the_template_reads_it(pair: Pair) -> None:
    for template, expected in ((THINKING, ["thinking"]), (None, [])):
        tokenizer = tiny_tokenizer(template) if template else tiny_tokenizer()
        found = describe_prompts(rows(None), tokenizer, True)
        manifest = trained_on(pair, found, True)
        contract = Contract()
        check_prompts(contract, manifest, tokenizer, [rows(None)[0].messages[:-1]], False)
        assert [finding.name for finding in contract.errors] == expected
    manifest = trained_on(pair, found, False)
    assert "chat_template_kwargs" in prompt_notes(manifest, tiny_tokenizer(THINKING))[0]
