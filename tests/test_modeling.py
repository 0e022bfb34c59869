"""The draft model: names and shapes, rotary tables, layer maths, what sees what, both passes."""

import copy
import math
import random
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from domino_kit import alignment, decoding
from domino_kit.config import DraftConfig
from domino_kit.kv_cache import DraftCache
from domino_kit.modeling import DominoDraft, DraftLayer, init_weights, rope_tables, rotate
from tests.tiny import tiny_config, tiny_draft, tiny_target

MODES = [True, False]

# -- names, shapes, sizes --------------------------------------------------------------------

LAYER_SHAPES_TINY = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (40, 32),
    "mlp.up_proj.weight": (40, 32),
    "mlp.down_proj.weight": (32, 40),
}
BACKBONE_SHAPES_TINY = {
    "fc.weight": (32, 64),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    **{f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in LAYER_SHAPES_TINY.items()},
}
HEAD_SHAPES_TINY = {
    "prefix_gru.weight_ih_l0": (36, 32),
    "prefix_gru.weight_hh_l0": (36, 12),
    "embed_proj.0.weight": (10, 44),
    "embed_proj.2.weight": (32, 10),
}
LAYER_SHAPES_8B = {
    "input_layernorm.weight": (4096,),
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "post_attention_layernorm.weight": (4096,),
    "mlp.gate_proj.weight": (12288, 4096),
    "mlp.up_proj.weight": (12288, 4096),
    "mlp.down_proj.weight": (4096, 12288),
}
SHAPES_8B = {
    "fc.weight": (4096, 20480),
    "hidden_norm.weight": (4096,),
    "norm.weight": (4096,),
    "prefix_gru.weight_ih_l0": (3072, 4096),
    "prefix_gru.weight_hh_l0": (3072, 1024),
    "embed_proj.0.weight": (256, 5120),
    "embed_proj.2.weight": (151936, 256),
    **{f"layers.{i}.{name}": shape for i in range(5) for name, shape in LAYER_SHAPES_8B.items()},
}
HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")


def shapes(model: DominoDraft) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def qwen3_config(hidden: int, inner: int) -> DraftConfig:
    """The draft sizes of the published Qwen3 checkpoints."""
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        block_size=16,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        projector_type="domino",
        shift_label=True,
        gru_hidden_dim=1024,
        emb_dim=256,
    )


def test_state_dict_is_golden() -> None:
    """Exactly the published names and shapes; no embedding, no output head, no rotary table."""
    assert shapes(tiny_draft()) == {**BACKBONE_SHAPES_TINY, **HEAD_SHAPES_TINY}


def test_state_dict_without_head() -> None:
    """A DFlash draft has the backbone's tensors only."""
    assert shapes(tiny_draft(False, projector="none")) == BACKBONE_SHAPES_TINY


def test_state_dict_of_the_qwen3_8b_draft() -> None:
    """The published 8B layout, name by name."""
    with torch.device("meta"):
        assert shapes(DominoDraft(qwen3_config(4096, 12288))) == SHAPES_8B


@pytest.mark.parametrize(
    ("hidden", "inner", "backbone", "head"),
    [(4096, 12288, 1048.6, 55.9), (2560, 9728, 537.4, 50.8)],
)
def test_published_parameter_counts(hidden: int, inner: int, backbone: float, head: float) -> None:
    """Qwen3-8B: 1048.6 M + 55.9 M; Qwen3-4B: 537.4 M + 50.8 M."""
    with torch.device("meta"):
        model = DominoDraft(qwen3_config(hidden, inner))
    counts = {False: 0, True: 0}
    for name, parameter in model.named_parameters():
        counts[name.startswith(HEAD_PREFIXES)] += parameter.numel()
    assert round(counts[False] / 1e6, 1) == backbone
    assert round(counts[True] / 1e6, 1) == head


# -- initialisation --------------------------------------------------------------------------


def test_first_correction_is_exactly_zero() -> None:
    """After initialisation the head changes no logit."""
    model = tiny_draft()
    init_weights(model, torch.Generator().manual_seed(0))
    assert not model.correction(torch.randn(5, 32), torch.randn(5, 12)).any()


def test_init_distribution_and_seed() -> None:
    """Linear weights N(0, 0.02), norms 1, GRU uniform ±1/sqrt(G); the seed decides all of it."""
    model, again = DominoDraft(tiny_config()), DominoDraft(tiny_config())
    init_weights(model, torch.Generator().manual_seed(3))
    init_weights(again, torch.Generator().manual_seed(3))
    for (name, tensor), other in zip(
        model.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other)
        if tensor.dim() == 1:
            assert bool((tensor == 1).all())
        elif name.startswith("prefix_gru."):
            assert 0.9 * 12**-0.5 < float(tensor.abs().max()) <= 12**-0.5
        elif name != "embed_proj.2.weight":
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.2)


