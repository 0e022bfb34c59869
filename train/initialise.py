"""Where a draft's first weights come from: random, the target's last layers, or another draft."""

from pathlib import Path

import torch
from torch import Tensor, nn

from domino_kit.checkpoint import load_draft
from domino_kit.modeling import DominoDraft, init_weights
from domino_kit.target import Target

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


def initialise(
    model: DominoDraft, target: Target | None, seed: int, init: str, init_from: Path | None
) -> None:
    """Fill ``model``'s weights: ``init`` is ``"random"`` or ``"target"``; ``init_from`` wins.

    ``target`` may be ``None`` unless its layers are to be copied.
    Raises ``ValueError`` if the source's shapes do not fit.
    """
    init_weights(model, torch.Generator().manual_seed(seed))
    if init_from is not None:
        copy_draft(model, init_from)
    elif init == "target":
        assert target is not None, "the recipe was checked"
        copy_target_layers(model, target)


def copy_draft(model: DominoDraft, source: Path) -> None:
    """Take every weight of another draft; a DFlash source leaves the head at zero correction."""
    other, _ = load_draft(source, torch.float32, "cpu")
    loose = {"projector_type", "gru_hidden_dim", "emb_dim", "block_size"}
    mine, theirs = model.config.model_dump(), other.config.model_dump()
    if other.config.has_head == model.config.has_head:
        loose = {"block_size"}
    different = [key for key in mine if key not in loose and mine[key] != theirs[key]]
    if different:
        listed = ", ".join(f"{key} {theirs[key]!r} (here {mine[key]!r})" for key in different)
        raise ValueError(f"draft.init_from {source} does not fit: it has {listed}.")
    if other.config.has_head and not model.config.has_head:
        raise ValueError(
            f"draft.init_from {source} has a Domino head, which draft.projector=none would drop."
        )
    model.load_state_dict(other.state_dict(), strict=other.config.has_head)


@torch.no_grad()
def copy_target_layers(model: DominoDraft, target: Target) -> None:
    """Start as the target's own last layers, reading the deepest captured feature.

    ``fc`` passes that feature through, ``hidden_norm`` is the input norm of the first copied layer
    and ``norm`` the target's final norm. Where the target has no query/key norms, theirs start at
    the size that its projections give for a normed input, so attention is about as sharp.
    """
    size = model.config.hidden_size
    sources = target.layers[-len(model.layers) :]
    deepest = target.layer_ids.index(max(target.layer_ids))
    model.fc.weight.zero_()
    model.fc.weight[:, deepest * size : (deepest + 1) * size] = torch.eye(size)
    model.hidden_norm.weight.copy_(sources[0].get_submodule("input_layernorm").weight)  # type: ignore[arg-type]
    model.norm.weight.copy_(target.decoder.norm.weight)
    for layer, source in zip(model.layers, sources, strict=True):
        for name in (*LINEARS, *NORMS):
            _copy(layer.get_submodule(name), source, name)
        for name in ("q", "k"):
            _start_norm(layer, source, name)


def _copy(mine: nn.Module, source: nn.Module, name: str) -> None:
    try:
        weight: Tensor = source.get_submodule(name).weight  # type: ignore[assignment]
    except AttributeError:
        raise ValueError(
            f"draft.init=target needs target layers with {name!r}, which this target (perhaps a "
            "mixture of experts) lacks; use draft.init=random."
        ) from None
    parameter: Tensor = mine.weight  # type: ignore[assignment]
    if parameter.shape != weight.shape:
        raise ValueError(
            f"draft.init=target needs the target's sizes: {name} is {list(weight.shape)} there and "
            f"{list(parameter.shape)} in the draft. Leave the sizes out of the recipe."
        )
    parameter.copy_(weight)


def _start_norm(layer: nn.Module, source: nn.Module, name: str) -> None:
    norm: Tensor = layer.get_submodule(f"self_attn.{name}_norm").weight  # type: ignore[assignment]
    own = dict(source.named_modules()).get(f"self_attn.{name}_norm")
    if own is not None:
        norm.copy_(own.weight)
        return
    projection: Tensor = source.get_submodule(f"self_attn.{name}_proj").weight  # type: ignore[assignment]
    scale: Tensor = source.get_submodule("input_layernorm").weight  # type: ignore[assignment]
    typical = (projection * scale).float().pow(2).sum(1).mean().sqrt()
    norm.fill_(float(typical))
