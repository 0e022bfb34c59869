"""Stages as known faults would compute them, from the right inputs of the stage before."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.modeling import DominoDraft, KeyValue, rotate
from domino_kit.target import Target, TargetEnds
from domino_kit.trace import Step

Variant = tuple[str, str, Tensor]
Tables = tuple[Tensor, Tensor]

KNOWN_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
PARTIAL = (0.25, 0.5, 0.75)


# -- target features -----------------------------------------------------------------------------


def identify_layers(
    target: Target, wanted: Step, found: Tensor, same: Callable[[Tensor, Tensor], bool]
) -> tuple[list[int | None], bool]:
    """Which target layer each part of ``found [a, layers*D]`` is, and whether the last was normed.

    ``-1`` stands for the embedding; ``None`` for a part that is no layer's output.
    """
    every = Target(target.model, list(range(len(target.layers))), allow_last_layer=True)
    ids = wanted.values["text"][None].to(target.device)
    outputs = every.encode(ids, torch.ones_like(ids)).features[0, :-1].float().cpu()
    layers = dict(enumerate(outputs.chunk(len(target.layers), dim=-1)))
    layers[-1] = target.embed(ids)[0, :-1].float().cpu()
    last = len(target.layers) - 1
    norm = getattr(target.decoder, "norm", None)
    normed_last = None if norm is None else norm(layers[last].to(target.device)).float().cpu()
    names: list[int | None] = []
    normed = False
    for part in found.chunk(max(1, found.shape[-1] // target.hidden_size), dim=-1):
        names.append(next((i for i, output in layers.items() if same(part, output)), None))
        if names[-1] is None and normed_last is not None and same(part, normed_last):
            names[-1], normed = last, True
    return names, normed


def features(wanted: Step) -> Iterator[Variant]:
    """Right layers, wrongly handed on."""
    right = wanted.values["features"]
    gap = torch.full_like(right[:1], torch.nan)
    yield "positions", "each position has its predecessor's feature", torch.cat([gap, right[:-1]])
    yield "positions", "each position has its successor's feature", torch.cat([right[1:], gap])


def sliding_window(target: TargetEnds) -> int | None:
    """The window of a target's sliding layers, if it has any."""
    window = getattr(target.text_config, "sliding_window", None)
    return int(window) if window else None


# -- projected context ---------------------------------------------------------------------------


def contexts(model: DominoDraft, wanted: Step) -> Iterator[Variant]:
    """The context as other code projects it."""
    right = _like(model, wanted.values["features"])
    projected = model.fc(right)
    yield "no_hidden_norm", "hidden_norm is not applied after fc", projected
    yield "fc_order", "fc reads the layers in reverse order", model.hidden_norm(
        model.fc(torch.cat(right.chunk(len(model.config.target_layer_ids), -1)[::-1], -1))
    )  # fmt: skip
    rounded = model.hidden_norm(model.fc(right.bfloat16().to(right.dtype)))
    yield "features_rounded", "the features are rounded to bfloat16", rounded


def frequencies(model: DominoDraft, theta: float, width: int | None = None) -> Tensor:
    """Rotary frequencies ``[width / 2]`` in float32."""
    width = width or model.config.head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / (theta**exponent)


