"""Replay: the runs that greedy decoding would produce, from one target pass over a known answer.

The text must be the target's own greedy answer. Its features then equal those that decoding would
see, so drafting from every answer position at once and walking the chain gives the same accepted
run at every step as the decode loop, far faster.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.acceptance import chain_walk
from domino_kit.decoding import check_num_proposals, check_pair, rollout
from domino_kit.modeling import DominoDraft, KeyValue
from domino_kit.target import Target, TargetEnds
from domino_kit.trace import Record


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt and the target's own greedy answer to it, as token ids."""

    prompt: list[int]
    answer: list[int]


@torch.no_grad()
def replay(
    target: Target,
    model: DominoDraft,
    texts: list[KnownAnswer],
    *,
    num_proposals: int | None = None,
    use_head: bool = True,
    batch_size: int = 8,
    chunk_anchors: int = 64,
) -> list[list[int]]:
    """Accepted runs of every text, one number a verify step."""
    check_pair(model, target)
    n = check_num_proposals(model, num_proposals)
    runs: list[list[int]] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        features = _features(target, part)
        runs += [
            replay_features(
                target, model, text, features[row : row + 1],
                num_proposals=n, use_head=use_head, chunk_anchors=chunk_anchors,
            )
            for row, text in enumerate(part)
        ]  # fmt: skip
    return runs


@torch.no_grad()
def replay_features(
    target: TargetEnds,
    model: DominoDraft,
    text: KnownAnswer,
    features: Tensor,
    *,
    num_proposals: int | None = None,
    use_head: bool = True,
    chunk_anchors: int = 64,
) -> list[int]:
    """Accepted runs of one text whose ``features [1, S, layers*D]`` are known; later rows are left."""
    n = check_num_proposals(model, num_proposals)
    own = features[:, : len(text.prompt) + len(text.answer)]
    proposals = propose_everywhere(target, model, own, text, n, use_head, chunk_anchors)
    return chain_walk(proposals.tolist(), text.answer)


def _features(target: Target, texts: list[KnownAnswer]) -> Tensor:
    ids = [torch.tensor(text.prompt + text.answer) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return target.encode(padded.to(target.device), mask.to(target.device)).features


def propose_everywhere(
    target: TargetEnds,
    model: DominoDraft,
    features: Tensor,
    text: KnownAnswer,
    num_proposals: int,
    use_head: bool,
    chunk_anchors: int,
) -> Tensor:
    """Free-running proposals ``[len(answer) - 1, n]`` with each answer token but the last as anchor.

    ``features`` is ``[1, S, layers*D]``. The context is projected once; anchors go in chunks.
    """
    tokens = torch.tensor(text.prompt + text.answer, device=features.device)
    positions = torch.arange(len(tokens), device=features.device)[None]
    context = model.context_kv(features, positions)
    proposals = [torch.empty(0, num_proposals, dtype=torch.long, device=features.device)]
    first, last = len(text.prompt), len(tokens) - 1
    for start in range(first, last, chunk_anchors):
        anchors = torch.arange(start, min(start + chunk_anchors, last), device=features.device)
        proposals.append(
            propose_at(target, model, context, tokens, anchors, num_proposals, use_head=use_head)
        )
    return torch.cat(proposals)


def propose_at(
    target: TargetEnds,
    model: DominoDraft,
    context: list[KeyValue],
    tokens: Tensor,
    anchors: Tensor,
    num_proposals: int,
    *,
    use_head: bool = True,
    record: Record | None = None,
) -> Tensor:
    """Proposals ``[N, n]`` after the ``anchors [N]`` of a text ``tokens [S]``, in increasing order.

    ``context`` holds each layer's keys and values of the whole text, ``[1, kv_heads, S, head_dim]``.
    """
    config, block_size = model.config, model.config.block_size
    block = alignment.block_inputs(tokens[anchors], block_size, config.mask_token_id)
    embeds, positions = target.embed(block), alignment.block_positions(anchors, block_size)
    seen = int(anchors[-1])
    context_positions = torch.arange(seen, device=anchors.device)[None]
    hidden = model.block_hidden(
        embeds.flatten(0, 1)[None],
        positions.flatten()[None],
        [(keys[:, :, :seen], values[:, :, :seen]) for keys, values in context],
        alignment.visibility(anchors[None], context_positions, block_size),
    )
    hidden = hidden.view(len(anchors), block_size, -1)
    if record is not None:
        record |= {"block_ids": block, "block_positions": positions, "block_embeds": embeds}
    return rollout(
        model, target, hidden, tokens[anchors], num_proposals, use_head=use_head, record=record
    ).tokens
