"""A trained draft with its target and rendered prompts, for the benchmarks that take one."""

import click
import torch

from domino_kit.chat_template import prompt_ids
from domino_kit.checkpoint import load_draft
from domino_kit.eval.prompt_set import read_prompts
from domino_kit.modeling import DominoDraft
from domino_kit.target import Target, load_target_model, load_tokenizer

Pair = tuple[Target, DominoDraft, list[list[int]]]


def trained_pair(folder: str, source: str, limit: int) -> Pair:
    """A trained draft, its target, and prompts, in float32 on the CPU."""
    model, manifest = load_draft(folder, torch.float32, "cpu")
    if manifest is None:
        raise click.ClickException(f"{folder} has no manifest that names its target.")
    loaded = load_target_model(manifest.target.name, torch.float32, "cpu", False)
    target = Target(loaded, list(model.config.target_layer_ids), allow_last_layer=True)
    tokenizer = load_tokenizer(manifest.target.name, False)
    prompts = read_prompts(source, limit)
    return target, model, [
        prompt_ids(tokenizer, each.messages, manifest.target.thinking) for each in prompts
    ]  # fmt: skip
