"""Blocks that show some true tokens after the anchor: lengths, inputs, weights, determinism."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.train.dataset import anchor_generators, collate
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.setup import Run, build_run
from domino_kit.train.step import Blocks, draw_blocks, forward_blocks
from tests.test_training import recipe
from tests.tiny_chat import save_target


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), family="llama")


@pytest.mark.parametrize("shift", [True, False])
def test_prefix_weights_start_behind_the_prefix(shift: bool) -> None:
    found = alignment.prefix_weights(torch.tensor([1, 3]), 5, shift, 4.0)
    assert torch.equal(found[0], alignment.decay_weights(5, shift, 4.0))
    for row, offset in enumerate(alignment.row_offsets(5, shift).tolist()):
        expected = math.exp(-(offset - 3) / 4) if offset >= 3 else 0.0
        assert found[1, row].item() == pytest.approx(expected)


def test_prefix_lengths_follow_the_truncated_geometric_prior() -> None:
    keep = torch.ones(1, 20000, dtype=torch.bool)
    found = alignment.sample_prefixes(keep, 0.5, 0.5, 5, [torch.Generator().manual_seed(0)])
    shares = torch.bincount(found.flatten(), minlength=5) / found.numel()
    expected = torch.tensor([0, 0.5, 0.5 * 4 / 7, 0.5 * 2 / 7, 0.5 / 7])
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.01)


def drawn(run: Run, numbers: list[int], share: float) -> Blocks:
    samples = [run.samples[i] for i in numbers]
    batch = collate(samples, "cpu")
    options = run.recipe.train.model_copy(update={"visible_prefix": share})
    return draw_blocks(batch, run.model, 5, 4.0, anchor_generators(samples, 7, 1), options)


@pytest.mark.parametrize("shift", ["true", "false"])
def test_a_visible_prefix_shows_true_tokens_and_leaves_the_anchors_alone(
    target_folder: Path, tmp_path: Path, shift: str
) -> None:
    run = build_run(recipe(target_folder, tmp_path, f"draft.shift_label={shift}"))
    numbers = [0, 3, 5]
    blocks, before = drawn(run, numbers, 1.0), drawn(run, numbers, 0.0)
    assert torch.equal(blocks.anchors, before.anchors)
    assert before.prefix is None
    assert blocks.prefix is not None
    batch = collate([run.samples[i] for i in numbers], "cpu")
    found = FeatureSource(encode_row(run.target), 0)(batch)
    record: dict[str, Tensor] = {}
    forward_blocks(run.model, run.target, batch, found.features, blocks, record)
    lengths = set()
    for i, b in blocks.keep.nonzero().tolist():
        length, anchor = int(blocks.prefix[i, b]), int(blocks.anchors[i, b])
        lengths.add(length)
        for row in range(4):
            inside = anchor + row < batch.input_ids.shape[1]
            shown = int(batch.input_ids[i, anchor + row]) if inside and row < length else 1
            if inside:
                assert record["block_ids"][i, b, row] == shown
            offset = row + (1 if shift == "true" else 0)
            weight = float(blocks.weights[i, b, row])
            assert weight == 0 or weight == pytest.approx(math.exp(-(offset - length) / 4))
            assert weight == 0 or offset >= length
    assert lengths == {2, 3}


def test_prefixes_depend_on_seed_epoch_and_sample_only(target_folder: Path, tmp_path: Path) -> None:
    run = build_run(recipe(target_folder, tmp_path))
    alone, together = drawn(run, [3], 0.5), drawn(run, [2, 3, 4], 0.5)
    assert alone.prefix is not None and together.prefix is not None
    count = int(alone.keep[0].sum())
    assert torch.equal(alone.prefix[0, :count], together.prefix[1, :count])