def tables_of(positions: Tensor, freqs: Tensor, head_dim: int) -> Tables:
    """Cosine and sine ``[1, 1, length, head_dim]``; dimensions beyond the frequencies stand still."""
    angles = positions.float()[None, None, :, None] * freqs
    still = torch.zeros(*angles.shape[:-1], head_dim // 2 - len(freqs))
    angles = torch.cat([angles, still], -1)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rope_variants(
    model: DominoDraft, target: TargetEnds, positions: Tensor
) -> Iterator[tuple[str, str, Tables]]:
    """Rotary tables as known faults make them."""
    config = model.config
    width, own = config.head_dim, config.rope_theta
    right = frequencies(model, own)
    yield "rope_bf16", (
        "the rotary frequencies are rounded to bfloat16, so the angles drift, the more the further "
        "from the start; they must be computed in float32"
    ), tables_of(positions, right.bfloat16().float(), width)  # fmt: skip
    cos, sin = tables_of(positions, right, width)
    yield "rope_bf16", (
        "the rotary table (cosine and sine) is rounded to bfloat16; it must be float32"
    ), (cos.bfloat16().float(), sin.bfloat16().float())  # fmt: skip
    for theta in sorted({*KNOWN_THETAS, *_target_theta(target)} - {own}):
        said = f"the rotary base is {theta:g}, the draft was trained with {own:g}"
        yield "rope_theta", said, tables_of(positions, frequencies(model, theta), width)
    for part in PARTIAL:
        size = int(width * part) // 2 * 2
        if size:
            said = (
                f"only {part:g} of each head is rotated (a target's partial_rotary_factor); a "
                "draft rotates all of it"
            )
            freqs = frequencies(model, own, size)
            yield "partial_rotary", said, tables_of(positions, freqs, width)
    for shift in (1, -1):
        said = f"rotary positions are off by {shift:+d}"
        yield "positions", said, tables_of(positions + shift, right, width)


def _target_theta(target: TargetEnds) -> list[float]:
    parameters = getattr(target.text_config, "rope_parameters", None) or {}
    found = parameters.get("rope_theta", getattr(target.text_config, "rope_theta", None))
    return [float(found)] if isinstance(found, int | float) else []


def context_keys(model: DominoDraft, target: TargetEnds, wanted: Step) -> Iterator[Variant]:
    """Context keys ``[a, layers, kv_heads, head_dim]`` under other rotations, or without norm."""
    context = _like(model, wanted.values["context"])
    positions = torch.arange(len(context))
    for name, text, tables in rope_variants(model, target, positions):
        yield name, text, _keys(model, context, _on(model, tables))
    plain = tables_of(positions, torch.zeros(0), model.config.head_dim)
    yield "no_rope", "the context keys are not rotated at all", _keys(model, context, plain)
    right = tables_of(positions, frequencies(model, model.config.rope_theta), model.config.head_dim)
    unnormed = _keys(model, context, _on(model, right), norm=False)
    yield "no_k_norm", "k_norm is not applied to the context keys", unnormed


def _keys(model: DominoDraft, context: Tensor, tables: Tables, *, norm: bool = True) -> Tensor:
    found = []
    for layer in model.layers:
        attention: Any = layer.self_attn
        keys = attention.k_proj(context).view(len(context), attention.kv_heads, -1)
        keys = attention.k_norm(keys) if norm else keys
        found.append(rotate(keys.transpose(0, 1)[None], tables)[0].transpose(0, 1))
    return torch.stack(found, 1)


# -- backbone ------------------------------------------------------------------------------------


def hidden_rows(model: DominoDraft, target: TargetEnds, wanted: Step) -> Iterator[Variant]:
    """Backbone rows ``[K, D]`` under other visibility, positions, norms and depth."""
    embeds = _like(model, wanted.values["block_embeds"])[None]
    positions = wanted.values["block_positions"]
    context = _context(model, wanted)
    right = _on(model, tables_of(positions, frequencies(model, model.config.rope_theta),
                                 model.config.head_dim))  # fmt: skip
    size, length = embeds.shape[1], wanted.anchor
    block = torch.ones(size, size, dtype=torch.bool)

    def rows(
        tables: Tables = right,
        inner: Tensor = block,
        first: int = 0,
        extra: list[KeyValue] | None = None,
        norm: bool = True,
        depth: int | None = None,
    ) -> Tensor:
        seen = [
            (keys[:, :, first:], values[:, :, first:])
            if extra is None
            else (torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2))
            for (keys, values), more in zip(context, extra or context, strict=True)
        ]
        visible = torch.cat([torch.ones(size, seen[0][0].shape[2], dtype=torch.bool), inner], 1)
        return _backbone(model, embeds, tables, seen, visible[None], norm, depth)

    yield "causal_block", (
        "the block is causal: its rows see only earlier rows, in training they see all"
    ), rows(inner=block.tril())  # fmt: skip
    if isinstance(target, Target):
        yield "own_anchor", (
            "the block sees the target's feature of its own anchor, which a server does not have yet"
        ), rows(extra=_anchor_context(model, target, wanted))  # fmt: skip
    yield "no_final_norm", "the final norm is not applied to the rows", rows(norm=False)
    for name, text, tables in rope_variants(model, target, positions):
        yield name, f"in the block, {text}", rows(tables=_on(model, tables))
    yield "lone_rows", "the block's rows do not see each other", rows(inner=torch.eye(size) > 0)
    if length > 1:
        shorter = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in context]
        visible = torch.ones(1, size, length - 1 + size, dtype=torch.bool)
        yield "context_short", "the block does not see the position before its anchor", _backbone(
            model, embeds, right, shorter, visible, True, None
        )  # fmt: skip
    for exponent in range(1, max(1, length).bit_length()):
        window = 2**exponent
        if window < length:
            yield "sliding_window", (
                f"the draft sees only the last {window} positions of the context; it was trained "
                "with full attention"
            ), rows(first=length - window)  # fmt: skip
    if len(model.layers) > 1:
        yield "depth", "the last draft layer is missing", rows(depth=len(model.layers) - 1)


