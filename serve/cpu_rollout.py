"""The Domino rollout on a CPU: SGLang's function by way of the toolkit's own."""

from typing import Any

import torch
from torch import Tensor

from domino_kit.products import product
from domino_kit.rollout import Head, propose
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
    the target's embedding, the draft's GRU and its projector). The work is
    :func:`domino_kit.rollout.propose`, which decoding uses too.

    A ``recording`` takes ``base_logits``, ``gru_states`` and ``corrected_logits`` as they are used
    (:mod:`domino_kit.trace`), over the whole vocabulary also where proposals come from a pool.
    """
    start = 0 if shift_label else 1
    rows = draft_hidden[:, start : start + draft_hidden.shape[1] - 1]
    base = product(rows, lm_head_weight[:vocab_size])
    head = Head(target_embedding, prefix_gru, embed_proj)
    if recording is not None:
        recording["base_logits"] = base
    return propose(base, rows, bonus_tokens, head, pool_size=candidate_pool_size, record=recording)
