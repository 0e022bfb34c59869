"""The draft model: a DFlash backbone that drafts a block in parallel, and the causal Domino head.

Module names are the ecosystem's, so a state dict needs no renaming (shapes: docs/checkpoint.md).
Embedding and output head belong to the target and are never part of the draft.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from domino_kit import alignment
from domino_kit.block_attention import BlockMask, block_attention, block_mask
from domino_kit.config import DraftConfig
from domino_kit.trace import Record, context_record

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each ``[B, kv_heads, length, head_dim]``."""
Visible = Tensor | BlockMask
"""What rows see: bool ``[B, Q, S + Q]``, or the same of whole blocks without such an array."""


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, float32 ``[B, 1, length, head_dim]``.

    Computed from the config on every call, in float32, and stored nowhere: there is no buffer that
    ``.to(bfloat16)`` could round. Rounded frequencies are off by radians at position 4096
    (Automodel #2819).
    """
    with torch.autocast(positions.device.type, enabled=False):
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / (theta ** (exponent / head_dim))
        angles = positions.float()[:, None, :, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to ``x [B, heads, length, head_dim]``; computed in float32."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Attention of block rows over ``[context | block]``; queries and keys are normed by head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        size, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, self.heads * width, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, size, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def key_value(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> KeyValue:
        """Keys (normed, rotated) and values of ``x [B, length, D]``."""
        batch, length, _ = x.shape
        shape = (batch, length, self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        values = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(keys, tables), values

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: KeyValue, visible: Visible
    ) -> Tensor:
        batch, length, _ = x.shape
        queries = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim))
        queries = rotate(queries.transpose(1, 2), tables)
        block = self.key_value(x, tables)
        if isinstance(visible, BlockMask):
            out = block_attention(queries, context, block, visible)
        else:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(context, block, strict=True))
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible[:, None], enable_gqa=True
            ).transpose(1, 2)
        return self.o_proj(out.reshape(batch, length, -1))


class MLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One backbone layer. The context bypasses ``input_layernorm``; only block rows pass it."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], context: KeyValue, visible: Visible
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, context, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class DominoDraft(nn.Module):
    """DFlash backbone and, unless ``projector_type`` is ``"none"``, the Domino head.

    Source: Domino (arXiv:2605.29707) and DFlash (arXiv:2602.06036).
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        if config.has_head:
            assert config.gru_hidden_dim is not None and config.emb_dim is not None
            state, rank = config.gru_hidden_dim, config.emb_dim
            self.prefix_gru = nn.GRU(size, state, num_layers=1, batch_first=True, bias=False)
            self.embed_proj = nn.Sequential(
                nn.Linear(size + state, rank, bias=False),
                nn.SiLU(),
                nn.Linear(rank, config.vocab_size, bias=False),
            )

    # -- backbone ------------------------------------------------------------------------------

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)

    def context_kv(
        self, features: Tensor, positions: Tensor, record: Record | None = None
    ) -> list[KeyValue]:
        """Keys and values of every layer for context ``features``.

        ``features`` is ``[B, S, layers*D]``, the target's captured layers side by side;
        ``positions`` is ``[B, S]`` (any value at padding). Every entry depends on its own position
        alone, so a context may be projected in chunks and a cache never needs a repair. A
        ``record`` takes the stages of the trace (:mod:`domino_kit.trace`), here and elsewhere.
        """
        context = self.hidden_norm(self.fc(features))
        if record is not None:
            record |= {"features": features, "context": context}
        tables = self._tables(positions)
        return [layer.self_attn.key_value(context, tables) for layer in self.layers]  # type: ignore[operator, union-attr]

    def block_hidden(
        self, embeds: Tensor, positions: Tensor, context: Sequence[KeyValue], visible: Visible
    ) -> Tensor:
        """Normed hidden rows ``[B, Q, D]`` of Q block rows, the input of both output heads.

        ``embeds`` is ``[B, Q, D]`` (the target's embeddings), ``positions`` ``[B, Q]``,
        ``visible`` bool ``[B, Q, S + Q]`` (:func:`domino_kit.alignment.visibility`), or the same as
        a :class:`~domino_kit.block_attention.BlockMask`, whose blocks cost no more than they see.
        """
        tables = self._tables(positions)
        x = embeds
        for layer, key_value in zip(self.layers, context, strict=True):
            x = layer(x, tables, key_value, visible)
        return self.norm(x)

    # -- head ----------------------------------------------------------------------------------

    def head_states(self, embeds: Tensor, state: Tensor | None = None) -> Tensor:
        """Teacher-forced GRU states ``[M, K, G]`` after each of the inputs ``[M, K, D]``.

        ``state [M, G]`` is the one before them, by default zero.
        """
        states, _ = self.prefix_gru(embeds, None if state is None else state[None].contiguous())
        return states

    def head_step(self, embeds: Tensor, state: Tensor) -> Tensor:
        """One GRU step with the same weights: inputs ``[M, D]``, state ``[M, G]``."""
        input_weight, state_weight = self.prefix_gru.all_weights[0]
        return torch.gru_cell(embeds, state, input_weight, state_weight)

    def initial_state(self, embeds: Tensor) -> Tensor:
        """The zero state ``[M, G]`` for inputs ``[M, D]``."""
        return embeds.new_zeros(embeds.shape[0], self.prefix_gru.hidden_size)

    def head_hidden(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Low-rank hidden ``[..., E]`` from block hidden ``[..., D]`` and states ``[..., G]``."""
        inner, activation = self.embed_proj[0], self.embed_proj[1]
        return activation(inner(torch.cat([hidden, states], dim=-1)))

    def correction(self, hidden: Tensor, states: Tensor) -> Tensor:
        """What the head adds to the base logits, ``[..., V]``."""
        return self.embed_proj[2](self.head_hidden(hidden, states))

    @property
    def vocab_projection(self) -> Tensor:
        """The projector's last matrix, ``[V, E]``."""
        return self.embed_proj[2].weight  # type: ignore[return-value]

    def forward(
        self,
        features: Tensor,
        context_positions: Tensor,
        anchors: Tensor,
        block_embeds: Tensor,
        record: Record | None = None,
    ) -> Tensor:
        """Training pass: hidden rows ``[B, N, K, D]`` of N blocks a sample over one context.

        ``features [B, S, layers*D]``, ``context_positions [B, S]`` with -1 at padding, ``anchors
        [B, N]``, ``block_embeds [B, N, K, D]``.
        """
        batch, num_anchors, block_size, size = block_embeds.shape
        positions = alignment.block_positions(anchors, block_size).flatten(1)
        visible = alignment.context_visibility(anchors, context_positions)
        context = self.context_kv(features, context_positions, record)
        mask = block_mask(visible, block_size)
        hidden = self.block_hidden(block_embeds.flatten(1, 2), positions, context, mask)
        if record is not None:
            record |= {"block_positions": positions, **context_record(context)}
        return hidden.view(batch, num_anchors, block_size, size)


def init_weights(model: DominoDraft, generator: torch.Generator) -> None:
    """Random start as published: linear weights N(0, 0.02), norms 1, the GRU uniform ±1/sqrt(G).

    The projector's last layer starts at zero, so the head's first correction is exactly nothing.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("prefix_gru."):
                bound = model.prefix_gru.hidden_size**-0.5
                parameter.uniform_(-bound, bound, generator=generator)
            elif name == "embed_proj.2.weight":
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