def _backbone(
    model: DominoDraft,
    embeds: Tensor,
    tables: Tables,
    context: list[KeyValue],
    visible: Tensor,
    norm: bool,
    depth: int | None,
) -> Tensor:
    """:meth:`DominoDraft.block_hidden` with its parts exchangeable; ``[K, D]``."""
    x = embeds
    visible = visible.to(embeds.device)
    for layer, key_value in list(zip(model.layers, context, strict=True))[:depth]:
        x = layer(x, tables, key_value, visible)
    return (model.norm(x) if norm else x)[0]


def _context(model: DominoDraft, wanted: Step) -> list[KeyValue]:
    keys, values = (
        _like(model, wanted.values[stage]) for stage in ("context_keys", "context_values")
    )
    layers = range(keys.shape[1])
    return [(keys[:, i].transpose(0, 1)[None], values[:, i].transpose(0, 1)[None]) for i in layers]


def _anchor_context(model: DominoDraft, target: Target, wanted: Step) -> list[KeyValue]:
    ids = wanted.values["text"][None].to(target.device)
    own = target.encode(ids, torch.ones_like(ids)).features[:, -1:]
    return model.context_kv(own, torch.tensor([[wanted.anchor]], device=own.device))


def unnormed_rows(model: DominoDraft, wanted: Step) -> Tensor:
    """The backbone's rows before its final norm, ``[K, D]``."""
    embeds = _like(model, wanted.values["block_embeds"])[None]
    config, size = model.config, embeds.shape[1]
    tables = tables_of(
        wanted.values["block_positions"], frequencies(model, config.rope_theta), config.head_dim
    )
    visible = torch.ones(1, size, wanted.anchor + size, dtype=torch.bool)
    context = _context(model, wanted)
    return _backbone(model, embeds, _on(model, tables), context, visible, False, None)


# -- output heads --------------------------------------------------------------------------------


def base_logits(model: DominoDraft, target: TargetEnds, wanted: Step) -> Iterator[Variant]:
    """Base logits ``[n, V]`` of other rows."""
    hidden = _like(model, wanted.values["hidden"])
    served = _served(model)
    count = served.stop - served.start
    flipped = slice(1 - served.start, 1 - served.start + count)
    yield "label_mode", (
        f"the rows are read with shift_label {not model.config.shift_label}: every row is taken for "
        "the prediction of its neighbour"
    ), target.logits(hidden[flipped])  # fmt: skip
    before = unnormed_rows(model, wanted)[served]
    yield "no_final_norm", "the logits come from rows before the final norm", target.logits(before)
    rounded = hidden[served].bfloat16().to(hidden.dtype)
    yield "rows_rounded", "the rows are rounded to bfloat16 before the head", target.logits(rounded)


