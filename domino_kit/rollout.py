"""From a block's hidden rows to proposals; what depends on no proposal is computed once a block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_kit.products import add_product, product
from domino_kit.trace import Record


@dataclass(frozen=True)
class Head:
    """A Domino head as a rollout reads it: the modules of a draft, or an engine's.

    ``embed`` gives the target's embeddings ``[..., D]``, ``gru`` is ``prefix_gru``, ``projector``
    is ``embed_proj``. ``table`` is :func:`input_table` or nothing.
    """

    embed: Callable[[Tensor], Tensor]
    gru: Any
    projector: Any
    table: Tensor | None = None

    def next_state(self, tokens: Tensor, state: Tensor | None) -> Tensor:
        """The state ``[B, G]`` after one more of the ``tokens [B]``; ``None`` before the first."""
        if self.table is None:
            inputs = product(self.embed(tokens), self.gru.weight_ih_l0)
        else:
            inputs = self.table[tokens]
        return gru_step(inputs, state, self.gru.weight_hh_l0)


def input_table(embedding: Tensor, gru: Any) -> Tensor:
    """The GRU's view of every token, ``[V, 3G]``: ``embedding [V, D]`` times its input weight.

    Spares a rollout one of its products a step and costs ``V * 3G`` numbers of memory: 1.9 GB for
    V = 151,936 and G = 1024 in float32.
    """
    return embedding @ gru.weight_ih_l0.t()


def gru_step(inputs: Tensor, state: Tensor | None, weight: Tensor) -> Tensor:
    """``torch.gru_cell`` without bias, from ``inputs [B, 3G]``, the product with its input weight.

    ``weight [3G, G]`` is the one for the state; ``None`` is the zero state.
    """
    if state is None:
        state, gates = inputs.new_zeros(inputs.shape[0], weight.shape[1]), torch.zeros_like(inputs)
    else:
        gates = product(state, weight)
    reset_in, update_in, new_in = inputs.chunk(3, dim=-1)
    reset_own, update_own, new_own = gates.chunk(3, dim=-1)
    new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_own) * new_own)
    return torch.lerp(new, state, torch.sigmoid(update_in + update_own))


@torch.no_grad()
def propose(
    base: Tensor,
    rows: Tensor,
    anchor_tokens: Tensor,
    head: Head | None,
    *,
    pool_size: int = 0,
    choose: Callable[[Tensor], Tensor] | None = None,
    record: Record | None = None,
) -> Tensor:
    """Proposals ``[B, n]`` from base logits ``[B, n, V]`` of hidden ``rows [B, n, D]``.

    Each proposal is fed back: the GRU consumes it, and the projector's correction of the next
    offset depends on the new state; offset 1 is not corrected. The projector's first layer is
    split, so its part for the hidden rows is computed once for the block. Without ``head`` the
    base logits decide alone.

    ``pool_size`` limits corrected offsets to the tokens with a request's best base logits at
    offsets 2 … n, as SGLang does; 0 is all tokens. ``choose`` draws tokens ``[B]`` from logits
    ``[B, V]``, by default the best one; a pool needs the default. ``record`` takes ``gru_states``
    and ``corrected_logits``, over the whole vocabulary also where a pool decides.
    """
    assert not (pool_size and choose), "a pool holds the best tokens, not a distribution"
    pick = choose or _best
    count, size = rows.shape[1:]
    if head is None or (record is None and count == 1):
        return torch.stack([pick(base[:, place]) for place in range(count)], dim=1)
    inner, activation, last = head.projector
    from_rows = product(rows, inner.weight[:, :size])
    in_full = record is not None or choose is not None
    search: _Pool | _Vocabulary | None = _Pool.of(base[:, 1:], last.weight, pool_size)
    if search is None and not in_full:
        search = _Vocabulary(base, last)
    tokens: list[Tensor] = []
    states: list[Tensor] = []
    corrected: list[Tensor] = []
    previous, state = anchor_tokens, None
    for place in range(count):
        logits = base[:, place]
        state = head.next_state(previous, state)
        if place == 0:
            previous = pick(logits)
        else:
            hidden = activation(from_rows[:, place] + product(state, inner.weight[:, size:]))
            if in_full:
                logits = add_product(logits, hidden, last.weight)
            previous = pick(logits) if search is None else search.best_token(place, hidden)
        tokens.append(previous)
        states.append(state)
        corrected.append(logits)
    if record is not None:
        record["gru_states"] = torch.stack(states, dim=1)
        record["corrected_logits"] = torch.stack(corrected, dim=1)
    return torch.stack(tokens, dim=1)


def _best(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


CREDIT = 2
"""So many searches may fail more than succeed before a block's rest is computed in full."""

