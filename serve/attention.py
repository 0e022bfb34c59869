"""Attention on a CPU for SGLang: plain PyTorch over the paged cache, batched where shapes allow."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

MAX_PADDING = 2.0
"""Requests are attended to together while padding at most doubles the keys that are read."""


@dataclass
class Span:
    """Requests of one batch that are attended to together.

    ``rows`` are their query rows, request by request, ``queries`` each. ``slots [G, L]`` are the
    cache slots of positions 0 … L-1, ``first [G]`` the position of each request's first query,
    ``lengths [G]`` how many positions exist (slots beyond are padding).
    """

    rows: slice
    queries: int
    slots: Tensor
    first: Tensor
    lengths: Tensor
    _masks: dict[tuple[bool, int], Tensor | None] = field(default_factory=dict)

    def mask(self, causal: bool, window: int) -> Tensor | None:
        """Which keys each query sees, bool ``[G, 1, queries, L]``; ``None`` if all see all.

        ``window`` is SGLang's ``sliding_window_size``: a query sees that many keys before its own;
        negative for all.
        """
        key = (causal, window)
        if key not in self._masks:
            self._masks[key] = self._build_mask(causal, window)
        return self._masks[key]

    def _build_mask(self, causal: bool, window: int) -> Tensor | None:
        width = self.slots.shape[1]
        keys = torch.arange(width)
        visible = (keys < self.lengths[:, None])[:, None].expand(-1, self.queries, -1)
        if causal:
            own = self.first[:, None] + torch.arange(self.queries)
            visible = visible & (keys <= own[:, :, None])
            if window >= 0:
                visible = visible & (keys >= own[:, :, None] - window)
        return None if bool(visible.all()) else visible[:, None]

    @property
    def is_fresh_prefill(self) -> bool:
        """One request whose queries are all of its positions: SDPA's own causal mask fits."""
        return len(self.first) == 1 and self.queries == self.slots.shape[1]


def make_spans(
    req_to_token: Tensor, requests: Tensor, queries: list[int], first: Tensor, lengths: Tensor
) -> list[Span]:
    """Split a batch into spans: all together if every request has as many queries, else singly.

    ``requests [G]`` are rows of ``req_to_token``; ``queries`` counts rows of each request.
    """
    longest, total = int(lengths.max()), int(lengths.sum())
    uniform = len(set(queries)) == 1 and longest * len(queries) <= MAX_PADDING * total
    groups = [list(range(len(queries)))] if uniform else [[i] for i in range(len(queries))]
    spans, start = [], 0
    for group in groups:
        own = slice(group[0], group[-1] + 1)
        size = sum(queries[own])
        width = int(lengths[own].max())
        # Beyond a request's length the table holds anything; any slot of its own does as padding.
        slots = req_to_token[requests[own], :width].long()
        slots = torch.where(torch.arange(width) < lengths[own, None], slots, slots[:, :1])
        spans.append(
            Span(slice(start, start + size), queries[group[0]], slots, first[own], lengths[own])
        )
        start += size
    return spans


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    span: Span,
    scale: float,
    causal: bool,
    window: int,
) -> Tensor:
    """Attention of one span: ``queries [G*Q, H, d]`` over the cache ``[slots, kv_heads, d]``.

    Only the span's own slots are read and copied, never the pool.
    """
    requests = len(span.first)
    q = queries.view(requests, span.queries, *queries.shape[1:]).transpose(1, 2)
    k = keys[span.slots].transpose(1, 2).to(q.dtype)
    v = values[span.slots].transpose(1, 2).to(q.dtype)
    plain_causal = causal and window < 0 and span.is_fresh_prefill and span.queries > 1
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plain_causal else span.mask(causal, window),
        is_causal=plain_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).reshape(queries.shape[0], -1)


class CpuAttention(AttentionBackend):
    """SGLang's attention backend for target and draft on a CPU.

    Prefill, decode and verify are one thing here: some query rows at the end of each request. A
    draft layer (``ENCODER_ONLY``) sees the whole prefix and its whole block, a target layer sees
    causally.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise ValueError(
                "the CPU platform has one KV pool for all layers; add "
                "--disable-hybrid-swa-memory for this target."
            )
        self.spans: list[Span] = []

    def support_triton(self) -> bool:
        """No Triton on a CPU."""
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work out once for all layers which cache slots each query row may see."""
        mode = forward_batch.forward_mode
        seq_lens = forward_batch.seq_lens
        if mode.is_idle() or seq_lens.numel() == 0:
            self.spans = []
            return
        if mode.is_target_verify():
            # The block of a verify pass, or of a draft pass, stands after seq_lens tokens.
            block = int(forward_batch.spec_info.draft_token_num)
            queries, first, lengths = [block] * len(seq_lens), seq_lens, seq_lens + block
        elif mode.is_decode():
            queries, first, lengths = [1] * len(seq_lens), seq_lens - 1, seq_lens
        else:
            extends = forward_batch.extend_seq_lens
            queries, first, lengths = extends.tolist(), forward_batch.extend_prefix_lens, seq_lens
        self.spans = make_spans(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            queries,
            first,
            lengths,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **unsupported: Any,
    ) -> Tensor:
        """Store keys and values at their slots, then attend; ``[rows, heads * head_dim]``."""
        self._refuse(layer, unsupported)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc), k, v
            )
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size if causal else -1
        parts = [
            attend(queries[span.rows], keys, values, span, layer.scaling, causal, window)
            for span in self.spans
        ]
        if not parts:
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _refuse(layer: RadixAttention, unsupported: dict[str, Any]) -> None:
        """Say plainly what this backend does not compute, rather than compute something else."""
        given = sorted(name for name, value in unsupported.items() if value is not None)
        if layer.is_cross_attention:
            given.append("cross attention")
        if layer.logit_cap:
            given.append(f"a logit cap of {layer.logit_cap}")
        if given:
            raise NotImplementedError(
                f"the CPU attention backend does not support {', '.join(given)}, "
                "which this target needs."
            )
