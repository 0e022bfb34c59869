"""Export and import: golden files of every layout, bit-equal round trips, clear refusals."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from domino_kit.checkpoint import load_draft, save_draft
from domino_kit.config import read_config
from domino_kit.interop import export_draft, import_draft
from domino_kit.layouts import FORMATS
from domino_kit.manifest import MANIFEST_NAME, TRACE_NAME, Manifest, TargetIdentity
from domino_kit.modeling import DominoDraft
from domino_kit.serve.checks import check_draft_files
from tests.command import domino
from tests.layout_cases import (
    AUTOMODEL,
    LAYERS,
    MODEL_OPTIMIZER,
    ROPE,
    SOURCES,
    SPECFORGE,
    SPECULATORS,
    SPECULATORS_FLAT,
    VERL_SPECO,
    head,
)
from tests.tiny import tiny_draft

KINDS = {
    "shifted": lambda: tiny_draft(True, bos_token_id=2, eos_token_id=[3, 4]),
    "unshifted": lambda: tiny_draft(False),
    "dflash": lambda: tiny_draft(False, projector="none"),
}


def manifest_of(model: DominoDraft) -> Manifest:
    """A manifest that describes ``model``."""
    config = model.config
    target = TargetIdentity(
        name="some/target", config_hash="", embedding_hash="", head_hash="", tokenizer_hash="",
        chat_template_hash=None, thinking=None,
    )  # fmt: skip
    return Manifest(
        toolkit_version="0", libraries={}, command=[], git_commit=None, seed=0, recipe={},
        target=target, mask_token_id=config.mask_token_id, mask_token_source="recipe",
        target_layer_ids=list(config.target_layer_ids), last_layer_norm=None,
        rope={"rope_theta": config.rope_theta}, shift_label=config.shift_label,
        block_size=config.block_size, num_proposals=config.num_proposals, weights_dtype="float32",
        data={}, training={}, measured={}, draft=config.model_dump(mode="json"),
    )  # fmt: skip


def save(folder: Path, model: DominoDraft, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of this toolkit with manifest and trace."""
    save_draft(folder, model, manifest_of(model), dtype)
    (folder / TRACE_NAME).write_bytes(b"recorded")
    return folder