def gru_states(model: DominoDraft, target: TargetEnds, wanted: Step) -> Iterator[Variant]:
    """GRU states ``[n, G]`` by offset, fed otherwise than with the anchor and all proposals before."""
    count = len(wanted.values["gru_states"])
    anchor = wanted.values["text"][-1:]
    fed = wanted.values.get("fed", wanted.values["proposals"])
    tokens = torch.cat([anchor, fed]).to(target.device)
    embeds = target.embed(tokens)
    right = model.head_states(embeds[None])[0]
    zero = torch.zeros_like(right[:1])
    yield "gru_late", (
        "the GRU is fed one token late: each state lacks the newest token"
    ), torch.cat([zero, right])[:count]  # fmt: skip
    yield "gru_early", "the GRU is fed one token early: each state has seen its own label", (
        right[1 : count + 1]
    )  # fmt: skip
    alone = torch.cat([model.head_states(each[None, None])[0] for each in embeds])
    yield "gru_reset", "the GRU starts anew at every token: each state knows the last token only", (
        alone[:count]
    )  # fmt: skip
    skipped = torch.cat([zero, model.head_states(embeds[None, 1:])[0]])
    yield "gru_no_anchor", "the GRU does not see the anchor", skipped[:count]
    rounded = model.head_states(embeds[None].bfloat16().to(embeds.dtype))[0]
    yield "embeds_rounded", "the GRU's inputs are rounded to bfloat16", rounded[:count]


def corrected_logits(model: DominoDraft, target: TargetEnds, wanted: Step) -> Iterator[Variant]:
    """Corrected logits ``[n, V]`` from the right rows and states, put together otherwise."""
    served = _served(model)
    rows = _like(model, wanted.values["hidden"])[served]
    states = _like(model, wanted.values["gru_states"])
    base = _like(model, wanted.values["base_logits"])
    count = min(len(rows), len(states), len(wanted.values["corrected_logits"]))
    rows, states, base = rows[:count], states[:count], base[:count]
    corrected = (torch.arange(count) >= model.config.pure_draft_prefix_len)[:, None].to(base.device)

    def add(correction: Tensor, where: Tensor = corrected) -> Tensor:
        return base + correction * where

    yield "head_ignored", "the Domino head adds nothing: these are the base logits", base
    inner, activation, last = model.embed_proj
    swapped = last(activation(inner(torch.cat([states, rows], -1))))
    yield "concat_order", (
        "the head reads GRU state and hidden row in the other order; trained is hidden first"
    ), add(swapped)  # fmt: skip
    before = unnormed_rows(model, wanted)[served][:count]
    yield "pre_norm_hidden", (
        "the head reads the hidden rows before the final norm; trained is after it"
    ), add(model.correction(before, states))  # fmt: skip
    zero = torch.zeros_like(states[:1])
    late = model.correction(rows, torch.cat([zero, states])[:count])
    yield "gru_late", "each correction uses the state before the newest token", add(late)
    everywhere = torch.ones_like(corrected)
    yield "prefix_corrected", "offset 1 is corrected too; trained is plain DFlash there", add(
        model.correction(rows, states), everywhere
    )  # fmt: skip
    stateless = model.correction(rows, torch.zeros_like(states))
    yield "gru_reset", "the head sees an empty GRU state", add(stateless)
    yield "no_activation", "the projector's SiLU is missing", add(
        last(inner(torch.cat([rows, states], -1)))
    )  # fmt: skip


def pool_size(base: Tensor, logits: Tensor, found: int, wanted: int) -> int | None:
    """The size of a candidate pool that hides ``wanted`` and makes ``found`` the best, or ``None``.

    ``base [n, V]`` ranks candidates as SGLang does: by their best base logit of offsets 2 … n.
    """
    order = base[1:].amax(0).argsort(descending=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    able = rank < rank[wanted]
    if not able[found] or int(logits.masked_fill(~able, -torch.inf).argmax()) != found:
        return None
    power = 2 ** math.floor(math.log2(max(1, int(rank[wanted]))))
    return power if power > int(rank[found]) else int(rank[wanted])


def _served(model: DominoDraft) -> slice:
    return alignment.proposal_rows(model.config.block_size, model.config.shift_label)


def _like(model: DominoDraft, values: Tensor) -> Tensor:
    return values.to(model.fc.weight)


def _on(model: DominoDraft, tables: Tables) -> Tables:
    device = model.fc.weight.device
    return tables[0].to(device), tables[1].to(device)
