"""What can be said of a target without its weights: its size, and whether the recipe is for it."""

from typing import Any

import torch

from domino_kit.target import choose_device, choose_dtype
from domino_kit.target_config import JsonConfig, read_target_config
from domino_kit.train.memory import free_memory
from domino_kit.train.recipe import Recipe
from domino_kit.train.setup import rope_theta


def empty_model(config: Any, trust_remote_code: bool = False) -> Any:
    """The causal language model of a config on the meta device: shapes without memory.

    Of a config of several parts only the text model is built, as it is loaded for training.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def describe_target(recipe: Recipe) -> str | None:
    """A target's size from its config, before anything is loaded; ``None`` if that cannot be said.

    Raises ``ValueError`` if there is no such target, or the device has no room for its weights.
    """
    wanted = recipe.target
    device = choose_device(wanted.device)
    config = read_target_config(wanted.name, wanted.trust_remote_code)
    if isinstance(config, JsonConfig):
        return None  # no model class: loading it says so better
    if getattr(config, "quantization_config", None):
        return None  # its weights are smaller than its shapes say
    try:
        model = empty_model(config, wanted.trust_remote_code)
    except ValueError:  # no causal language model: loading it says so better
        return None
    count = sum(parameter.numel() for parameter in model.parameters())
    dtype = choose_dtype(wanted.dtype, device)
    size, free = count * dtype.itemsize, free_memory(device)
    words = str(dtype).removeprefix("torch.")
    said = f"target: {count / 1e9:.2f} G parameters, {size / 2**30:.1f} GB as {words}"
    if free is None:
        return said
    room = f"{torch.device(device).type} has {free / 2**30:.1f} GB free"
    if size > free:
        raise ValueError(
            f"{said}, but {room}, so the target cannot be loaded. Use a larger device, or a smaller "
            "target.dtype."
        )
    return f"{said}; {room}"


def describe_expected(expected: dict[str, Any], text_config: Any) -> list[str]:
    """A line that names what differs from the target which the recipe was written for."""
    found = {key: getattr(text_config, key, None) for key in expected}
    if "rope_theta" in found:
        found["rope_theta"] = rope_theta(text_config)
    different = [
        f"{key} {found[key]} (recipe: {value})"
        for key, value in expected.items()
        if found[key] != value
    ]
    if not different:
        return []
    return [f"note: this is not the target that the recipe is for: {', '.join(different)}"]
