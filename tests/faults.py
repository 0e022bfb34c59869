"""Faults for `domino check`: each spoils a good target or draft on disk, or the code that trains."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from domino_kit import alignment, modeling
from domino_kit.modeling import DominoDraft
from domino_kit.parity import ParityError
from domino_kit.target import Target
from domino_kit.train.features import FeatureSource, encode_row
from domino_kit.train.gate import check_checkpoint
from domino_kit.train.recipe import read_recipe
from domino_kit.train.report import write_checkpoint
from domino_kit.train.setup import build_run
from tests.serving import Pair
from tests.tiny_chat import PLAIN, chat_rows, write_jsonl

MASK, PAD, END = 1, 0, 3


@dataclass(frozen=True)
class FileFault:
    """A change of files, and the fact that must be named; ``words`` must be in the explanation."""

    name: str
    spoil: Callable[[Pair, Path], tuple[str, ...] | None]
    fact: str
    words: str


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change a model's tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Pair, Path], None]:
    return lambda pair, _: edit_json(pair.draft / "config.json", change)


def _nested(**values: Any) -> Callable[[Pair, Path], None]:
    return _config(lambda config: config["dflash_config"].update(values))


def _weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Pair, Path], None]:
    return lambda pair, _: edit_tensors(pair.draft, change)


def _mask(token: int) -> Callable[[Pair, Path], None]:
    """A draft that was trained with another mask: config and manifest agree."""

    def spoil(pair: Pair, _: Path) -> None:
        edit_json(
            pair.draft / "config.json", lambda c: c["dflash_config"].update(mask_token_id=token)
        )
        edit_json(
            pair.draft / "domino_manifest.json",
            lambda m: (m.update(mask_token_id=token), m["draft"].update(mask_token_id=token)),
        )

    return spoil


def _theta(config: dict[str, Any], theta: float) -> None:
    config["rope_theta"] = theta
    config["rope_parameters"]["rope_theta"] = theta


def _permute(tensors: dict[str, Tensor]) -> None:
    weight = tensors["embed_proj.2.weight"]
    tensors["embed_proj.2.weight"] = weight[torch.arange(len(weight)).roll(1)]


def _other_run(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    for name in ("embed_proj.0.weight", "embed_proj.2.weight"):
        tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.1


def _transpose(tensors: dict[str, Tensor]) -> None:
    name = "layers.0.self_attn.q_proj.weight"
    assert tensors[name].shape[0] == tensors[name].shape[1]
    tensors[name] = tensors[name].T.contiguous()


def _fine_tune(pair: Pair, _: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.02

    edit_tensors(pair.target, change)


def _untie(pair: Pair, _: Path) -> None:
    edit_json(pair.target / "config.json", lambda c: c.update(tie_word_embeddings=False))


def _template(pair: Pair, _: Path) -> None:
    (pair.target / "chat_template.jinja").write_text(PLAIN)


def _tokenizer(pair: Pair, _: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit_json(pair.target / "tokenizer.json", swap)


def _system(pair: Pair, folder: Path) -> tuple[str, ...]:
    row = {
        "messages": [
            {"role": "system", "content": "Answer in verse."},
            {"role": "user", "content": "Where is north?"},
        ]
    }
    return ("--prompts", str(write_jsonl(folder / "prompts.jsonl", [row])))


def _window(pair: Pair, _: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(
            layer_types=["sliding_attention"] * config["num_hidden_layers"], sliding_window=8
        )

    edit_json(pair.draft / "config.json", change)


def _long_target(pair: Pair, _: Path) -> None:
    edit_json(pair.draft / "config.json", lambda c: c.update(max_position_embeddings=256))
    edit_json(
        pair.draft / "domino_manifest.json",
        lambda m: m["draft"].update(max_position_embeddings=256),
    )


def _headless(config: dict[str, Any]) -> None:
    del config["dflash_config"]["projector_type"]


FILE_FAULTS = [
    FileFault("mask id changed", _nested(mask_token_id=9), "mask_token_id", "trained with 1"),
    FileFault("mask id is the padding token", _mask(PAD), "mask_special", "the padding token"),
    FileFault("mask id is the end token", _mask(END), "mask_special", "an end token"),
    FileFault("RoPE θ changed", _config(lambda c: _theta(c, 1e6)), "rope_theta", "10000.0"),
    FileFault("only rope_parameters written", _config(lambda c: c.pop("rope_theta")),
              "rope_spelling", "only inside rope_parameters"),
    FileFault("partial_rotary_factor leaked",
              _config(lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25)),
              "config", "partial_rotary_factor"),
    FileFault("layer ids off by one", _nested(target_layer_ids=[1, 3]), "target_layer_ids",
              "all off by one (by +1)"),
    FileFault("layer order swapped", _nested(target_layer_ids=[2, 0]), "target_layer_ids",
              "the same layers in another order"),
    FileFault("shift_label flipped", _nested(shift_label=False), "shift_label",
              "prediction of its neighbour"),
    FileFault("block size changed", _config(lambda c: c.update(block_size=3)), "block_size",
              "trained with 4"),
    FileFault("projector_type missing", _config(_headless), "config", "projector_type"),
    FileFault("projector rows permuted", _weights(_permute), "weights", "in another order"),
    FileFault("projector weights from another run", _weights(_other_run), "weights",
              "embed_proj.0.weight"),
    FileFault("one tensor missing", _weights(lambda t: t.pop("hidden_norm.weight")), "tensors",
              "lacks tensor 'hidden_norm.weight'"),
    FileFault("one tensor transposed with an equal shape", _weights(_transpose), "weights",
              "transposed"),
    FileFault("target fine-tuned after training", _fine_tune, "target_weights", "model.layers.1"),
    FileFault("tied head taken for random", _untie, "head", "would be random"),
    FileFault("another tokenizer", _tokenizer, "tokenizer", "tokenizer vocabulary"),
    FileFault("different chat template", _template, "chat_template", "chat template"),
    FileFault("different system prompt", _system, "system_prompt", "Answer in verse."),
    FileFault("thinking mode flipped", lambda pair, _: ("--no-thinking",), "thinking",
              "off here"),
    FileFault("draft context length exceeded", _long_target, "context_length", "ends at 256"),
    FileFault("sliding-window layers in the config", _window, "config", "layer_types"),
]  # fmt: skip


# -- faults while training -----------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def _rounded_rope(patch: Patch) -> None:
    right = modeling.rope_tables

    def tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        rounded = (1.0 / theta**exponent).bfloat16().float()
        angles = positions.float()[:, None, :, None] * rounded
        angles = torch.cat([angles, angles], dim=-1)
        assert angles.shape == right(positions, head_dim, theta)[0].shape
        return angles.cos(), angles.sin()

    patch.setattr(modeling, "rope_tables", tables)


def _late_positions(patch: Patch) -> None:
    right = DominoDraft.forward

    def forward(self: Any, features: Any, context: Any, anchors: Any, *rest: Any) -> Tensor:
        positions = alignment.block_positions
        with patch.context() as inner:
            inner.setattr(alignment, "block_positions", lambda a, k: positions(a + 1, k))
            return right(self, features, context, anchors, *rest)

    patch.setattr(DominoDraft, "forward", forward)


def _own_anchor(patch: Patch) -> None:
    def visible(anchors: Tensor, positions: Tensor) -> Tensor:
        positions = positions[:, None, :]
        return (positions >= 0) & (positions <= anchors[:, :, None])

    patch.setattr(alignment, "context_visibility", visible)


def _windowed(patch: Patch) -> None:
    right = alignment.context_visibility

    def visible(anchors: Tensor, positions: Tensor) -> Tensor:
        near = positions[:, None, :] >= anchors[:, :, None] - 8
        return right(anchors, positions) & near

    patch.setattr(alignment, "context_visibility", visible)


def _causal(patch: Patch) -> None:
    def mask(visible: Tensor, block_size: int) -> Tensor:
        batch, blocks, _ = visible.shape
        own = [torch.ones(block_size, block_size, dtype=torch.bool).tril()] * blocks
        own_block = torch.block_diag(*own).bool().expand(batch, -1, -1)
        return torch.cat([visible.repeat_interleave(block_size, dim=1), own_block], dim=-1)

    patch.setattr(modeling, "block_mask", mask)


def _pre_norm_head(patch: Patch) -> None:
    backbone, head = DominoDraft.block_hidden, DominoDraft.head_hidden
    kept: dict[str, Tensor] = {}

    def block_hidden(self: Any, *inputs: Any) -> Tensor:
        handle = self.norm.register_forward_pre_hook(lambda _, x: kept.update(raw=x[0]))
        with_norm = backbone(self, *inputs)
        handle.remove()
        return with_norm

    def head_hidden(self: Any, hidden: Tensor, states: Tensor) -> Tensor:
        in_training = hidden.dim() == 4
        return head(self, kept["raw"].view_as(hidden) if in_training else hidden, states)

    patch.setattr(DominoDraft, "block_hidden", block_hidden)
    patch.setattr(DominoDraft, "head_hidden", head_hidden)


def _late_gru(patch: Patch) -> None:
    right = alignment.row_states

    def row_states(states: Tensor, shift_label: bool) -> Tensor:
        late = torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)
        return right(late, shift_label)

    patch.setattr(alignment, "row_states", row_states)


def _reset_gru(patch: Patch) -> None:
    def head_states(self: Any, embeds: Tensor) -> Tensor:
        states, _ = self.prefix_gru(embeds.reshape(-1, 1, embeds.shape[-1]))
        return states.view(*embeds.shape[:-1], -1)

    patch.setattr(DominoDraft, "head_states", head_states)


def _swapped_head(patch: Patch) -> None:
    def head_hidden(self: Any, hidden: Tensor, states: Tensor) -> Tensor:
        return self.embed_proj[1](self.embed_proj[0](torch.cat([states, hidden], dim=-1)))

    patch.setattr(DominoDraft, "head_hidden", head_hidden)


def _block_embeds(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    right = Target.embed

    def embed(self: Any, token_ids: Tensor) -> Tensor:
        rows = right(self, token_ids)
        is_block = token_ids.dim() > 1 and bool((token_ids[..., -1] == MASK).all())
        return change(rows) if is_block else rows

    patch.setattr(Target, "embed", embed)


def _post_norm(patch: Patch) -> None:
    right = Target._run

    def run(self: Any, **inputs: Any) -> Any:
        found = right(self, **inputs)
        size = self.hidden_size
        last = self.decoder.norm(found.features[..., -size:])
        return type(found)(found.hidden, torch.cat([found.features[..., :-size], last], -1))

    patch.setattr(Target, "_run", run)


@dataclass(frozen=True)
class TrainingFault:
    """Wrong code while a checkpoint is made, and what must be named afterwards.

    ``gated`` says that training itself must notice, since graph and decode then differ. ``changes``
    are recipe overrides.
    """

    name: str
    plant: Callable[[Patch], None]
    stage: str
    cause: str
    gated: bool = False
    changes: tuple[str, ...] = ()


TRAINING_FAULTS = [
    TrainingFault("RoPE table rounded to bfloat16 in training", _rounded_rope, "context_keys",
                  "rope_bf16"),
    TrainingFault("anchor positions off by one", _late_positions, "block_positions",
                  "anchor_positions", gated=True),
    TrainingFault("context that sees its own anchor", _own_anchor, "hidden", "own_anchor",
                  gated=True),
    TrainingFault("sliding window trained, served as full", _windowed, "hidden", "sliding_window"),
    TrainingFault("block made causal", _causal, "hidden", "causal_block", gated=True),
    TrainingFault("head computed on the pre-norm hidden", _pre_norm_head, "corrected_logits",
                  "pre_norm_hidden", gated=True),
    TrainingFault("GRU fed one token late", _late_gru, "gru_states", "gru_late", gated=True),
    TrainingFault("GRU reset at every token", _reset_gru, "gru_states", "gru_reset", gated=True),
    TrainingFault("h and s concatenated in the other order", _swapped_head, "corrected_logits",
                  "concat_order", gated=True),
    TrainingFault("noise embeddings scaled", lambda p: _block_embeds(p, lambda x: x * 3.0),
                  "block_embeds", "embeds_scaled"),
    TrainingFault("embedding rounded to bfloat16 on the way in",
                  lambda p: _block_embeds(p, lambda x: x.bfloat16().float()), "block_embeds",
                  "embeds_rounded"),
    TrainingFault("last layer post-norm against pre-norm", _post_norm, "features", "post_norm",
                  changes=("draft.target_layer_ids=[0,3]", "draft.allow_last_layer=true")),
]  # fmt: skip


def pair_recipe(pair: Pair, folder: Path, *changes: str) -> Any:
    """A recipe for a pair's target that goes on from its draft where ``changes`` allow that."""
    data = write_jsonl(folder / "rows.jsonl", chat_rows(4))
    start = () if changes else (f"draft.init_from={pair.draft}",)
    return read_recipe(
        None,
        [
            f"target.name={pair.target}", f"data.train={data}", f"output.folder={folder / 'run'}",
            "draft.num_layers=2", "draft.block_size=4", "draft.shift_label=true",
            "draft.mask_token_id=1", "draft.gru_hidden_dim=24", "draft.emb_dim=16",
            "train.steps=1", *(changes or ("draft.target_layer_ids=[0,2]",)), *start,
        ],
    )  # fmt: skip