def write_source(
    folder: Path, raw: dict[str, Any], rename: Callable[[str], str], **extra: Tensor
) -> dict[str, Tensor]:
    """Another tool's checkpoint in bfloat16; returns its tensors under our names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    state = {name: t.bfloat16() for name, t in tiny_draft().state_dict().items()}
    save_file({**{rename(name): t for name, t in state.items()}, **extra}, weights(folder))
    return state


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether names, types and every bit are equal."""
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    assert kinds == {name: tensor.dtype for name, tensor in wanted.items()}
    return all(torch.equal(found[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in wanted)


def refuse(words: list[str], tmp_path: Path, raw: dict[str, Any], **given: Any) -> None:
    """Assert that an import is refused in one sentence, and that nothing is left of it."""
    if not (tmp_path / "source").exists():
        write_source(tmp_path / "source", raw, lambda name: name)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError) as error:
        import_draft(tmp_path / "source", tmp_path / "out", given)
    message = str(error.value)
    assert [word for word in [*words, str(tmp_path / "source")] if word not in message] == [], (
        message
    )
    assert "\n" not in message
    assert sorted(tmp_path.iterdir()) == before


def without(raw: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    """A copy without some fields of either level, with changes at the top."""
    raw = copy.deepcopy(raw)
    for name in names:
        raw.pop(name, None)
        raw.get("dflash_config", {}).pop(name, None)
    return {**raw, **changes}


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_everything(tmp_path: Path, form: str, kind: str) -> None:
    model = KINDS[kind]()
    dtype = torch.bfloat16 if kind == "shifted" else torch.float32
    source = save(tmp_path / "draft", model, dtype)
    export_draft(source, form, tmp_path / "theirs")
    done = import_draft(tmp_path / "theirs", tmp_path / "ours", {})
    assert load_draft(tmp_path / "ours", dtype, "cpu")[0].config == model.config
    assert same_bits(load_file(weights(tmp_path / "ours")), load_file(weights(source)))
    for name in ("config.json", MANIFEST_NAME, TRACE_NAME):
        assert (tmp_path / "ours" / name).read_bytes() == (source / name).read_bytes(), name
    assert [c.kind for c in done.changes if c.subject == "file"] == ["kept", "kept"]


def test_a_round_trip_without_a_manifest(tmp_path: Path) -> None:
    save_draft(tmp_path / "draft", tiny_draft(), None, torch.float32)
    done = export_draft(tmp_path / "draft", "vllm-speculators", tmp_path / "theirs")
    assert any("target's name" in what for what in done.not_carried)
    import_draft(tmp_path / "theirs", tmp_path / "ours", {})
    assert read_config(tmp_path / "ours" / "config.json") == tiny_draft().config
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


# -- what is written -----------------------------------------------------------------------------


def test_the_speculators_format(tmp_path: Path) -> None:
    """Against a file written by hand, since a round trip would hide an error made twice."""
    source = save(tmp_path / "draft", tiny_draft())
    done = export_draft(source, "vllm-speculators", tmp_path / "out")
    raw = config_of(tmp_path / "out")
    layers = raw.pop("transformer_layer_config")
    assert layers["rope_theta"] == 10000.0
    assert {k: v for k, v in layers.items() if k in {**LAYERS, **ROPE}} == {**LAYERS, **ROPE}
    assert "block_size" not in layers and "dflash_config" not in layers
    assert raw == {
        "architectures": ["DominoDraftModel"], "speculators_model_type": "domino",
        "dtype": "float32", "block_size": 4, "draft_vocab_size": 32, "num_target_layers": 4,
        "mask_token_id": 1, "aux_hidden_state_layer_ids": [1, 3], "sample_from_anchor": True,
        "gru_hidden_dim": 12, "logits_correction_emb_dim": 10, "pure_draft_prefix_len": 1,
        "speculators_config": {
            "algorithm": "domino", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "some/target", "architectures": []},
        },
    }  # fmt: skip
    tensors = load_file(weights(tmp_path / "out"))
    assert {name for name in tensors if "prefix_gru" in name or "embed_proj" in name} == {
        "logits_correction.prefix_gru.weight_ih_l0", "logits_correction.prefix_gru.weight_hh_l0",
        "logits_correction.embed_proj.0.weight", "logits_correction.embed_proj.2.weight",
    }  # fmt: skip
    assert {"fc.weight", "layers.1.self_attn.q_norm.weight"} <= set(tensors)
    lines = done.lines()
    assert (
        "config  changed  dflash_config.target_layer_ids [0, 2] -> aux_hidden_state_layer_ids "
        "[1, 3]: this layout numbers the output of layer i as i + 1"
    ) in lines
    assert "config  renamed  dflash_config.shift_label -> sample_from_anchor" in lines
    assert "config  added    draft_vocab_size 32" in lines
    assert "tensor  renamed  embed_proj.0.weight -> logits_correction.embed_proj.0.weight" in lines


def test_tokens_a_step_in_the_speculators_format(tmp_path: Path) -> None:
    """Row 0 drafts a token too in the shifted mode, and that runtime uses it."""
    export_draft(save(tmp_path / "draft", tiny_draft(False)), "vllm-speculators", tmp_path / "out")
    raw = config_of(tmp_path / "out")
    assert raw["sample_from_anchor"] is False
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        ("sglang", "DFlashDraftModel"),
        ("specforge", "DominoDraftModel"),
        ("automodel", "Qwen3DFlashDraftModel"),
    ],
)
def test_formats_of_the_dflash_family(tmp_path: Path, form: str, architecture: str) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    export_draft(source, form, tmp_path / "out")
    wanted = config_of(source)
    wanted["architectures"] = [architecture]
    if form == "automodel":
        wanted["dflash_config"]["block_size"] = 4
    assert config_of(tmp_path / "out") == wanted
    assert same_bits(load_file(weights(tmp_path / "out")), load_file(weights(source)))


def test_export_of_another_tools_draft(tmp_path: Path) -> None:
    state = write_source(tmp_path / "source", SPECFORGE, lambda name: f"draft_model.{name}")
    done = export_draft(tmp_path / "source", "sglang", tmp_path / "out")
    check_draft_files(tmp_path / "out")
    assert same_bits(load_file(weights(tmp_path / "out")), state)
    assert "tensor  renamed  draft_model.fc.weight -> fc.weight" in done.lines()
    name = ["DFlashDraftModel"]
    assert [c.after for c in done.changes if c.old == "architectures"] == [name]


