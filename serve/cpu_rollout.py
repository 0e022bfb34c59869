"""The Domino rollout on a CPU: SGLang's function, with every product that can be done once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_kit.serve.cpu_linear import product
from domino_kit.trace import Record


@torch.no_grad()
def cpu_rollout(
    *,
    draft_hidden: Tensor,
    bonus_tokens: Tensor,
    target_embedding: Any,
    lm_head_weight: Tensor,
    prefix_gru: Any,
    embed_proj: Any,
    vocab_size: int,
    shift_label: bool,
    candidate_pool_size: int,
    recording: Record | None = None,
    **_: Any,
) -> Tensor:
    """Greedy proposals ``[B, K-1]`` from block hidden rows ``[B, K, D]``.

    Arguments and result are those of SGLang's ``domino_greedy_rollout`` on one device (modules:
    the target's embedding, the draft's GRU and its projector). The
    projector's first layer is split: its part for the hidden row is computed once for the block,
    its part for the GRU state step by step.

    A ``recording`` takes ``base_logits``, ``gru_states`` and ``corrected_logits`` as they are used
    (:mod:`domino_kit.trace`), over the whole vocabulary also where proposals come from a pool.
    """
    requests, block_size, size = draft_hidden.shape
    start = 0 if shift_label else 1
    rows = draft_hidden[:, start : start + block_size - 1]
    base = product(rows, lm_head_weight[:vocab_size])
    tokens = [base[:, 0].argmax(-1)]
    if block_size == 2 and recording is None:
        return tokens[0][:, None]
    inner = embed_proj[0].weight
    from_rows = product(rows[:, 1:], inner[:, :size])
    state_part = inner[:, size:]
    last = embed_proj[2].weight
    pool = _Pool.best(base[:, 1:], last, candidate_pool_size)
    weights = prefix_gru.weight_ih_l0, prefix_gru.weight_hh_l0
    # Two GRU inputs stand before the second proposal: the anchor, then the first proposal.
    zeros = draft_hidden.new_zeros(requests, prefix_gru.hidden_size)
    states = [torch.gru_cell(target_embedding(bonus_tokens), zeros, *weights)]
    corrected = [base[:, 0]]
    for step in range(1, block_size - 1):
        states.append(torch.gru_cell(target_embedding(tokens[-1]), states[-1], *weights))
        hidden = embed_proj[1](from_rows[:, step - 1] + product(states[-1], state_part))
        if recording is not None:
            corrected.append(product(hidden, last) + base[:, step])
        if pool is not None:
            tokens.append(pool.best_token(step, hidden))
        elif recording is not None:
            tokens.append(corrected[-1].argmax(-1))
        else:
            tokens.append(best_token(base[:, step], hidden, last, row_norms(embed_proj[2])))
    if recording is not None:
        recording["base_logits"] = base
        recording["gru_states"] = torch.stack(states, dim=1)
        recording["corrected_logits"] = torch.stack(corrected, dim=1)
    return torch.stack(tokens, dim=1)


FEW_REQUESTS = 2
"""Up to so many requests are searched one by one; beyond, one product for all is cheaper."""

SLACK = 1e-3
"""Far above what float32 rounding can do to a bound, far below what would add candidates."""


def best_token(base: Tensor, hidden: Tensor, weight: Tensor, norms: Tensor) -> Tensor:
    """``argmax(base + hidden @ weight.T)`` over the whole vocabulary, ``[B]``.

    ``base [B, V]``, ``hidden [B, E]``, ``weight [V, E]``, ``norms [V]`` of its rows. For a few
    requests most rows are never read: by Cauchy-Schwarz a token gains at most ``|hidden| * norm``,
    so one whose base logit plus that stays below a score already reached cannot win.
    """
    if base.shape[0] > FEW_REQUESTS or base.dtype != torch.float32:
        return (product(hidden, weight) + base).argmax(-1)
    return torch.stack([_search(b, h, weight, norms) for b, h in zip(base, hidden, strict=True)])


def _search(base: Tensor, hidden: Tensor, weight: Tensor, norms: Tensor) -> Tensor:
    """:func:`best_token` for one request."""
    bound = torch.add(base, norms, alpha=float(hidden.norm()))
    start = base.argmax()
    reached = base[start] + weight[start] @ hidden - SLACK
    able = (bound >= reached).nonzero()[:, 0]
    if len(able) > len(base) // 8:
        return (product(hidden[None], weight)[0] + base).argmax()
    return able[(base[able] + weight[able] @ hidden).argmax()]


def row_norms(layer: Any) -> Tensor:
    """Norms of a linear layer's rows, kept with it until its weight changes."""
    weight = layer.weight
    state = (weight.data_ptr(), weight._version)
    if getattr(layer, "norms_of", None) != state:
        layer.norms, layer.norms_of = weight.float().norm(dim=1), state
    return layer.norms


@dataclass(frozen=True)
class _Pool:
    """The ``ids [B, P]`` that later proposals are limited to, and what is needed to choose.

    ``base [B, n-1, P]`` are their base logits by offset 2 … n, ``weights [B, P, E]`` their rows of
    the projector.
    """

    ids: Tensor
    base: Tensor
    weights: Tensor

    @classmethod
    def best(cls, base: Tensor, last: Tensor, size: int) -> "_Pool | None":
        """The best of each request's ``base [B, n-1, V]``; ``None`` for the whole vocabulary."""
        if not 0 < size < base.shape[-1] or base.shape[1] == 0:
            return None
        ids = base.amax(1).topk(size, dim=-1, sorted=False).indices
        own = base.gather(2, ids[:, None].expand(-1, base.shape[1], -1))
        return cls(ids, own, last[ids])

    def best_token(self, step: int, hidden: Tensor) -> Tensor:
        """The best corrected token ``[B]`` at offset ``step + 1`` for projector input ``[B, E]``."""
        scores = torch.bmm(self.weights, hidden[:, :, None])[:, :, 0] + self.base[:, step - 1]
        return self.ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