SLACK = 1e-3
"""Far above what float32 rounding can do to a bound, far below what would add candidates."""


class _Vocabulary:
    """The best of all corrected tokens, mostly without computing all corrections.

    By Cauchy-Schwarz a token gains at most the norm of its row of the projector times that of the
    projector's input, so one whose base logit plus that stays below a score already reached cannot
    win, and its row is not read. Where the bound spares too little more often than not, the rest
    of the block is computed in full: ``lead`` counts searches that paid, less those that did not.
    """

    def __init__(self, base: Tensor, last: Any) -> None:
        self.base, self.weight = base, last.weight
        searchable = base.device.type == "cpu" and base.dtype == torch.float32
        self.lead = CREDIT if searchable else -1
        if searchable:
            self.norms = row_norms(last)

    def best_token(self, place: int, hidden: Tensor) -> Tensor:
        """The best token ``[B]`` at offset ``place + 1`` for projector inputs ``[B, E]``."""
        base = self.base[:, place]
        found: dict[int, Tensor] = {}
        for row in range(len(base)):
            if self.lead < 0:
                break
            token = self._search(base[row], hidden[row])
            self.lead += 1 if token is not None else -1
            if token is not None:
                found[row] = token
        if not found:
            return add_product(base, hidden, self.weight).argmax(-1)
        rest = [row for row in range(len(base)) if row not in found]
        if rest:
            full = add_product(base[rest], hidden[rest], self.weight).argmax(-1)
            found |= zip(rest, full, strict=True)
        return torch.stack([found[row] for row in range(len(base))])

    def _search(self, base: Tensor, hidden: Tensor) -> Tensor | None:
        """For one request; ``None`` if too many tokens can win."""
        start = base.argmax()
        reached = base[start] + self.weight[start] @ hidden - SLACK
        bound = torch.add(base, self.norms, alpha=float(hidden.norm()))
        able = bound >= reached
        if int(able.count_nonzero()) > len(base) // 8:
            return None
        ids = able.nonzero()[:, 0]
        return ids[(base[ids] + F.embedding(ids, self.weight) @ hidden).argmax()]


def row_norms(layer: Any) -> Tensor:
    """Norms of a linear layer's rows, kept with it until its weight changes."""
    weight = layer.weight
    state = (weight.data_ptr(), weight._version)
    if getattr(layer, "norms_of", None) != state:
        layer.norms, layer.norms_of = weight.detach().norm(dim=1), state
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
    def of(cls, base: Tensor, last: Tensor, size: int) -> "_Pool | None":
        """The best of each request's ``base [B, n-1, V]``; ``None`` for the whole vocabulary."""
        if not 0 < size < base.shape[-1] or base.shape[1] == 0:
            return None
        ids = base.amax(1).topk(size, dim=-1, sorted=False).indices
        own = base.gather(2, ids[:, None].expand(-1, base.shape[1], -1))
        return cls(ids, own, F.embedding(ids, last))

    def best_token(self, place: int, hidden: Tensor) -> Tensor:
        """The best corrected token ``[B]`` at offset ``place + 1`` for projector input ``[B, E]``."""
        scores = torch.bmm(self.weights, hidden[:, :, None])[:, :, 0] + self.base[:, place - 1]
        return self.ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