@pytest.mark.sglang
@pytest.mark.parametrize("kind", KINDS)
def test_sglang_parses_its_export(tmp_path: Path, kind: str) -> None:
    dflash_utils = pytest.importorskip("sglang.srt.speculative.dflash_utils")
    config = KINDS[kind]().config
    export_draft(save(tmp_path / "draft", KINDS[kind]()), "sglang", tmp_path / "out")
    check_draft_files(tmp_path / "out")
    found = dflash_utils.parse_dflash_draft_config(draft_hf_config=config_of(tmp_path / "out"))
    assert found.is_domino == config.has_head
    assert tuple(found.target_layer_ids) == config.target_layer_ids
    assert (found.block_size, found.num_target_layers) == (4, 4)
    assert found.mask_token_id == 1
    if config.has_head:
        assert (found.shift_label, found.pure_draft_prefix_len) == (config.shift_label, 1)
        assert (found.gru_hidden_dim, found.emb_dim) == (12, 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cast_only_when_asked(tmp_path: Path, dtype: str) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    done = export_draft(source, "sglang", tmp_path / "out", dtype)
    kind = getattr(torch, dtype)
    wanted = {name: tensor.to(kind) for name, tensor in load_file(weights(source)).items()}
    assert same_bits(load_file(weights(tmp_path / "out")), wanted)
    assert config_of(tmp_path / "out")["dtype"] == dtype
    assert (tmp_path / "out" / MANIFEST_NAME).exists()
    assert (tmp_path / "out" / TRACE_NAME).exists() == (dtype == "float32")
    said = 'tensor  changed  fc.weight "float32" -> fc.weight "bfloat16"' in done.lines()
    assert said == (dtype == "bfloat16")


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_other_layouts_are_read(tmp_path: Path, name: str) -> None:
    raw, rename, layout = SOURCES[name]
    state = write_source(tmp_path / "source", raw, rename)
    done = import_draft(
        tmp_path / "source",
        tmp_path / "out",
        {"num_target_layers": 4} if layout == "speculators" else {},
    )
    assert done.layout == layout
    model, manifest = load_draft(tmp_path / "out", torch.bfloat16, "cpu")
    assert model.config == tiny_draft().config
    assert manifest is None
    assert config_of(tmp_path / "out") == model.config.to_json("bfloat16")
    assert same_bits(load_file(weights(tmp_path / "out")), state)
    check_draft_files(tmp_path / "out")


def test_what_an_import_drops_is_said(tmp_path: Path) -> None:
    copies = {n: torch.zeros(32, 32) for n in ("embed_tokens.weight", "lm_head.weight")}
    extra = {**copies, "rotary_emb.inv_freq": torch.zeros(4)}
    write_source(tmp_path / "source", SPECULATORS, head("logits_correction."), **extra)
    lines = import_draft(tmp_path / "source", tmp_path / "out", {"num_target_layers": 4}).lines()
    for line in (
        "tensor  dropped  embed_tokens.weight: a copy of the target's own",
        "tensor  dropped  lm_head.weight: a copy of the target's own",
        "tensor  dropped  rotary_emb.inv_freq: computed anew from the base",
        "config  dropped  lambda_base_decay_ratio 0.5",
        'config  dropped  speculators_config.verifier.name_or_path "some/target"',
        "config  added    num_target_layers 4",
        "config  renamed  logits_correction_emb_dim -> dflash_config.emb_dim",
        "config  renamed  transformer_layer_config.hidden_size -> hidden_size",
    ):
        assert line in lines, "\n".join(lines)
    assert set(load_file(weights(tmp_path / "out"))) == set(tiny_draft().state_dict())


def test_a_speculators_draft_without_a_head(tmp_path: Path) -> None:
    """It writes the fields of a head that it has not, with their defaults."""
    model = KINDS["dflash"]()
    raw = without(SPECULATORS_FLAT, projector_type="dflash", shift_label=False, num_target_layers=4)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw))
    save_file(model.state_dict(), weights(tmp_path / "source"))
    import_draft(tmp_path / "source", tmp_path / "out", {})
    assert read_config(tmp_path / "out" / "config.json") == model.config