def faulty_checkpoint(pair: Pair, folder: Path, fault: TrainingFault) -> Path:
    """A checkpoint whose training code had the fault; training must notice if it is ``gated``."""
    run = build_run(pair_recipe(pair, folder, *fault.changes))
    if fault.changes:  # nothing to go on from: a head that adds something
        torch.nn.init.normal_(run.model.embed_proj[2].weight, std=0.5)
    source = FeatureSource(encode_row(run.target), 0)
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        written = write_checkpoint(run, 0, ["test"], {}, 0.0)
        if fault.gated:
            with pytest.raises(ParityError, match=f"differs at {fault.stage}: "):
                check_checkpoint(run, written, source)
        else:
            check_checkpoint(run, written, source)
    return written


# -- faults of a running server ------------------------------------------------------------------


@dataclass(frozen=True)
class ServedFault:
    """A fault of tests/fault_site/planted.py, and what must be named."""

    name: str
    planted: str
    stage: str
    cause: str


SERVED_FAULTS = [
    ServedFault("RoPE table rounded to bfloat16 in serving", "served_rope_rounded", "context_keys",
                "rope_bf16"),
    ServedFault("served layers off by one", "served_layers", "features", "layer_ids"),
    ServedFault("served layers in another order", "served_layer_order", "features", "layer_order"),
    ServedFault("served block one position late", "served_positions", "block_positions",
                "anchor_positions"),
    ServedFault("served noise embeddings scaled", "served_embeds_scaled", "block_embeds",
                "embeds_scaled"),
    ServedFault("served embeddings rounded to bfloat16", "served_embeds_rounded", "block_embeds",
                "embeds_rounded"),
    ServedFault("served block causal", "served_causal", "hidden", "causal_block"),
    ServedFault("served rows before the final norm", "served_no_norm", "hidden", "no_final_norm"),
    ServedFault("served label mode flipped", "served_label_mode", "base_logits", "label_mode"),
    ServedFault("served GRU one token late", "served_gru_late", "gru_states", "gru_late"),
    ServedFault("served GRU reset", "served_gru_reset", "gru_states", "gru_reset"),
    ServedFault("served h and s in the other order", "served_concat_order", "corrected_logits",
                "concat_order"),
    ServedFault("head ignored in serving", "served_head_ignored", "corrected_logits",
                "head_ignored"),
    ServedFault("candidate pool 8 where 0 was measured", "served_pool", "proposals",
                "candidate_pool"),
    ServedFault("draft KV not advanced after a rejected block", "served_cache_not_advanced",
                "context_keys", "cache_not_advanced"),
    ServedFault("stale draft KV after a prefix-cache hit", "served_stale_prefix", "context_keys",
                "stale_prefix"),
    # last: the server keeps what it found in its buffers among its own findings
    ServedFault("served mask id", "served_mask", "block_ids", "mask_token_id"),
]  # fmt: skip


def copy_pair(pair: Pair, folder: Path) -> Pair:
    """A copy that may be spoilt."""
    target = shutil.copytree(pair.target, folder / "target")
    return Pair(target, shutil.copytree(pair.draft.resolve(), folder / "draft"))