def test_zero_projector_still_learns() -> None:
    """The zero start is not a dead end: the projector's last layer gets a gradient."""
    model = tiny_draft()
    init_weights(model, torch.Generator().manual_seed(0))
    model.correction(torch.randn(5, 32), torch.randn(5, 12))[:, 3].sum().backward()
    assert bool(model.vocab_projection.grad.any())  # type: ignore[union-attr]


# -- rotary positions ------------------------------------------------------------------------

POSITIONS = torch.tensor([[0, 1, 7, 512, 4096, 39999]])


def naive_tables(head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine in float64, one angle at a time."""
    rows = []
    for position in POSITIONS[0].tolist():
        half = [position / theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
        rows.append(half + half)
    angles = torch.tensor(rows, dtype=torch.float64)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (16, 1e4), (128, 1e6), (128, 1e7)])
def test_rope_tables_against_float64(head_dim: int, theta: float) -> None:
    """The tables agree with float64 to float32 accuracy, far below the error of bf16 rounding."""
    cos, sin = rope_tables(POSITIONS, head_dim, theta)
    naive_cos, naive_sin = naive_tables(head_dim, theta)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1, 1, 6, head_dim)
    assert float((cos[0, 0] - naive_cos).abs().max()) < 5e-3
    assert float((sin[0, 0] - naive_sin).abs().max()) < 5e-3
    assert float((cos[0, 0, :4] - naive_cos[:4]).abs().max()) < 1e-4


def test_bf16_frequencies_would_be_caught() -> None:
    """The tolerance above has teeth: rounded frequencies are off by more than half a radian."""
    exponent = torch.arange(0, 16, 2) / 16
    frequencies = 1e4**-exponent
    error = (frequencies.bfloat16().float() - frequencies).abs() * 4096
    assert float(error.max()) > 0.5


def transformers_tables(head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    return Qwen3RotaryEmbedding(config)(torch.zeros(1, 1), POSITIONS)


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (128, 1e6)])
def test_rope_tables_equal_transformers(head_dim: int, theta: float) -> None:
    """The tables are those of transformers' Qwen3, up to float32 rounding of the angle."""
    cos, sin = rope_tables(POSITIONS, head_dim, theta)
    other_cos, other_sin = transformers_tables(head_dim, theta)
    torch.testing.assert_close(cos[:, 0], other_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:, 0], other_sin, atol=1e-5, rtol=0)


def bf16_round_trip(model: DominoDraft) -> DominoDraft:
    other = DominoDraft(model.config).to(torch.bfloat16)
    other.load_state_dict(model.to(torch.bfloat16).state_dict())
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to(torch.bfloat16).to(torch.bfloat16).float(),
        lambda model: model.half(),
        copy.deepcopy,
        bf16_round_trip,
    ],
    ids=["bfloat16", "bfloat16-and-back", "half", "deepcopy", "state-dict"],
)
def test_rope_survives(change: Any) -> None:
    """Nothing that is done to a model changes its tables."""
    fresh = rope_tables(POSITIONS, 8, 10000.0)
    changed = change(tiny_draft())._tables(POSITIONS)
    assert all(torch.equal(*pair) for pair in zip(changed, fresh, strict=True))


