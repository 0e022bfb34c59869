"""Every index of the method against a naive twin and against the worked facts of the method."""

import math
import random

import pytest
import torch

from domino_kit import alignment

MODES = [True, False]
BLOCKS = [2, 3, 4, 8, 16]


def naive_offset(row: int, shift_label: bool) -> int:
    return row + 1 if shift_label else row


def batch(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded distinct ids and a random loss mask (zero at padding)."""
    rng = random.Random(seed)
    width = max(lengths)
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) + 100
    mask = torch.zeros(len(lengths), width)
    for row, length in enumerate(lengths):
        for place in range(length):
            mask[row, place] = float(rng.random() < 0.6)
    return ids, mask


def generators(seeds: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_row_offsets(block: int, shift_label: bool) -> None:
    """Row k predicts t_{a+k+1} with shift_label and t_{a+k} without."""
    expected = [naive_offset(row, shift_label) for row in range(block)]
    assert alignment.row_offsets(block, shift_label).tolist() == expected
    assert alignment.first_row(shift_label) == expected.index(1)


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_proposal_rows(block: int, shift_label: bool) -> None:
    """Served rows predict offsets 1 … K-1, in order, in both label modes."""
    rows = list(range(block))[alignment.proposal_rows(block, shift_label)]
    assert [naive_offset(row, shift_label) for row in rows] == list(range(1, block))


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_corrected_rows(block: int, shift_label: bool, prefix: int) -> None:
    """Corrected rows start at P with shift_label and at 1 + P without."""
    start = prefix if shift_label else 1 + prefix
    expected = [row >= start for row in range(block)]
    assert alignment.corrected_rows(block, shift_label, prefix).tolist() == expected


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_decay_weights(block: int, shift_label: bool) -> None:
    """Weights are exp(-k/γ) with shift_label, else 0 at row 0 and exp(-(k-1)/γ)."""
    gamma = 7.0
    expected = []
    for row in range(block):
        if shift_label:
            expected.append(math.exp(-row / gamma))
        else:
            expected.append(0.0 if row == 0 else math.exp(-(row - 1) / gamma))
    weights = alignment.decay_weights(block, shift_label, gamma)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


def test_decay_published_values() -> None:
    """γ = 7 gives weight 1 at m = 1, .368 at m = 8 and .117 at m = 16."""
    weights = alignment.decay_weights(16, True, 7.0)
    assert [round(float(weights[m - 1]), 3) for m in (1, 8, 16)] == [1.0, 0.368, 0.117]


def test_valid_anchors() -> None:
    """An anchor is any position whose next token is supervised."""
    _, mask = batch([9, 14, 1, 3])
    valid = alignment.valid_anchors(mask)
    for row in range(mask.shape[0]):
        for place in range(mask.shape[1]):
            following = place + 1 < mask.shape[1] and bool(mask[row, place + 1])
            assert bool(valid[row, place]) == following


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_valid_anchors_mask_types(dtype: torch.dtype) -> None:
    """The loss mask may be boolean, integer or float."""
    mask = torch.tensor([[0, 0, 1, 1, 0]]).to(dtype)
    assert alignment.valid_anchors(mask).tolist() == [[False, True, True, False, False]]


@pytest.mark.parametrize("shift_label", MODES)
def test_first_answer_token_is_learnable(shift_label: bool) -> None:
    """The token just before the answer is an anchor whose first label is the answer's first."""
    ids = torch.arange(10)[None] + 50
    mask = torch.zeros(1, 10)
    mask[0, 4:8] = 1
    assert alignment.valid_anchors(mask)[0].nonzero().flatten().tolist() == [3, 4, 5, 6]
    labels, supervised = alignment.row_labels(ids, mask, torch.tensor([[3]]), 4, shift_label)
    row = alignment.first_row(shift_label)
    assert int(labels[0, 0, row]) == 54 and bool(supervised[0, 0, row])


@pytest.mark.parametrize("shift_label", MODES)
def test_every_anchor_has_a_supervised_row(shift_label: bool) -> None:
    """Whatever anchor is drawn, its offset 1 is supervised, also at the very end of the text."""
    ids, mask = batch([12, 12, 7])
    for row in range(len(ids)):
        for place in alignment.valid_anchors(mask)[row].nonzero().flatten().tolist():
            _, supervised = alignment.row_labels(
                ids[row : row + 1], mask[row : row + 1], torch.tensor([[place]]), 4, shift_label
            )
            assert bool(supervised[0, 0, alignment.first_row(shift_label)])


def test_sample_anchors_distinct_sorted_valid() -> None:
    """Anchors are distinct, sorted, valid, and as many as asked for or as there are."""
    _, mask = batch([20, 11, 4, 30])
    anchors, keep = alignment.sample_anchors(mask, 5, generators([1, 2, 3, 4]))
    valid = alignment.valid_anchors(mask)
    for row in range(4):
        chosen = anchors[row][keep[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert all(bool(valid[row, place]) for place in chosen)
        assert len(chosen) == min(5, int(valid[row].sum()))


def test_sample_anchors_padding() -> None:
    """Places beyond a sample's own count hold anchor 0 with keep false, at the end."""
    mask = torch.zeros(2, 10)
    mask[0, 1:9] = 1
    mask[1, 5:7] = 1
    anchors, keep = alignment.sample_anchors(mask, 6, generators([0, 1]))
    assert anchors.shape == keep.shape == (2, 6)
    assert keep[1].tolist() == [True, True, False, False, False, False]
    assert anchors[1].tolist() == [4, 5, 0, 0, 0, 0]


def test_sample_anchors_without_any() -> None:
    """A sample without supervised tokens gives one place with keep false, not an error."""
    anchors, keep = alignment.sample_anchors(torch.zeros(2, 6), 3, generators([0, 1]))
    assert anchors.tolist() == [[0], [0]] and not keep.any()


def test_sample_anchors_ignores_first_token() -> None:
    """A supervised token at position 0 has no anchor before it and is skipped."""
    mask = torch.tensor([[1.0, 0.0, 0.0]])
    _, keep = alignment.sample_anchors(mask, 3, generators([0]))
    assert not keep.any()


def test_sample_anchors_independent_of_batch() -> None:
    """A sample's draw depends on its own generator only: not on its batch, place or padding."""
    _, mask = batch([20, 25, 9])
    together, keep = alignment.sample_anchors(mask, 4, generators([7, 8, 9]))
    swapped, keep_swapped = alignment.sample_anchors(mask[[2, 0]], 4, generators([9, 7]))
    alone, keep_alone = alignment.sample_anchors(mask[2:, :9], 4, generators([9]))
    assert together[2][keep[2]].tolist() == swapped[0][keep_swapped[0]].tolist()
    assert together[2][keep[2]].tolist() == alone[0][keep_alone[0]].tolist()
    assert together[0][keep[0]].tolist() == swapped[1][keep_swapped[1]].tolist()


def test_sample_anchors_uniform() -> None:
    """Every valid anchor is drawn equally often."""
    mask = torch.zeros(1, 12)
    mask[0, 3:11] = 1
    generator = torch.Generator().manual_seed(0)
    counts = [0] * 12
    for _ in range(2000):
        anchors, _ = alignment.sample_anchors(mask, 2, [generator])
        for place in anchors[0].tolist():
            counts[place] += 1
    assert [place for place, count in enumerate(counts) if count] == list(range(2, 10))
    assert all(abs(count - 500) < 100 for count in counts[2:10])


@pytest.mark.parametrize("shape", [(3,), (2, 5), ()])
def test_block_inputs(shape: tuple[int, ...]) -> None:
    """A block starts with its anchor's token; every other row is the mask."""
    tokens = torch.randint(10, 99, shape)
    block = alignment.block_inputs(tokens, 4, 7)
    assert block.shape == (*shape, 4) and block.dtype == tokens.dtype
    for token, row in zip(tokens.flatten().tolist(), block.view(-1, 4).tolist(), strict=True):
        assert row == [token, 7, 7, 7]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_positions(block: int) -> None:
    """Row 0 sits at the anchor's own position."""
    anchors = torch.tensor([[0, 5], [9, 2]])
    positions = alignment.block_positions(anchors, block)
    for sample in range(2):
        for place in range(2):
            start = int(anchors[sample, place])
            assert positions[sample, place].tolist() == [start + row for row in range(block)]


def naive_visible(
    anchors: list[int], positions: list[int], block: int, query: int, key: int
) -> bool:
    """Whether block row ``query`` may read key ``key`` of ``[context | blocks]``."""
    own = query // block
    if key < len(positions):
        return positions[key] != -1 and positions[key] < anchors[own]
    return (key - len(positions)) // block == own


@pytest.mark.parametrize("block", BLOCKS)
def test_visibility(block: int) -> None:
    """Context strictly before the anchor without padding, the own block, and nothing else."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, -1, -1, -1]])
    anchors = torch.tensor([[5, 6, 0], [4, 7, 2]])
    visible = alignment.visibility(anchors, positions, block)
    context = alignment.context_visibility(anchors, positions)
    assert visible.shape == (2, 3 * block, 8 + 3 * block)
    for sample in range(2):
        for query in range(3 * block):
            expected = [
                naive_visible(
                    anchors[sample].tolist(), positions[sample].tolist(), block, query, key
                )
                for key in range(8 + 3 * block)
            ]
            assert visible[sample, query].tolist() == expected
            assert context[sample, query // block].tolist() == expected[:8]


def test_visibility_of_overlapping_blocks() -> None:
    """Anchors 5 and 6 with block 4 cover the same positions but never see each other."""
    visible = alignment.visibility(torch.tensor([[5, 6]]), torch.arange(10)[None], 4)[0]
    assert visible[:4, :10].sum(1).tolist() == [5] * 4
    assert visible[4:, :10].sum(1).tolist() == [6] * 4
    assert visible[:4, 10:14].all() and visible[4:, 14:].all()
    assert not visible[:4, 14:].any() and not visible[4:, 10:14].any()


@pytest.mark.parametrize("block", BLOCKS)
def test_no_row_is_empty(block: int) -> None:
    """Even with padding only and anchor 0 every row sees its own block, so softmax is defined."""
    visible = alignment.visibility(torch.tensor([[0]]), torch.full((1, 6), -1), block)
    assert visible[0].sum(1).tolist() == [block] * block


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_row_labels(block: int, shift_label: bool) -> None:
    """Labels and supervision equal a loop over rows, also past the end of the text."""
    ids, mask = batch([12, 6])
    anchors = torch.tensor([[0, 3, 11], [5, 4, 1]])
    labels, supervised = alignment.row_labels(ids, mask, anchors, block, shift_label)
    assert labels.shape == supervised.shape == (2, 3, block)
    for sample in range(2):
        for place in range(3):
            for row in range(block):
                offset = naive_offset(row, shift_label)
                index = int(anchors[sample, place]) + offset
                inside = offset >= 1 and index < ids.shape[1]
                expected = inside and bool(mask[sample, index])
                assert bool(supervised[sample, place, row]) == expected
                if expected:
                    assert labels[sample, place, row] == ids[sample, index]
    assert bool(torch.isin(labels, ids).all()), "an unsupervised label is still a valid token id"


def test_supervised_rows_by_mode() -> None:
    """With all tokens supervised, shift_label trains offsets 1 … K and the other mode 1 … K-1."""
    ids = torch.arange(20)[None]
    mask = torch.ones(1, 20)
    for shift_label, first in ((True, 0), (False, 1)):
        _, supervised = alignment.row_labels(ids, mask, torch.tensor([[4]]), 6, shift_label)
        assert supervised[0, 0].tolist() == [row >= first for row in range(6)]


@pytest.mark.parametrize("block", BLOCKS)
def test_gru_inputs(block: int) -> None:
    """The GRU consumes t_a … t_{a+K-1}; past the end it repeats the last token."""
    ids, _ = batch([10, 10])
    anchors = torch.tensor([[0, 4], [8, 9]])
    inputs = alignment.gru_inputs(ids, anchors, block)
    for sample in range(2):
        for place in range(2):
            start = int(anchors[sample, place])
            expected = [int(ids[sample, min(start + k, 9)]) for k in range(block)]
            assert inputs[sample, place].tolist() == expected


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", BLOCKS)
def test_row_states(block: int, shift_label: bool) -> None:
    """The state of a row at offset m has consumed exactly t_a … t_{a+m-1}; offset 0 gets zeros."""
    states = torch.randn(2, 3, block, 5)
    chosen = alignment.row_states(states, shift_label)
    for row in range(block):
        offset = naive_offset(row, shift_label)
        expected = states[:, :, offset - 1] if offset else torch.zeros(2, 3, 5)
        assert torch.equal(chosen[:, :, row], expected)


@pytest.mark.parametrize("block", BLOCKS)
def test_both_modes_obey_one_rule(block: int) -> None:
    """At every offset both label modes share label, state, correction and weight."""
    ids, mask = batch([30])
    anchors = torch.tensor([[3, 9]])
    states = torch.arange(2.0 * block).view(1, 2, block, 1)
    seen: dict[bool, list[tuple[object, ...]]] = {}
    for shift_label in MODES:
        labels, supervised = alignment.row_labels(ids, mask, anchors, block, shift_label)
        corrected = alignment.corrected_rows(block, shift_label, 1)
        weights = alignment.decay_weights(block, shift_label, 4.0)
        used = alignment.row_states(states, shift_label)
        rows = alignment.proposal_rows(block, shift_label)
        seen[shift_label] = [
            (
                labels[0, place, rows].tolist(),
                supervised[0, place, rows].tolist(),
                corrected[rows].tolist(),
                weights[rows].tolist(),
                used[0, place, rows, 0].tolist(),
            )
            for place in range(2)
        ]
    assert seen[True] == seen[False]
