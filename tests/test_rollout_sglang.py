"""SGLang as second opinion: its rollout on our weights, its parser on our config.json."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from domino_kit import decoding
from tests.tiny import rollout_case, tiny_config, tiny_draft, tiny_target

pytestmark = pytest.mark.sglang
MODES = [True, False]


def sglang_module(name: str) -> Any:
    """An SGLang module; both that are needed here import on a machine without a GPU."""
    return pytest.importorskip(
        f"sglang.srt.speculative.{name}", exc_type=ImportError, reason="SGLang is not installed"
    )


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("pool", ["off", "vocabulary"])
@pytest.mark.parametrize("block", [2, 8, 16])
def test_rollout_equals_sglang(block: int, pool: str, batch: int, shift_label: bool) -> None:
    """The same hidden rows and anchors give the same proposals, candidate pool off or full."""
    oracle = sglang_module("domino_utils").domino_greedy_rollout
    model, target, hidden, anchors, arguments = rollout_case(shift_label, block, batch)
    ours = decoding.rollout(model, target, hidden, anchors, block - 1).tokens
    pool_size = 0 if pool == "off" else 64
    theirs = oracle(**arguments, candidate_pool_size=pool_size, in_cuda_graph=False)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("shift_label", MODES)
def test_head_decides_some_proposals(shift_label: bool) -> None:
    """The comparison above is not empty: without the head the proposals differ."""
    target = tiny_target(vocab=64)
    model = tiny_draft(shift_label, block_size=8, vocab_size=64)
    hidden = torch.randn(5, 8, 32, generator=torch.Generator().manual_seed(8))
    anchors = torch.arange(5)
    on = decoding.rollout(model, target, hidden, anchors, 7).tokens
    off = decoding.rollout(model, target, hidden, anchors, 7, use_head=False).tokens
    assert on[:, 0].tolist() == off[:, 0].tolist()
    assert on.tolist() != off.tolist()


def parsed(config: dict[str, Any], as_object: bool) -> Any:
    parse = sglang_module("dflash_utils").parse_dflash_draft_config
    return parse(draft_hf_config=SimpleNamespace(**config) if as_object else config)


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("as_object", [False, True])
def test_domino_config_passes_sglangs_parser(
    block: int, shift_label: bool, as_object: bool
) -> None:
    """SGLang reads a written Domino config as Domino, every field as written."""
    config = tiny_config(shift_label, block_size=block)
    found = parsed(config.to_json("bfloat16"), as_object)
    assert found.is_domino
    assert found.block_size == found.resolve_block_size(default=99) == block
    assert found.num_hidden_layers == config.num_hidden_layers
    assert found.num_target_layers == config.num_target_layers
    assert found.target_layer_ids == list(config.target_layer_ids)
    assert found.resolve_target_layer_ids(target_num_layers=4) == list(config.target_layer_ids)
    assert found.mask_token_id == config.mask_token_id
    assert found.shift_label is shift_label
    assert found.pure_draft_prefix_len == 1
    assert (found.gru_hidden_dim, found.emb_dim) == (config.gru_hidden_dim, config.emb_dim)
    assert found.output_multiplier == 1.0 and found.final_logit_softcapping is None
    assert not found.attention_sink_bias and found.attention_value_scale is None


@pytest.mark.parametrize("block", [8, 16])
def test_dflash_config_passes_sglangs_parser(block: int) -> None:
    """SGLang reads a written DFlash config as plain DFlash."""
    config = tiny_config(False, projector="none", block_size=block)
    found = parsed(config.to_json("bfloat16"), False)
    assert not found.is_domino and found.projector_type is None
    assert found.block_size == block
    assert found.target_layer_ids == list(config.target_layer_ids)
    assert found.mask_token_id == config.mask_token_id
    assert found.gru_hidden_dim is None and found.emb_dim is None


def test_written_config_has_no_window() -> None:
    """SGLang finds full attention in every layer, so blocks stay bidirectional."""
    module = sglang_module("dflash_utils")
    written = tiny_config().to_json("bfloat16")
    assert module.get_dflash_attention_sliding_window_size(written) is None
    assert list(module.get_dflash_layer_types(written)) == ["full_attention"] * 2


@pytest.mark.parametrize(("layers", "count"), [(36, 5), (64, 5), (28, 5), (36, 1), (12, 3)])
def test_default_layer_ids_equal_sglangs(layers: int, count: int) -> None:
    """The default feature layers are those that SGLang would choose."""
    from domino_kit.target import default_layer_ids

    build = sglang_module("dflash_utils").build_target_layer_ids
    assert default_layer_ids(layers, count) == build(layers, count)