def test_shards_are_read(tmp_path: Path) -> None:
    state = write_source(tmp_path / "source", SPECFORGE, lambda name: name)
    weights(tmp_path / "source").unlink()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        part = {name: state[name] for name in state if files[name] == file}
        save_file(part, tmp_path / "source" / file)
    index = tmp_path / "source" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    import_draft(tmp_path / "source", tmp_path / "out", {})
    assert same_bits(load_file(weights(tmp_path / "out")), state)


# -- manifest and trace --------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["weights", "mask_token_id", "broken"])
def test_a_manifest_of_another_draft_is_left_out(tmp_path: Path, wrong: str) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    if wrong == "weights":
        save_file(tiny_draft(seed=1).state_dict(), weights(source))
    elif wrong == "mask_token_id":
        raw = config_of(source)
        raw["dflash_config"]["mask_token_id"] = 5
        (source / "config.json").write_text(json.dumps(raw))
    else:
        (source / MANIFEST_NAME).write_text("{")
    done = import_draft(source, tmp_path / "out", {})
    fact = "manifest" if wrong == "broken" else wrong
    for name in (MANIFEST_NAME, TRACE_NAME):
        assert not (tmp_path / "out" / name).exists()
        assert f"file    dropped  {name}: describes another draft: {fact} differ" in done.lines()
    assert load_draft(tmp_path / "out", torch.float32, "cpu")[1] is None


def test_a_trace_without_a_manifest_is_left_out(tmp_path: Path) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    (source / MANIFEST_NAME).unlink()
    done = import_draft(source, tmp_path / "out", {})
    assert not (tmp_path / "out" / TRACE_NAME).exists()
    assert any(TRACE_NAME in line and "dropped" in line for line in done.lines())


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "name", "flag", "value"),
    [
        (SPECFORGE, "shift_label", "--no-shift-label", True),
        (SPECFORGE, "pure_draft_prefix_len", "--pure-draft-prefix-len", 1),
        (VERL_SPECO, "mask_token_id", "--mask-token-id", 1),
        (AUTOMODEL, "block_size", "--block-size", 4),
        (AUTOMODEL, "num_target_layers", "--num-target-layers", 4),
        (MODEL_OPTIMIZER, "target_layer_ids", "--target-layer-ids", [0, 2]),
    ],
)
def test_a_missing_fact_must_be_supplied(
    tmp_path: Path, raw: dict[str, Any], name: str, flag: str, value: Any
) -> None:
    raw = without(raw, name)
    raw.pop("target_num_hidden_layers", None)
    refuse(["config.json", f"{name} is missing", flag], tmp_path, raw)
    import_draft(tmp_path / "source", tmp_path / "out", {name: value})
    assert read_config(tmp_path / "out" / "config.json") == tiny_draft().config


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sample_from_anchor", "shift_label"),
        ("pure_draft_prefix_len", "pure_draft_prefix_len"),
        ("mask_token_id", "mask_token_id"),
        ("aux_hidden_state_layer_ids", "target_layer_ids"),
    ],
)
def test_a_missing_fact_of_speculators(tmp_path: Path, name: str, theirs: str) -> None:
    refuse([f"{theirs} is missing"], tmp_path, without(SPECULATORS, name), num_target_layers=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shift_label": False}, ["--no-shift-label", "shift_label", "True"]),
        ({"mask_token_id": 2}, ["--mask-token-id", "2", "1"]),
        ({"num_target_layers": 5}, ["--num-target-layers", "5", "4"]),
        ({"target_layer_ids": [1, 3]}, ["--target-layer-ids", "[1, 3]", "[0, 2]"]),
    ],
)
def test_an_option_never_overrides_the_file(
    tmp_path: Path, given: dict[str, Any], words: list[str]
) -> None:
    refuse(words, tmp_path, SPECFORGE, **given)


