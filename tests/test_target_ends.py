"""Embedding and head out of a target's files: as the whole target has them, or why they cannot be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_kit.manifest import target_identity
from domino_kit.target import load_tokenizer
from domino_kit.target_config import JsonConfig, read_end_tokens, read_target_config
from domino_kit.target_ends import StoredEnds, read_ends
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.setup import build_config, open_target
from tests.tiny import FAMILIES
from tests.tiny_chat import save_target

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def change_weights(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """The folder, its only weight file changed in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **fields: Any) -> Path:
    """The folder, fields of its config changed in place; ``None`` removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


def split_parts(folder: Path, **beside: Any) -> Path:
    """As a model that transformers does not know: a config of parts, and tensors named by part."""
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "model_type": "unknown_text"}
    parts = {"text_config": text, "vision_config": {"hidden_size": 7}}
    values = {"model_type": "unknown_k3", "architectures": ["UnknownK3"], **parts, **beside}
    (folder / "config.json").write_text(json.dumps(values))

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch_embed.weight"] = torch.ones(3, 7)

    return change_weights(folder, rename)


def shard(folder: Path, place: Callable[[str], str]) -> dict[str, str]:
    """Spread the weights over files by tensor name, with an index; returns which file holds which."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: place(name) for name in tensors}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


def recipe_for(target: Path, *more: str) -> Recipe:
    words = [
        f"target.name={target}", "data.train=x", "output.folder=y", "train.steps=1",
        "draft.target_layer_ids=[0,2]", "draft.mask_token_id=1", *more,
    ]  # fmt: skip
    return read_recipe(None, words)


def ends_of(folder: Path, **options: Any) -> StoredEnds:
    config = read_target_config(str(folder), False)
    return read_ends(str(folder), config, [0, 2], torch.float32, "cpu", **options)


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_ends_are_those_of_the_whole_target(tmp_path: Path, family: str, generation: bool) -> None:
    """Values, hashes, fingerprints, end tokens and the draft's config: nothing tells them apart."""
    save_target(tmp_path, family=family, tie_word_embeddings=family == "llama", eos_token_id=3)
    if not generation:
        (tmp_path / "generation_config.json").unlink()
    tokenizer = load_tokenizer(str(tmp_path), False)
    found = []
    for load in (["target.load=ends", "features.backend=sglang"], []):
        recipe = recipe_for(tmp_path, *load)
        target, _, end_tokens = open_target(recipe, tokenizer, "cpu")
        config, source = build_config(recipe, target, tokenizer, end_tokens)
        identity = target_identity(str(tmp_path), target, tokenizer, None)
        found.append((identity, config, source, end_tokens, target.vocab_size, target.layer_ids))
        last = target
    assert found[0] == found[1]
    ends = ends_of(tmp_path)
    assert torch.equal(ends.embedding.weight, last.embedding.weight)
    assert torch.equal(ends.head.weight, last.head.weight)
    assert (ends.head.weight is ends.embedding.weight) == (family == "llama")
    ids, hidden = torch.tensor([[3, 1, 261]]), torch.randn(2, 32)
    assert torch.equal(ends.embed(ids), last.embed(ids))
    assert torch.equal(ends.logits(hidden), last.logits(hidden))
    assert ends.num_bytes == (1 if family == "llama" else 2) * 262 * 32 * 4 < last.num_bytes


def test_types_are_converted_as_when_the_target_is_loaded(tmp_path: Path) -> None:
    save_target(tmp_path)
    config = read_target_config(str(tmp_path), False)
    ends = read_ends(str(tmp_path), config, [0], torch.bfloat16, "cpu")
    assert torch.equal(ends.embedding.weight, ends_of(tmp_path).embedding.weight.bfloat16())
    assert not ends.embedding.weight.requires_grad


def test_a_model_of_parts_that_transformers_does_not_know(tmp_path: Path) -> None:
    before = ends_of(save_target(tmp_path, tie_word_embeddings=False))
    split_parts(tmp_path)
    config = read_target_config(str(tmp_path), False)
    assert isinstance(config, JsonConfig) and config.model_type == "unknown_k3"
    assert config.get_text_config().num_hidden_layers == 4
    ends = ends_of(tmp_path)
    assert torch.equal(ends.embedding.weight, before.embedding.weight)
    assert torch.equal(ends.head.weight, before.head.weight)


