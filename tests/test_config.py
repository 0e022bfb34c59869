"""A draft's config.json: what is written, which variants are read, and everything refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from domino_kit.config import DraftConfig, parse_config, read_config
from tests.tiny import tiny_config

CANONICAL: dict[str, Any] = json.loads(
    """
{"architectures":["DFlashDraftModel"],"model_type":"qwen3","dtype":"bfloat16","block_size":16,
 "num_target_layers":36,"num_hidden_layers":5,"hidden_size":4096,"intermediate_size":12288,
 "num_attention_heads":32,"num_key_value_heads":8,"head_dim":128,"vocab_size":151936,
 "hidden_act":"silu","rms_norm_eps":1e-6,"attention_bias":false,"attention_dropout":0.0,
 "max_position_embeddings":40960,"rope_theta":1000000,"rope_scaling":null,
 "rope_parameters":{"rope_type":"default","rope_theta":1000000},
 "layer_types":["full_attention","full_attention","full_attention","full_attention",
 "full_attention"],
 "sliding_window":null,"use_sliding_window":false,"max_window_layers":5,"is_causal":false,
 "tie_word_embeddings":false,"bos_token_id":151643,"eos_token_id":151645,
 "dflash_config":{"projector_type":"domino","mask_token_id":151669,
  "target_layer_ids":[1,9,17,25,33],"shift_label":true,"pure_draft_prefix_len":1,
  "gru_hidden_dim":1024,"emb_dim":256}}
"""
)
DROP = object()
"""Marks a field that a mutation removes."""


def mutated(**changes: Any) -> dict[str, Any]:
    """The canonical config with changes; names that start with ``nested_`` go to dflash_config."""
    raw = copy.deepcopy(CANONICAL)
    for name, value in changes.items():
        place = raw["dflash_config"] if name.startswith("nested_") else raw
        name = name.removeprefix("nested_")
        if value is DROP:
            del place[name]
        else:
            place[name] = value
    return raw


def flat(*names: str, **changes: Any) -> dict[str, Any]:
    """The canonical config with the named fields of dflash_config moved to the top level."""
    raw = mutated(**changes)
    for name in names or tuple(raw["dflash_config"]):
        raw[name] = raw["dflash_config"].pop(name)
    if not raw["dflash_config"]:
        del raw["dflash_config"]
    return raw


def write(folder: Path, raw: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


# -- written ---------------------------------------------------------------------------------


def test_canonical_config_is_reproduced() -> None:
    """The Qwen3-8B config is read and written back with exactly the same keys and values."""
    assert parse_config(CANONICAL).to_json("bfloat16") == CANONICAL


def test_dflash_config_has_no_head_fields() -> None:
    """A DFlash draft names neither projector nor any head field."""
    written = tiny_config(False, projector="none").to_json("float32")
    assert written["dflash_config"] == {"mask_token_id": 1, "target_layer_ids": [0, 2]}
    assert written["dtype"] == "float32"


def test_written_config_is_plain_json() -> None:
    """The written object survives JSON without change (no tuples, no numpy)."""
    written = tiny_config().to_json("bfloat16")
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(True),
        tiny_config(False),
        tiny_config(False, projector="none"),
        tiny_config(True, bos_token_id=3, eos_token_id=[4, 5]),
    ],
)
def test_round_trip(config: DraftConfig, tmp_path: Path) -> None:
    """Written and read again, a config is the same."""
    assert read_config(write(tmp_path, config.to_json("bfloat16"))) == config


def test_config_cannot_be_changed() -> None:
    """A config is frozen once it is checked."""
    with pytest.raises(ValueError, match="frozen"):
        tiny_config().block_size = 8  # type: ignore[misc]


def test_num_proposals() -> None:
    """An engine serves one draft less than the block has rows."""
    assert tiny_config(block_size=16).num_proposals == 15


# -- read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        mutated(architectures=["DominoDraftModel"]),
        mutated(architectures=["Qwen3DFlashDraftModel"]),
        mutated(architectures=["DominoDraftModel"], auto_map={"AutoModel": "domino.X"}),
        mutated(emb_dim=256),
        flat("emb_dim"),
        flat("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"),
        flat(architectures=["DominoDraftModel"], model_type="domino"),
        mutated(block_size=DROP, nested_block_size=16),
        mutated(nested_block_size=16),
        mutated(num_target_layers=DROP, nested_num_target_layers=36),
        mutated(rope_parameters=DROP),
        mutated(rope_theta=DROP),
        mutated(rope_theta=1000000.0),
        mutated(rope_parameters=DROP, rope_scaling={"type": "default"}),
        mutated(dtype=DROP, torch_dtype="bfloat16"),
        mutated(transformers_version="5.5.3", use_cache=True, initializer_range=0.02),
        mutated(draft_vocab_size=151936, num_anchors=256, loss_decay_gamma=7.0),
        mutated(layer_types=DROP, is_causal=DROP, sliding_window=DROP, attention_bias=DROP),
        mutated(nested_mask_token="<|MASK|>"),
    ],
    ids=[
        "specforge", "automodel", "auto-map", "emb-dim-twice", "emb-dim-top", "head-fields-top",
        "all-top", "nested-block-size", "block-size-twice", "nested-target-layers",
        "theta-top-only", "theta-nested-only", "theta-float", "old-rope-scaling", "torch-dtype",
        "library-fields", "trainer-fields", "defaults-left-out", "mask-token-name",
    ],
)  # fmt: skip
def test_variants_read_as_the_same_config(raw: dict[str, Any]) -> None:
    """Every known producer's layout of the same draft is read as the same config."""
    assert parse_config(raw) == parse_config(CANONICAL)