def test_an_option_that_repeats_the_file_is_accepted(tmp_path: Path) -> None:
    write_source(tmp_path / "source", SPECULATORS, head("logits_correction."))
    given = {"num_target_layers": 4, "target_layer_ids": [0, 2], "shift_label": True}
    import_draft(tmp_path / "source", tmp_path / "out", given)
    assert read_config(tmp_path / "out" / "config.json") == tiny_draft().config


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**SPECFORGE, "draft_vocab_size": 16}, ["draft_vocab_size", "16", "SGLang cannot serve"]),
        ({**SPECULATORS, "draft_vocab_size": 16}, ["draft_vocab_size", "SGLang cannot serve"]),
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, ["speculators_model_type", "eagle3"]),
        ({**SPECULATORS, "shift_label": False}, ["sample_from_anchor", "shift_label", "False"]),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]}, ["embedding's output", "[0, 2]"]),
        ({**SPECULATORS, "transformer_layer_config": 3}, ["transformer_layer_config", "object"]),
        ({**SPECULATORS, "surprise": 1}, ["'surprise'"]),
        ({**SPECULATORS, "pure_draft_prefix_len": 2}, ["pure_draft_prefix_len", "2"]),
        ({**AUTOMODEL, "block_size": 5}, ["block_size", "5", "4"]),
        ({**MODEL_OPTIMIZER, "emb_dim": 11}, ["emb_dim", "11", "10"]),
        ({**VERL_SPECO, "target_num_hidden_layers": 5}, ["target_num_hidden_layers", "5"]),
        ({**VERL_SPECO, "target_hidden_size": 64}, ["target_hidden_size", "64"]),
        ({**VERL_SPECO, "num_context_layers": 3}, ["num_context_layers", "3"]),
        ({**LAYERS, "architectures": ["Qwen3ForCausalLM"]}, ["architectures", "Qwen3ForCausalLM"]),
        ({**SPECFORGE, "dflash_config.emb_dim": 10}, ["'dflash_config.emb_dim'"]),
        (without(MODEL_OPTIMIZER, "projector_type"), ["shift_label", "projector_type"]),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path: Path, raw: dict[str, Any], words: list[str]) -> None:
    given = {"num_target_layers": 4} if "speculators_model_type" in raw else {}
    refuse(words, tmp_path, raw, **given)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("d2t", ["'d2t'", "SGLang cannot serve"]),
        ("embed_tokens.weight", ["embed_tokens.weight", "unknown"]),
        ("draft_model.fc.weight", ["twice", "'draft_model.fc.weight'"]),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, name: str, words: list[str]) -> None:
    write_source(tmp_path / "source", SPECFORGE, lambda n: n, **{name: torch.zeros(3, 3)})
    refuse(words, tmp_path, SPECFORGE)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "source", SPECFORGE, lambda name: f"other.{name}")
    refuse(["lacks tensor"], tmp_path, SPECFORGE)


def test_a_speculators_draft_must_be_imported_before_it_is_exported(tmp_path: Path) -> None:
    write_source(tmp_path / "source", SPECULATORS, head("logits_correction."))
    with pytest.raises(ValueError, match="domino import"):
        export_draft(tmp_path / "source", "sglang", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused_and_untouched(tmp_path: Path) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for convert in (
        lambda: export_draft(source, "sglang", tmp_path / "out"),
        lambda: import_draft(source, tmp_path / "out", {}, tmp_path / "report.json"),
    ):
        with pytest.raises(ValueError, match="already exists"):
            convert()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]


# -- the commands --------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path) -> None:
    source = save(tmp_path / "draft", tiny_draft())
    out, report = tmp_path / "theirs", tmp_path / "reports" / "a.json"
    result = domino(
        "export", "--draft", source, "--format", "vllm-speculators", "--output", out,
        "--report", report,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "dflash_config.emb_dim -> logits_correction_emb_dim" in result.stdout
    found = json.loads(report.read_text())
    assert (found["command"], found["layout"]) == ("export", "vllm-speculators")
    assert {"config", "tensor", "file"} == {change["subject"] for change in found["changes"]}
    assert {"kept", "renamed", "changed", "added"} <= {c["kind"] for c in found["changes"]}

    raw = config_of(out)
    del raw["sample_from_anchor"], raw["aux_hidden_state_layer_ids"]
    (out / "config.json").write_text(json.dumps(raw))
    given = ["--shift-label", "--target-layer-ids", "0, 2"]
    result = domino("import", out, "--output", tmp_path / "ours", *given)
    assert result.returncode == 0, result.stderr
    assert load_draft(tmp_path / "ours", torch.float32, "cpu")[0].config == tiny_draft().config
    assert (tmp_path / "ours" / MANIFEST_NAME).read_bytes() == (source / MANIFEST_NAME).read_bytes()


def test_the_command_offers_all_formats() -> None:
    from domino_kit.commands.converting import export_command

    (option,) = [each for each in export_command.params if each.name == "form"]
    assert tuple(option.type.choices) == FORMATS