def test_rope_survives_autocast() -> None:
    """Autocast does not lower the tables."""
    fresh = rope_tables(POSITIONS, 8, 10000.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = tiny_draft()._tables(POSITIONS)
    assert all(torch.equal(*pair) for pair in zip(inside, fresh, strict=True))


def test_rope_survives_default_dtype() -> None:
    """A lowered default dtype, as loaders set it, does not lower the tables."""
    fresh = rope_tables(POSITIONS, 8, 10000.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        inside = rope_tables(POSITIONS, 8, 10000.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for pair in zip(inside, fresh, strict=True))


def test_no_buffers() -> None:
    """The model stores no buffer at all, so there is no table to round, save or repair."""
    model = tiny_draft()
    assert list(model.buffers()) == []
    assert not [name for name in model.state_dict() if "rotary" in name or "freq" in name]


def test_rotation_keeps_dtype_and_computes_in_float32() -> None:
    """bf16 vectors are rotated in float32 and rounded once."""
    x = torch.randn(1, 2, 6, 8)
    tables = rope_tables(POSITIONS, 8, 10000.0)
    low = rotate(x.bfloat16(), tables)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, rotate(x.bfloat16().float(), tables).bfloat16())


# -- layer maths -----------------------------------------------------------------------------


def test_layer_equals_transformers_qwen3() -> None:
    """Without context and with a fully visible block a layer is transformers' Qwen3 layer."""
    config = tiny_config()
    layer = tiny_draft().layers[1]
    hf_config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="sdpa",
    )
    oracle = Qwen3DecoderLayer(hf_config, 1).eval()
    oracle.load_state_dict(layer.state_dict())
    x = torch.randn(3, 6, 32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14], [7, 3, 100, 2, 0, 50]])
    visible = torch.ones(3, 6, 6, dtype=torch.bool)
    empty = torch.zeros(3, 2, 0, 8)
    ours = layer(x, rope_tables(positions, 8, config.rope_theta), (empty, empty), visible)
    theirs = oracle(
        x,
        attention_mask=visible[:, None],
        position_ids=positions,
        position_embeddings=Qwen3RotaryEmbedding(hf_config)(x, positions),
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def naive_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight


def naive_rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate the pairs (i, i + 4) of one head vector of width 8."""
    out = x.clone()
    for i in range(4):
        angle = position / 10000.0 ** (2 * i / 8)
        out[i] = x[i] * math.cos(angle) - x[i + 4] * math.sin(angle)
        out[i + 4] = x[i + 4] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_layer(
    layer: DraftLayer,
    block: torch.Tensor,
    block_positions: list[int],
    context: torch.Tensor,
    context_positions: list[int],
    visible: torch.Tensor,
) -> torch.Tensor:
    """One layer for one sample, row by row and head by head; context is not layer-normed."""
    attn = layer.self_attn
    normed = [naive_norm(row, layer.input_layernorm.weight) for row in block]
    rows = [*context, *normed]
    positions = context_positions + block_positions
    out = []
    for i, row in enumerate(normed):
        heads = []
        for head in range(4):
            query = (attn.q_proj.weight @ row)[head * 8 : head * 8 + 8]
            query = naive_rotate(naive_norm(query, attn.q_norm.weight), block_positions[i])
            scores, values = [], []
            for j, (other, position) in enumerate(zip(rows, positions, strict=True)):
                if not visible[i, j]:
                    continue
                shared = head // 2
                key = (attn.k_proj.weight @ other)[shared * 8 : shared * 8 + 8]
                key = naive_rotate(naive_norm(key, attn.k_norm.weight), position)
                scores.append(query @ key / math.sqrt(8))
                values.append((attn.v_proj.weight @ other)[shared * 8 : shared * 8 + 8])
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        x = block[i] + attn.o_proj.weight @ torch.cat(heads)
        y = naive_norm(x, layer.post_attention_layernorm.weight)
        gate = layer.mlp.gate_proj.weight @ y
        inner = gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ y)
        out.append(x + layer.mlp.down_proj.weight @ inner)
    return torch.stack(out)


def test_forward_equals_naive_backbone() -> None:
    """The whole training pass equals loops over rows, heads and keys, with one padded sample."""
    model = tiny_draft()
    features = torch.randn(2, 7, 64)
    context_positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, -1, -1, -1]])
    anchors = torch.tensor([[5, 6], [4, 2]])
    embeds = torch.randn(2, 2, 4, 32)
    with torch.no_grad():
        hidden = model(features, context_positions, anchors, embeds)
        for sample in range(2):
            raw = [model.fc.weight @ row for row in features[sample]]
            context = torch.stack([naive_norm(row, model.hidden_norm.weight) for row in raw])
            for place in range(2):
                anchor = int(anchors[sample, place])
                visible = torch.zeros(4, 11, dtype=torch.bool)
                visible[:, 7:] = True
                for j in range(7):
                    visible[:, j] = 0 <= int(context_positions[sample, j]) < anchor
                x = embeds[sample, place]
                for layer in model.layers:
                    x = naive_layer(
                        layer,
                        x,
                        [anchor + k for k in range(4)],
                        context,
                        context_positions[sample].tolist(),
                        visible,
                    )
                expected = torch.stack([naive_norm(row, model.norm.weight) for row in x])
                torch.testing.assert_close(hidden[sample, place], expected, atol=1e-5, rtol=1e-4)


# -- what sees what --------------------------------------------------------------------------


def overlapping() -> tuple[DominoDraft, dict[str, torch.Tensor]]:
    """Anchors 5 and 6 with block 4, over ten context tokens."""
    generator = torch.Generator().manual_seed(0)
    return tiny_draft(), {
        "features": torch.randn(1, 10, 64, generator=generator),
        "context_positions": torch.arange(10)[None],
        "anchors": torch.tensor([[5, 6]]),
        "block_embeds": torch.randn(1, 2, 4, 32, generator=generator),
    }


@pytest.mark.parametrize("place", range(10))
def test_context_at_or_after_the_anchor_has_no_effect(place: int) -> None:
    """A context feature changes a block if and only if its position is before the anchor."""
    model, inputs = overlapping()
    with torch.no_grad():
        before = model(**inputs)
        inputs["features"][0, place] += 1.0
        changed = (model(**inputs) - before).abs().amax(-1)[0]
    for block, anchor in enumerate((5, 6)):
        if place < anchor:
            assert bool((changed[block] > 1e-5).all())
        else:
            assert not changed[block].any()


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("row", range(4))
def test_a_row_affects_its_own_block_only(block: int, row: int) -> None:
    """Changing one row changes every row of its block, both directions, and no other block."""
    model, inputs = overlapping()
    with torch.no_grad():
        before = model(**inputs)
        inputs["block_embeds"][0, block, row] += 1.0
        changed = (model(**inputs) - before).abs().amax(-1)[0]
    assert bool((changed[block] > 1e-5).all())
    assert not changed[1 - block].any()


def test_padding_has_no_effect() -> None:
    """Features at padding do not matter, whatever the anchor."""
    model, inputs = overlapping()
    inputs["context_positions"][0, 4:] = -1
    with torch.no_grad():
        before = model(**inputs)
        inputs["features"][0, 4:] = 1e4
        assert torch.equal(model(**inputs), before)


def test_blocks_are_independent_of_company() -> None:
    """A block's rows are the same alone and among other blocks."""
    model, inputs = overlapping()
    with torch.no_grad():
        both = model(**inputs)
        for block in (0, 1):
            alone = model(
                inputs["features"],
                inputs["context_positions"],
                inputs["anchors"][:, block : block + 1],
                inputs["block_embeds"][:, block : block + 1],
            )
            torch.testing.assert_close(alone[:, 0], both[:, block], atol=1e-5, rtol=1e-5)


def test_fully_padded_sample_is_finite() -> None:
    """A sample of padding only, with a dropped block, has finite outputs and gradients."""
    model, inputs = overlapping()
    features = torch.cat([inputs["features"]] * 2).requires_grad_()
    positions = torch.stack([torch.arange(10), torch.full((10,), -1)])
    anchors = torch.tensor([[5, 6], [0, 0]])
    hidden = model(features, positions, anchors, torch.cat([inputs["block_embeds"]] * 2))
    hidden.square().sum().backward()
    assert bool(hidden.isfinite().all())
    assert features.grad is not None and bool(features.grad.isfinite().all())
    assert not features.grad[1].any()
    head = HEAD_PREFIXES
    for name, parameter in model.named_parameters():
        if not name.startswith(head):
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


# -- training pass and cached pass -----------------------------------------------------------


def chunks(length: int, rng: random.Random) -> list[tuple[int, int]]:
    """A random split of 0 … length into consecutive pieces."""
    cuts = sorted(rng.sample(range(1, length), k=min(rng.randint(0, 4), length - 1)))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def hidden_of_draft(
    model: DominoDraft,
    target: Any,
    token: int,
    anchor: int,
    cache: DraftCache,
    monkeypatch: pytest.MonkeyPatch,
) -> torch.Tensor:
    """The block hidden rows that the real drafting step hands to its rollout."""
    caught = []

    def catch(_model: Any, _target: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> None:
        caught.append(hidden)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "rollout", catch)
        decoding.draft(model, target, torch.tensor([token]), torch.tensor([anchor]), cache, 1)
    return caught[0]


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", [2, 4, 8])
def test_training_pass_equals_cached_pass(
    block: int, shift_label: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block rows in training equal those of drafting, after any chunking of the context."""
    rng = random.Random(block)
    model, target = tiny_draft(shift_label, block_size=block), tiny_target()
    ids = torch.randint(2, 32, (1, 20), generator=torch.Generator().manual_seed(block))
    features = target.encode(ids, torch.ones_like(ids)).features
    positions = torch.arange(20)[None]
    anchors = torch.tensor([[1, 4, 5, 6, 13, 19]])
    inputs = alignment.block_inputs(ids[0, anchors], block, model.config.mask_token_id)
    with torch.no_grad():
        trained = model(features, positions, anchors, target.embed(inputs))
        for place, anchor in enumerate(anchors[0].tolist()):
            for _ in range(3):
                cache = DraftCache(2, 40)
                for start, end in chunks(anchor, rng) if anchor > 1 else [(0, 1)]:
                    # A rejected token's features lie beyond the chunk until they are overwritten.
                    junk = torch.arange(start, end + 3)[None]
                    cache.write(model.context_kv(torch.randn(1, end + 3 - start, 64), junk), junk)
                    span = positions[:, start:end]
                    cache.write(model.context_kv(features[:, start:end], span), span)
                token = int(ids[0, anchor])
                cached = hidden_of_draft(model, target, token, anchor, cache, monkeypatch)
                torch.testing.assert_close(cached[0], trained[0, place], atol=1e-5, rtol=1e-5)


def test_drafting_does_not_write_the_cache() -> None:
    """Block rows never enter the draft's cache."""
    model, target = tiny_draft(), tiny_target()
    cache = DraftCache(2, 20)
    span = torch.arange(6)[None]
    with torch.no_grad():
        cache.write(model.context_kv(torch.randn(1, 6, 64), span), span)
        before = [(k.clone(), v.clone()) for k, v in cache.read(20)]
        decoding.draft(model, target, torch.tensor([5]), torch.tensor([6]), cache, 3)
    for (keys, values), (old_keys, old_values) in zip(cache.read(20), before, strict=True):
        assert torch.equal(keys, old_keys) and torch.equal(values, old_values)


# -- head ------------------------------------------------------------------------------------


def test_head_steps_equal_the_teacher_forced_states() -> None:
    """A chain of single GRU steps gives the states of the sequence pass."""
    model = tiny_draft()
    embeds = torch.randn(5, 7, 32)
    with torch.no_grad():
        states = model.head_states(embeds)
        state = model.initial_state(embeds[:, 0])
        for place in range(7):
            state = model.head_step(embeds[:, place], state)
            torch.testing.assert_close(state, states[:, place], atol=1e-6, rtol=1e-5)


def test_gru_cell_formula() -> None:
    """Gate order r, z, n; n = tanh(W_in x + r ⊙ W_hn s); s' = (1 - z) ⊙ n + z ⊙ s."""
    model = tiny_draft()
    x, s = torch.randn(32), torch.randn(12)
    with torch.no_grad():
        from_x = (model.prefix_gru.weight_ih_l0 @ x).split(12)
        from_s = (model.prefix_gru.weight_hh_l0 @ s).split(12)
        r, z = torch.sigmoid(from_x[0] + from_s[0]), torch.sigmoid(from_x[1] + from_s[1])
        n = torch.tanh(from_x[2] + r * from_s[2])
        step = model.head_step(x[None], s[None])[0]
        torch.testing.assert_close(step, (1 - z) * n + z * s, atol=1e-6, rtol=1e-5)


def test_correction_formula() -> None:
    """Hidden row first, then the state; two bias-free layers with SiLU between them."""
    model = tiny_draft()
    h, s = torch.randn(4, 32), torch.randn(4, 12)
    with torch.no_grad():
        inner = torch.cat([h, s], dim=1) @ model.embed_proj[0].weight.T
        expected = (inner * torch.sigmoid(inner)) @ model.vocab_projection.T
        torch.testing.assert_close(model.correction(h, s), expected, atol=1e-5, rtol=1e-5)
        split = model.head_hidden(h, s) @ model.vocab_projection.T
        torch.testing.assert_close(split, expected, atol=1e-5, rtol=1e-5)


def teacher_forced_logits(
    model: DominoDraft, target: Any, hidden: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Final logits of all rows, with the training pass's alignment; ``tokens`` feed the GRU."""
    config = model.config
    states = model.head_states(target.embed(tokens))
    states = alignment.row_states(states, config.shift_label)
    corrected = alignment.corrected_rows(
        config.block_size, config.shift_label, config.pure_draft_prefix_len
    )
    return target.logits(hidden) + corrected[:, None] * model.correction(hidden, states)


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("block", [2, 4, 8])
def test_rollout_equals_teacher_forcing_on_its_own_tokens(block: int, shift_label: bool) -> None:
    """Feeding a free-running rollout's tokens back teacher-forced proposes the same tokens."""
    model, target = tiny_draft(shift_label, block_size=block), tiny_target()
    hidden = torch.randn(20, block, 32, generator=torch.Generator().manual_seed(block))
    anchors = torch.arange(20)
    most = block if shift_label else block - 1
    with torch.no_grad():
        proposals = decoding.rollout(model, target, hidden, anchors, most).tokens
        tokens = torch.cat([anchors[:, None], proposals], dim=1)[:, :block]
        best = teacher_forced_logits(model, target, hidden, tokens).argmax(-1)
    start = alignment.first_row(shift_label)
    assert best[:, start : start + most].tolist() == proposals.tolist()
