"""Training on a tiny target: one step against a plain twin, convergence, checkpoints, schedules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from domino_kit.acceptance import Acceptance
from domino_kit.checkpoint import load_draft
from domino_kit.decoding import generate
from domino_kit.manifest import read_manifest
from domino_kit.replay import KnownAnswer, replay
from domino_kit.target import Target
from domino_kit.train.dataset import (
    RowStream,
    anchor_generators,
    collate,
    epoch_order,
)
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.initialise import copy_target_layers
from domino_kit.train.loop import learning_rate, train, train_step, update
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.setup import build_run
from domino_kit.train.step import draw_blocks, wanted_hidden
from domino_kit.train.validate import known_answers
from tests.tiny_chat import chat_rows, save_target, write_jsonl


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), family="llama")


def recipe(target: Path, folder: Path, *changes: str, rows: int = 10) -> Recipe:
    data = folder / f"rows-{rows}.jsonl"
    if not data.exists():
        write_jsonl(data, chat_rows(rows))
    return read_recipe(
        None,
        [
            f"target.name={target}", f"data.train={data}", f"output.folder={folder / 'run'}",
            "draft.num_layers=2", "draft.target_layer_ids=[0,2]", "draft.block_size=4",
            "draft.mask_token_id=1", "draft.gru_hidden_dim=16", "draft.emb_dim=12",
            "train.steps=4", "train.num_anchors=5", "train.lr=1e-2", *changes,
        ],
    )  # fmt: skip


def plain_step_loss(run: Any, samples: list[Any], lam: float) -> tuple[torch.Tensor, float]:
    """The loss of spec 3.4 with naive indexing, one block at a time, from the public modules."""
    model, target, config = run.model, run.target, run.model.config
    total, weight_sum = torch.zeros(()), 0.0
    for sample in samples:
        ids = torch.tensor([sample.input_ids])
        features = target.encode(ids, torch.ones_like(ids)).features
        batch = collate([sample], "cpu")
        blocks = draw_blocks(
            batch, model, run.recipe.train.num_anchors, run.recipe.gamma,
            anchor_generators([sample], run.recipe.train.seed, 0),
        )  # fmt: skip
        for anchor in blocks.anchors[0].tolist():
            size = config.block_size
            block = torch.tensor([[sample.input_ids[anchor]] + [1] * (size - 1)])
            context = model.context_kv(features[:, :anchor], torch.arange(anchor)[None])
            positions = torch.arange(anchor, anchor + size)[None]
            visible = torch.ones(1, size, anchor + size, dtype=torch.bool)
            hidden = model.block_hidden(target.embed(block), positions, context, visible)[0]
            state = torch.zeros(1, config.gru_hidden_dim)
            for offset in range(1, size + (1 if config.shift_label else 0)):
                place = anchor + offset
                if place >= len(sample.input_ids):
                    break
                previous = torch.tensor([sample.input_ids[place - 1]])
                state = model.head_step(target.embed(previous), state)
                if not sample.loss_mask[place]:
                    continue
                row = hidden[offset - 1 if config.shift_label else offset]
                base = target.logits(row)
                final = base
                if offset > 1:
                    final = base + model.correction(row[None], state)[0]
                label = torch.tensor(sample.input_ids[place])
                weight = float(torch.exp(torch.tensor(-(offset - 1) / run.recipe.gamma)))
                loss = (1 - lam) * F.cross_entropy(final, label) + lam * F.cross_entropy(
                    base, label
                )
                total = total + weight * loss
                weight_sum += weight
    return total, weight_sum


@pytest.mark.parametrize("shift", ["true", "false"])
def test_a_step_equals_the_naive_definition(
    target_folder: Path, tmp_path: Path, shift: str
) -> None:
    changes = [f"draft.shift_label={shift}", "train.batch_size=3", "train.lambda_base_start=0.4"]
    run = build_run(recipe(target_folder, tmp_path, *changes))
    torch.nn.init.normal_(run.model.vocab_projection)
    expected, weight = plain_step_loss(
        run, [run.samples[i] for i in epoch_order(10, 42, 0)[:3]], 0.4
    )
    names = [
        "fc.weight",
        "prefix_gru.weight_hh_l0",
        "embed_proj.2.weight",
        "layers.0.mlp.up_proj.weight",
    ]
    parameters = [dict(run.model.named_parameters())[name] for name in names]
    wanted = torch.autograd.grad(expected, parameters)
    rows = RowStream(run.samples, 42).rows(0, 3)
    sums = train_step(run, FeatureSource(encode_row(run.target), 0), rows, 0)
    assert sums.weight == pytest.approx(weight, rel=1e-5)
    assert sums.loss == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (3, 2), (2, 3), (1, 6)])
def test_accumulation_does_not_change_the_update(
    target_folder: Path, tmp_path: Path, batch: int, accumulation: int
) -> None:
    def weights_after_one_step(batch: int, accumulation: int) -> torch.Tensor:
        changes = [f"train.batch_size={batch}", f"train.accumulation={accumulation}"]
        run = build_run(recipe(target_folder, tmp_path, *changes, rows=6))
        sgd = torch.optim.SGD(run.model.parameters(), lr=1.0)
        rows = RowStream(run.samples, 42).rows(0, batch * accumulation)
        sums = train_step(run, FeatureSource(encode_row(run.target), 100), rows, 0)
        update(run, sgd, sums, 0)
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    torch.testing.assert_close(
        weights_after_one_step(batch, accumulation), weights_after_one_step(6, 1),
        rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def test_cached_features_train_like_fresh_ones(target_folder: Path, tmp_path: Path) -> None:
    def losses(cache_mb: int) -> list[float]:
        run = build_run(recipe(target_folder, tmp_path, f"train.feature_cache_mb={cache_mb}"))
        source = FeatureSource(encode_row(run.target), cache_mb)
        rows = [RowStream(run.samples, 42).rows(2 * step, 2 * step + 2) for step in range(12)]
        return [train_step(run, source, rows[step], step).loss for step in range(12)]

    assert losses(0) == losses(100)


def test_two_runs_of_one_recipe_are_equal_bit_for_bit(target_folder: Path, tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        run = build_run(recipe(target_folder, tmp_path, f"output.folder={tmp_path / name}"))
        train(run, [], quiet=True)
        weights.append(run.model.state_dict())
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key


def test_wanted_hidden_predicts_the_label(target_folder: Path, tmp_path: Path) -> None:
    """Its logits are the target's own for the row's label: the pass shifted by one."""
    for shift in ("true", "false"):
        run = build_run(recipe(target_folder, tmp_path, f"draft.shift_label={shift}"))
        batch = collate(run.samples[:2], "cpu")
        blocks = draw_blocks(batch, run.model, 5, 4.0, anchor_generators(run.samples[:2], 0, 0))
        found = FeatureSource(encode_row(run.target), 0)(batch)
        rows = wanted_hidden(batch, run.model, found, blocks).view(2, -1, 4, found.hidden.shape[-1])
        for sample in range(2):
            for number, anchor in enumerate(blocks.anchors[sample].tolist()):
                for row in range(4):
                    if blocks.weights[sample, number, row] > 0:
                        label = anchor + row + (1 if shift == "true" else 0)
                        expected = found.hidden[sample, label - 1]
                        assert torch.equal(rows[sample, number, row], expected)


@pytest.mark.parametrize("projector", ["domino", "none"])
def test_an_overfitted_draft_reaches_the_ceiling(
    target_folder: Path, tmp_path: Path, projector: str
) -> None:
    """On the target's own answers, replay and decode reach the block's maximum on every step."""
    hf_run = build_run(recipe(target_folder, tmp_path, f"draft.projector={projector}"))
    target = hf_run.target
    prompts = [[2, 70 + i, 80 + 3 * i, 90] for i in range(3)]
    answers = generate(target, None, prompts, 25, [])
    rows = [
        {"id": i, "input_ids": p + a.tokens, "loss_mask": [0] * len(p) + [1] * len(a.tokens)}
        for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    data = write_jsonl(tmp_path / "own.jsonl", rows)
    run = build_run(
        recipe(
            target_folder, tmp_path, f"draft.projector={projector}", f"data.train={data}",
            "train.steps=150", "train.num_anchors=64", "train.batch_size=3", "train.lr=5e-3",
            "draft.init=target" if projector == "none" else "draft.init=random",
        )
    )  # fmt: skip
    train(run, [], quiet=True)
    model, _ = load_draft(tmp_path / "run", torch.float32, "cpu")
    texts = [KnownAnswer(p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    replayed = replay(target, model, texts)
    decoded = generate(target, model, prompts, 25, [])
    assert [answer.accepted_runs for answer in decoded] == replayed
    full_steps = [run for runs in replayed for run in runs[:-1]]
    assert Acceptance.of(full_steps, 3).accept_length == 4.0


def test_checkpoint_and_manifest_of_a_run(target_folder: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "held.jsonl", chat_rows(3))
    run = build_run(
        recipe(target_folder, tmp_path, "output.save_every=2", f"data.validation={rows}",
               "output.log_every=1")
    )  # fmt: skip
    assert train(run, ["domino", "train"], quiet=True) == 4
    folder = tmp_path / "run"
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-2", "step-4"]
    model, manifest = load_draft(folder, torch.float32, "cpu")
    assert manifest is not None
    for key, value in run.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])
    assert manifest.training["lambda_horizon"] == 4
    assert manifest.training["steps_done"] == 4
    assert read_manifest(folder / "step-2").training["steps_done"] == 2  # type: ignore[union-attr]
    assert manifest.mask_token_id == 1
    assert manifest.measured["replay_accept_length"] >= 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = [line["phase"] for line in lines]
    assert phases == ["train"] * 4 + ["validation"]
    assert lines[0]["lambda_base"] == 1.0
    assert list((folder / "tensorboard").iterdir())


def test_regression_phase_comes_first_and_leaves_the_head_alone(
    target_folder: Path, tmp_path: Path
) -> None:
    run = build_run(recipe(target_folder, tmp_path, "train.regress_steps=3"))
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    source, stream = FeatureSource(encode_row(run.target), 100), RowStream(run.samples, 42)
    optimizer = torch.optim.AdamW(run.model.parameters())
    losses = []
    for step in range(3):
        sums = train_step(run, source, stream.rows(2 * step, 2 * step + 2), step)
        losses.append(sums.loss / sums.weight)
        update(run, optimizer, sums, step)
    after = run.model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert not any(key.startswith(("prefix_gru", "embed_proj")) for key in changed)
    assert "fc.weight" in changed
    assert losses[-1] < losses[0]


def test_learning_rate_warms_up_and_falls_to_its_floor(target_folder: Path, tmp_path: Path) -> None:
    run = build_run(
        recipe(target_folder, tmp_path, "train.steps=100", "train.warmup_ratio=0.1",
               "train.min_lr_ratio=0.1", "train.lr=1.0")
    )  # fmt: skip
    rates = [learning_rate(step, run) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55, abs=0.02)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_start_from_the_target_reproduces_its_last_layers(tmp_path: Path, family: str) -> None:
    folder = save_target(tmp_path / "t", family=family, intermediate_size=48)
    run = build_run(recipe(folder, tmp_path, "draft.init=target"))
    target: Target = run.target
    last = target.layers[-1]
    mine = run.model.layers[-1]
    assert torch.equal(mine.mlp.up_proj.weight, last.mlp.up_proj.weight)  # type: ignore[union-attr]
    assert torch.equal(run.model.norm.weight, target.decoder.norm.weight)
    features = torch.randn(1, 3, 64)
    assert torch.equal(run.model.fc(features), features[..., 32:])
    copy_target_layers(run.model, target)  # idempotent


def test_warm_start_from_dflash_begins_with_no_correction(
    target_folder: Path, tmp_path: Path
) -> None:
    first = build_run(recipe(target_folder, tmp_path, "draft.projector=none"))
    train(first, [], quiet=True)
    second = build_run(
        recipe(
            target_folder, tmp_path, "draft.shift_label=false",
            f"draft.init_from={tmp_path / 'run'}", f"output.folder={tmp_path / 'next'}",
        )
    )  # fmt: skip
    for key, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[key])
    assert (second.model.vocab_projection == 0).all()
    with pytest.raises(ValueError, match="shift_label"):
        build_run(recipe(target_folder, tmp_path, f"draft.init_from={tmp_path / 'run'}"))


def test_anchors_of_a_sample_depend_on_seed_epoch_and_sample_only(
    target_folder: Path, tmp_path: Path
) -> None:
    run = build_run(recipe(target_folder, tmp_path))
    alone = collate([run.samples[3]], "cpu")
    together = collate(run.samples[2:5], "cpu")
    one = draw_blocks(alone, run.model, 5, 4.0, anchor_generators(alone.samples, 7, 1))
    many = draw_blocks(together, run.model, 5, 4.0, anchor_generators(together.samples, 7, 1))
    assert torch.equal(one.anchors[0], many.anchors[1])


def test_known_answers_are_the_supervised_spans(target_folder: Path, tmp_path: Path) -> None:
    run = build_run(recipe(target_folder, tmp_path))
    sample = run.samples[0]
    (text,) = known_answers(sample)
    assert text.prompt + text.answer == sample.input_ids[: len(text.prompt + text.answer)]
    assert sum(sample.loss_mask) == len(text.answer)


def test_bfloat16_compute_keeps_float32_master_weights(tmp_path: Path, target_folder: Path) -> None:
    """A bfloat16 target trains float32 weights, close to the float32 loss, and norms still move."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        run = build_run(recipe(target_folder, tmp_path, f"target.dtype={dtype}", "train.lr=1e-4"))
        before = run.model.norm.weight.clone()
        source = FeatureSource(encode_row(run.target), 0)
        optimizer = torch.optim.AdamW(run.model.parameters())
        sums = train_step(run, source, RowStream(run.samples, 42).rows(0, 2), 0)
        losses[dtype] = sums.loss / sums.weight
        update(run, optimizer, sums, 0)
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        assert not torch.equal(before, run.model.norm.weight)
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_a_bfloat16_run_validates_too(tmp_path: Path, target_folder: Path) -> None:
    """Validation computes as training does: bfloat16 over float32 weights."""
    rows = write_jsonl(tmp_path / "held.jsonl", chat_rows(3))
    measured = {}
    for dtype in ("float32", "bfloat16"):
        run = build_run(
            recipe(target_folder, tmp_path, f"target.dtype={dtype}", f"data.validation={rows}",
                   f"output.folder={tmp_path / dtype}", "output.save_dtype=float32")
        )  # fmt: skip
        assert train(run, [], quiet=True) == 4
        manifest = read_manifest(tmp_path / dtype)
        assert manifest is not None
        measured[dtype] = manifest.measured
    assert measured["bfloat16"].keys() == measured["float32"].keys()
    losses = [measured[dtype]["teacher_forced_final_loss"] for dtype in measured]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