@pytest.mark.parametrize(
    ("beside", "part", "expected"),
    [({}, 5, [5]), ({"eos_token_id": 6}, None, [6]), ({"eos_token_id": 6}, [7, 5], [5, 7])],
)
def test_end_tokens_of_a_model_of_parts(
    tmp_path: Path, beside: dict[str, Any], part: Any, expected: list[int]
) -> None:
    """The generation config's; without one the part's own, else those beside the parts."""
    save_target(tmp_path)
    change_config(tmp_path, eos_token_id=part)
    split_parts(tmp_path, **beside)
    tokenizer = load_tokenizer(str(tmp_path), False)
    config = read_target_config(str(tmp_path), False)
    assert read_end_tokens(str(tmp_path), config, tokenizer) == [3]
    (tmp_path / "generation_config.json").unlink()
    assert read_end_tokens(str(tmp_path), config, tokenizer) == expected


def place_ends(name: str) -> str:
    return {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}.get(
        name, "c.safetensors"
    )


def test_of_a_sharded_target_only_two_files_are_read(tmp_path: Path) -> None:
    before = ends_of(save_target(tmp_path, tie_word_embeddings=False))
    shard(tmp_path, place_ends)
    (tmp_path / "c.safetensors").unlink()
    ends = ends_of(tmp_path)
    assert torch.equal(ends.embedding.weight, before.embedding.weight)
    assert torch.equal(ends.head.weight, before.head.weight)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"lacks the file b.safetensors, which holds lm_head.weight"
    ):
        ends_of(tmp_path)


def test_of_a_target_on_the_hub_only_two_shards_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_target_config(str(save_target(tmp_path, tie_word_embeddings=False)), False)
    shard(tmp_path, place_ends)
    asked = []

    def fetch(name: str, file: str, **_: Any) -> str | None:
        assert name == "someone/large"
        if file == "b.safetensors" and file in asked:
            raise OSError("no connection\nto the hub")
        asked.append(file)
        return str(tmp_path / file) if (tmp_path / file).is_file() else None

    monkeypatch.setattr("transformers.utils.cached_file", fetch)
    read_ends("someone/large", config, [0], torch.float32, "cpu")
    assert asked == ["model.safetensors", INDEX, "a.safetensors", "b.safetensors"]
    with pytest.raises(ValueError, match=r"b.safetensors of .* cannot be fetched: no connection$"):
        read_ends("someone/large", config, [0], torch.float32, "cpu")


@pytest.mark.parametrize(
    ("beside", "part", "tied"),
    [({}, True, True), ({"tie_word_embeddings": True}, None, True), ({}, None, False),
     ({"tie_word_embeddings": True}, False, False), ({"tie_word_embeddings": False}, True, False)],
)  # fmt: skip
def test_without_a_stored_head_the_config_must_be_of_one_mind(
    tmp_path: Path, beside: dict[str, Any], part: bool | None, tied: bool
) -> None:
    split_parts(change_config(save_target(tmp_path), tie_word_embeddings=part), **beside)
    if not tied:
        with pytest.raises(
            ValueError, match=r"no lm_head.weight, .* say tie_word_embeddings in all"
        ):
            ends_of(tmp_path)
    options = {} if tied else {"head_name": "language_model.model.embed_tokens.weight"}
    ends = ends_of(tmp_path, **options)
    assert ends.head.weight is ends.embedding.weight


def test_copies_in_layers_are_no_candidates_and_names_decide(tmp_path: Path) -> None:
    """Layers for multi-token prediction hold copies; a second model's ends must be told apart."""

    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(262, 32)
        tensors["model.layers.4.lm_head.weight"] = torch.zeros(262, 32)

    save_target(tmp_path, tie_word_embeddings=False)
    before = ends_of(tmp_path)
    change_weights(tmp_path, add)
    assert torch.equal(ends_of(tmp_path).embedding.weight, before.embedding.weight)
    change_weights(
        tmp_path, lambda t: t.update({"talker.embed_tokens.weight": torch.ones(262, 32)})
    )
    with pytest.raises(ValueError) as caught:
        ends_of(tmp_path)
    for words in ("model.embed_tokens.weight, talker.embed_tokens", "target.embedding_name"):
        assert words in str(caught.value)
    named = ends_of(tmp_path, embedding_name="model.embed_tokens.weight")
    assert torch.equal(named.embedding.weight, before.embedding.weight)


def rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def retype(name: str, dtype: torch.dtype) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def add(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(*shape)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rename("model.embed_tokens.weight", "model.token_embed.weight"),
         ["stores no embed_tokens.weight", "model.token_embed.weight", "target.embedding_name"]),
        (rename("lm_head.weight", "model.word_head.weight"),
         ["no lm_head.weight", "does not say tie_word_embeddings", "model.word_head.weight",
          "target.head_name"]),
        (rename("lm_head.weight", "lm_head.qweight"), ["its head quantised (lm_head.qweight)"]),
        (add("lm_head.weight_scale", 262, 1), ["its head quantised (lm_head.weight_scale)"]),
        (add("model.embed_tokens.weight_scale", 1), ["its embedding quantised"]),
        (retype("lm_head.weight", torch.int8), ["lm_head.weight is int8", "unquantised"]),
        (retype("lm_head.weight", torch.float8_e4m3fn), ["lm_head.weight is float8_e4m3fn"]),
        (add("lm_head.bias", 262), ["lm_head.bias", "has a bias"]),
        (add("lm_head.weight", 261, 32), ["[261, 32]", "[262, 32]", "one vocabulary"]),
        (add("model.embed_tokens.weight", 300, 32), ["[300, 32]", "config says [262, 32]"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    tmp_path: Path, change: Callable[[Tensors], Any], words: list[str]
) -> None:
    change_weights(save_target(tmp_path, tie_word_embeddings=False), change)
    with pytest.raises(ValueError) as caught:
        ends_of(tmp_path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_other_wrong_files_are_named(tmp_path: Path) -> None:
    save_target(tmp_path)
    with pytest.raises(ValueError, match=r"stores no tensor 'x' \(target.head_name\)"):
        ends_of(tmp_path, head_name="x")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        ends_of(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index"):
        ends_of(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="is not a valid safetensors index"):
        ends_of(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale_emb": 12}, "scale_emb=12; targets that scale embeddings"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"model_type": "some_gemma"}, "family some_gemma, which scales .* target.load=whole"),
    ],
)
def test_scaled_targets_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    change_config(save_target(tmp_path), **{"model_type": "unknown", **fields})
    with pytest.raises(ValueError, match=words):
        ends_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "unknown", "language": {"hidden_size": 8}}, r"its parts: language\)"),
        ({"model_type": "unknown", "auto_map": {}}, "custom code, which may be trusted"),
        (
            {"model_type": "unknown", "text_config": {}, "llm_config": {}},
            r"\['text_config', 'llm_config'\]",
        ),
    ],
)
def test_configs_that_say_too_little(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        read_target_config(str(tmp_path), False)


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("intermediate_size", "draft.intermediate_size=40"),
        ("num_key_value_heads", "draft.num_key_value_heads=2"),
        ("rms_norm_eps", "draft.rms_norm_eps=1e-5"),
        ("rope_parameters", "draft.rope_theta=50000"),
        ("max_position_embeddings", "draft.max_position_embeddings=64"),
    ],
)
def test_a_value_that_the_config_lacks_is_asked_of_the_recipe(
    tmp_path: Path, field: str, option: str
) -> None:
    split_parts(change_config(save_target(tmp_path), **{field: None}))
    ends, tokenizer = ends_of(tmp_path), load_tokenizer(str(tmp_path), False)
    name, value = option.removeprefix("draft.").split("=")
    with pytest.raises(ValueError, match=f"has no {name}, .*; set draft.{name}"):
        build_config(recipe_for(tmp_path), ends, tokenizer, [3])
    config, _ = build_config(recipe_for(tmp_path, option), ends, tokenizer, [3])
    assert getattr(config, name) == float(value)


def test_the_head_s_width_follows_from_the_target_s_or_the_recipe(tmp_path: Path) -> None:
    split_parts(change_config(save_target(tmp_path), head_dim=None))
    ends, tokenizer = ends_of(tmp_path), load_tokenizer(str(tmp_path), False)
    config, _ = build_config(recipe_for(tmp_path), ends, tokenizer, [3])
    assert config.head_dim == 8
    options = ["draft.head_dim=16", "draft.num_attention_heads=6", "draft.num_key_value_heads=3"]
    config, _ = build_config(recipe_for(tmp_path, *options), ends, tokenizer, [3])
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (16, 6, 3)


def test_layers_must_be_counted_and_exist(tmp_path: Path) -> None:
    save_target(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), False)
    load = ["target.load=ends", "features.backend=sglang"]
    with pytest.raises(ValueError, match=r"\[4\] are out of range: the target has 4 layers"):
        open_target(recipe_for(tmp_path, *load, "draft.target_layer_ids=[0,4]"), tokenizer, "cpu")
    with pytest.raises(ValueError, match="includes the last layer 3"):
        open_target(recipe_for(tmp_path, *load, "draft.target_layer_ids=[0,3]"), tokenizer, "cpu")
    split_parts(change_config(tmp_path, num_hidden_layers=None))
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        open_target(recipe_for(tmp_path, *load), tokenizer, "cpu")