def test_dflash_variant_is_read() -> None:
    """Without a projector it is plain DFlash, with unshifted labels."""
    raw = mutated(dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9]})
    config = parse_config(raw)
    assert not config.has_head and config.shift_label is False


def test_ids_of_the_text_are_read() -> None:
    """Start and end token ids survive, one or several."""
    config = parse_config(mutated(eos_token_id=[151645, 151643], bos_token_id=None))
    assert config.eos_token_id == [151645, 151643] and config.bos_token_id is None


# -- refused ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "P=2": (mutated(nested_pure_draft_prefix_len=2), ["pure_draft_prefix_len", "2", "1"]),
    "P=0": (mutated(nested_pure_draft_prefix_len=0), ["pure_draft_prefix_len", "0", "1"]),
    "P missing": (mutated(nested_pure_draft_prefix_len=DROP), ["pure_draft_prefix_len", "missing"]),
    "P bool": (mutated(nested_pure_draft_prefix_len=True), ["pure_draft_prefix_len", "True"]),
    "shift missing": (mutated(nested_shift_label=DROP), ["shift_label", "missing", "true or false"]),
    "shift string": (mutated(nested_shift_label="true"), ["shift_label", "'true'"]),
    "shift one": (mutated(nested_shift_label=1), ["shift_label", "1", "true or false"]),
    "shift null": (mutated(nested_shift_label=None), ["shift_label", "missing"]),
    "emb_dim differs": (mutated(emb_dim=128), ["emb_dim", "256", "128", "dflash_config"]),
    "emb_dim missing": (mutated(nested_emb_dim=DROP), ["emb_dim", "domino"]),
    "emb_dim string": (mutated(nested_emb_dim="256"), ["emb_dim", "'256'"]),
    "gru missing": (mutated(nested_gru_hidden_dim=DROP), ["gru_hidden_dim", "domino"]),
    "gru zero": (mutated(nested_gru_hidden_dim=0), ["gru_hidden_dim", "0"]),
    "block 1": (mutated(block_size=1), ["block_size", "1", "greater than 1"]),
    "block differs": (mutated(nested_block_size=8), ["block_size", "8", "16"]),
    "block missing": (mutated(block_size=DROP), ["block_size", "missing"]),
    "block float": (mutated(block_size=16.5), ["block_size", "16.5"]),
    "block bool": (mutated(block_size=True), ["block_size", "True"]),
    "projector unknown": (
        mutated(nested_projector_type="causal_v5"),
        ["projector_type", "causal_v5", "domino"],
    ),
    "projector missing": (mutated(nested_projector_type=DROP), ["projector_type", "domino"]),
    "projector list": (mutated(nested_projector_type=["domino"]), ["projector_type"]),
    "head ignored": (
        mutated(nested_projector_type=DROP, nested_shift_label=False),
        ["gru_hidden_dim", "projector_type", "ignored"],
    ),
    "shifted dflash": (
        mutated(nested_projector_type=DROP, nested_gru_hidden_dim=DROP, nested_emb_dim=DROP),
        ["shift_label", "projector_type"],
    ),
    "ids duplicate": (mutated(nested_target_layer_ids=[1, 9, 9]), ["target_layer_ids", "duplicate"]),
    "ids beyond": (mutated(nested_target_layer_ids=[1, 36]), ["target_layer_ids", "36", "35"]),
    "ids negative": (mutated(nested_target_layer_ids=[-1, 3]), ["target_layer_ids", "-1"]),
    "ids empty": (mutated(nested_target_layer_ids=[]), ["target_layer_ids"]),
    "ids missing": (mutated(nested_target_layer_ids=DROP), ["target_layer_ids", "missing"]),
    "ids bool": (mutated(nested_target_layer_ids=[True, 9]), ["target_layer_ids", "True"]),
    "ids string": (mutated(nested_target_layer_ids=["1", 9]), ["target_layer_ids", "'1'"]),
    "ids number": (mutated(nested_target_layer_ids=9), ["target_layer_ids", "9"]),
    "target layers missing": (mutated(num_target_layers=DROP), ["num_target_layers", "missing"]),
    "mask missing": (mutated(nested_mask_token_id=DROP), ["mask_token_id", "missing"]),
    "mask beyond": (mutated(nested_mask_token_id=151936), ["mask_token_id", "151936"]),
    "mask negative": (mutated(nested_mask_token_id=-1), ["mask_token_id", "-1"]),
    "mask bool": (mutated(nested_mask_token_id=True), ["mask_token_id", "True"]),
    "mask string": (mutated(nested_mask_token_id="151669"), ["mask_token_id", "'151669'"]),
    "mask differs": (mutated(mask_token_id=151670), ["mask_token_id", "151669", "151670"]),
    "theta missing": (mutated(rope_theta=DROP, rope_parameters=DROP), ["rope_theta", "missing"]),
    "theta differs": (mutated(rope_theta=10000), ["RoPE", "10000", "1000000"]),
    "theta zero": (mutated(rope_theta=0, rope_parameters=None), ["rope_theta", "0"]),
    "theta word": (mutated(rope_theta="x", rope_parameters=None), ["rope_theta", "'x'"]),
    "theta list": (mutated(rope_theta=[1e6], rope_parameters=None), ["rope_theta"]),
    "theta bool": (mutated(rope_theta=True, rope_parameters=None), ["rope_theta", "True"]),
    "theta infinite": (
        mutated(rope_theta=float("inf"), rope_parameters=None),
        ["rope_theta", "inf"],
    ),
    "yarn": (
        mutated(rope_scaling={"rope_type": "yarn", "factor": 4}),
        ["rope_scaling", "yarn", "default"],
    ),
    "partial rotary": (
        mutated(rope_parameters={"rope_theta": 1000000, "partial_rotary_factor": 0.25}),
        ["rope_parameters", "partial_rotary_factor"],
    ),
    "m-rope": (
        mutated(rope_parameters={"rope_theta": 1000000, "mrope_section": [1, 1, 2]}),
        ["rope_parameters", "mrope_section"],
    ),
    "partial rotary top": (mutated(partial_rotary_factor=0.25), ["partial_rotary_factor"]),
    "rope not an object": (mutated(rope_parameters=[1]), ["rope_parameters", "object"]),
    "sliding layer": (
        mutated(layer_types=["full_attention"] * 4 + ["sliding_attention"]),
        ["layer_types", "sliding_attention", "full_attention"],
    ),
    "layer types number": (mutated(layer_types=5), ["layer_types", "5"]),
    "layer types too few": (mutated(layer_types=["full_attention"]), ["layer_types", "5"]),
    "sliding window on": (mutated(use_sliding_window=True), ["use_sliding_window", "True"]),
    "causal": (mutated(is_causal=True), ["is_causal", "True"]),
    "bias": (mutated(attention_bias=True), ["attention_bias", "True"]),
    "activation": (mutated(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    "pruned vocabulary": (mutated(draft_vocab_size=32000), ["draft_vocab_size", "32000", "151936"]),
    "heads": (mutated(num_key_value_heads=5), ["num_attention_heads", "32", "5"]),
    "odd head": (mutated(head_dim=127), ["head_dim", "127", "even"]),
    "hidden missing": (mutated(hidden_size=DROP), ["hidden_size", "missing"]),
    "hidden string": (mutated(hidden_size="4096"), ["hidden_size", "'4096'"]),
    "hidden zero": (mutated(hidden_size=0), ["hidden_size", "0"]),
    "eps zero": (mutated(rms_norm_eps=0), ["rms_norm_eps", "0"]),
    "eps infinite": (mutated(rms_norm_eps=float("inf")), ["rms_norm_eps", "inf"]),
    "eps bool": (mutated(rms_norm_eps=True), ["rms_norm_eps", "True"]),
    "bos bool": (mutated(bos_token_id=True), ["bos_token_id", "True"]),
    "bos string": (mutated(bos_token_id="5"), ["bos_token_id", "'5'"]),
    "eos string": (mutated(eos_token_id="5"), ["eos_token_id", "'5'"]),
    "eos bools": (mutated(eos_token_id=[True]), ["eos_token_id", "True"]),
    "architecture": (mutated(architectures=["Qwen3ForCausalLM"]), ["architectures", "Qwen3For"]),
    "architecture missing": (mutated(architectures=DROP), ["architectures", "DFlashDraftModel"]),
    "architecture string": (mutated(architectures="DFlashDraftModel"), ["architectures"]),
    "nested not an object": (mutated(dflash_config=[1]), ["dflash_config", "object"]),
    "unknown top": (mutated(blok_size=3), ["unknown", "blok_size", "did you mean 'block_size'"]),
    "unknown nested": (
        mutated(nested_shift_labels=True),
        ["unknown", "dflash_config", "shift_labels", "did you mean 'shift_label'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """A wrong config is refused in words that name the file, the field and the value."""
    raw, words = REFUSED[name]
    with pytest.raises(ValueError) as error:
        read_config(write(tmp_path, raw))
    message = str(error.value)
    assert "config.json" in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    "content", [b"", b'{"block_size": 16, "hid', b"\xff\xfe\x00", b"[1, 2]", b"null", b"[" * 99999]
)
def test_unreadable_file(content: bytes, tmp_path: Path) -> None:
    """An empty, cut, binary or non-object file is refused and named."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(path)


def test_missing_file(tmp_path: Path) -> None:
    """A folder without config.json is named."""
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_config(tmp_path / "config.json")


def test_folder_in_place_of_the_file(tmp_path: Path) -> None:
    """A folder called config.json is refused like any unreadable file."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path / "config.json")


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    """A path below a plain file is refused like any unreadable file."""
    (tmp_path / "draft").write_text("x")
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path / "draft" / "config.json")
