"""An estimate of what a run will need, printed before its first step."""

from dataclasses import dataclass
from pathlib import Path

import torch

from domino_kit.block_attention import group_size
from domino_kit.checkpoint import HEAD_PREFIXES
from domino_kit.modeling import DominoDraft
from domino_kit.train.objective import chunk_rows, logit_arrays
from domino_kit.train.setup import Run


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose."""

    target: int
    draft: int
    logits: int
    activations: int
    features: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.draft + self.logits + self.activations + self.features


def estimate(run: Run) -> Memory:
    """Expected peak of a training step; activations are a rule of thumb, the rest is counted.

    Draft: weights, gradient and two AdamW moments in float32. Logits: one chunk. Activations:
    what a layer keeps for the backward pass, about 16 hidden rows and 5 MLP rows a block row, and
    the scores of one group of blocks.
    """
    recipe, config = run.recipe, run.model.config
    anchors = min(recipe.train.num_anchors, max(sum(s.loss_mask) for s in run.samples))
    rows = recipe.train.batch_size * anchors * config.block_size
    length = min(recipe.data.max_length, max(len(s.input_ids) for s in run.samples))
    width = run.target.embedding.weight.element_size()
    per_row = 16 * config.hidden_size + 5 * config.intermediate_size
    group = min(anchors, group_size(run.target.device)) * config.block_size
    scores = 2 * group * config.num_attention_heads * (length + config.block_size)
    arrays = logit_arrays(recipe.train.distill != "none")
    chunk = min(rows, chunk_rows(config.vocab_size, recipe.train.chunk_mb, arrays))
    return Memory(
        target=run.target.num_bytes,
        draft=16 * sum(p.numel() for p in run.model.parameters()),
        logits=chunk * config.vocab_size * 4 * arrays,
        activations=(config.num_hidden_layers * rows * per_row + scores) * width,
        features=min(recipe.train.feature_cache_mb * 2**20, feature_bytes(run)),
    )


def feature_bytes(run: Run) -> int:
    """Bytes of the captured layers and the last hidden row of all tokens."""
    config, width = run.model.config, run.target.embedding.weight.element_size()
    tokens = sum(len(sample.input_ids) for sample in run.samples)
    return tokens * (len(config.target_layer_ids) + 1) * config.hidden_size * width


def kept_share(run: Run) -> float:
    """The share of all features that stays in memory from one epoch to the next."""
    return min(1.0, run.recipe.train.feature_cache_mb * 2**20 / feature_bytes(run))


def free_memory(device: str) -> int | None:
    """Bytes that a device has left, ``None`` where that cannot be said."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def describe_fit(run: Run, memory: Memory) -> str:
    """Whether the expected memory fits into what the device has left, with what is in place already."""
    free = free_memory(str(run.target.device))
    if free is None:
        return ""
    weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
    room = free + memory.target + weights
    word = "fits" if memory.total <= room else "does not fit"
    return f"; {run.target.device.type} has {room / 2**30:.1f} GB for it: {word}"


def describe_draft(model: DominoDraft) -> str:
    """Parameter counts of backbone and head."""
    backbone = head = 0
    for name, parameter in model.named_parameters():
        if name.startswith(HEAD_PREFIXES):
            head += parameter.numel()
        else:
            backbone += parameter.numel()
    return (
        f"draft: {backbone / 1e6:.1f} M parameters in the backbone, {head / 1e6:.1f} M in the head"
    )


def describe_run(run: Run) -> list[str]:
    """Parameter counts, data and memory, as lines for people."""
    memory = estimate(run)
    dropped = ", ".join(f"{count} {why}" for why, count in run.dropped.items()) or "none"
    parts = ", ".join(
        f"{name} {getattr(memory, name) / 2**20:.0f} MB"
        for name in ("target", "draft", "logits", "activations", "features")
    )
    return [
        describe_draft(run.model),
        f"data: {len(run.samples)} rows, {run.supervised_tokens} supervised tokens, dropped: {dropped}",
        f"steps: {run.total_steps}",
        f"expected memory: {memory.total / 2**30:.1f} GB ({parts}){describe_fit(run, memory)}",
    ]
