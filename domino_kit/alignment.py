"""Every index of the method: anchors, block inputs, positions, visibility, labels, weights.

One legend for the shapes in this project:
B batch, S context length, N anchors, K block positions, D hidden, V vocabulary.

A block hangs on its anchor, the last committed token ``t_a`` at position ``a``. Offset ``m``
counts the tokens after the anchor: ``m = 1`` is the first drafted one. Both label modes obey one
rule: offset ``m`` has label ``t_{a+m}``, uses the GRU state that has consumed ``t_a … t_{a+m-1}``,
is corrected when ``m > pure_draft_prefix_len``, and weighs ``exp(-(m - 1) / gamma)``. They differ
only in the row that predicts it: row ``m - 1`` with ``shift_label``, row ``m`` without.
"""

import torch
from torch import Tensor


def first_row(shift_label: bool) -> int:
    """Row of the block that predicts offset 1."""
    return 0 if shift_label else 1


def row_offsets(block_size: int, shift_label: bool) -> Tensor:
    """Offset ``m`` that each row predicts, ``[K]`` int64; 0 means the row predicts nothing new."""
    return torch.arange(block_size) + (1 - first_row(shift_label))


def proposal_rows(block_size: int, shift_label: bool) -> slice:
    """Rows that a server turns into proposals: offsets 1 … K-1 in both label modes.

    With ``shift_label`` the last row (offset K) is trained but never served: an engine verifies
    K positions, the anchor and K-1 drafts (SGLang 0.5.23, ``domino_greedy_rollout``).
    """
    start = first_row(shift_label)
    return slice(start, start + block_size - 1)


def corrected_rows(block_size: int, shift_label: bool, pure_draft_prefix_len: int) -> Tensor:
    """Rows whose logits the head corrects, ``[K]`` bool: offsets ``m > pure_draft_prefix_len``."""
    return row_offsets(block_size, shift_label) > pure_draft_prefix_len


def decay_weights(block_size: int, shift_label: bool, gamma: float) -> Tensor:
    """``exp(-(m - 1) / gamma)`` by row, ``[K]`` float32; 0 for a row that predicts nothing new.

    Source: DFlash paper, appendix A.1, as used by SpecForge and Automodel.
    """
    offsets = row_offsets(block_size, shift_label)
    weights = torch.exp(-(offsets.float() - 1) / gamma)
    return torch.where(offsets >= 1, weights, torch.zeros_like(weights))


def prefix_weights(prefix: Tensor, block_size: int, shift_label: bool, gamma: float) -> Tensor:
    """``exp(-(m - l) / gamma)`` by row behind ``l`` visible tokens, ``[..., K]`` float32.

    ``prefix [...]`` counts a block's visible tokens, the anchor included: ``t_a … t_{a+l-1}``. Rows
    whose label is among them (offset ``m < l``) weigh 0, and the decay starts at the first token
    that is not shown. ``l = 1`` gives :func:`decay_weights`. Source: D2SD (arXiv:2606.04446) as in
    Automodel ``loss_type="variable_prefix"``, by offset instead of by row.
    """
    hidden = row_offsets(block_size, shift_label).to(prefix.device) - prefix[..., None]
    return torch.where(hidden >= 0, torch.exp(-hidden.float() / gamma), 0.0)


def valid_anchors(loss_mask: Tensor) -> Tensor:
    """Positions that may be anchors, ``[B, S]`` bool, from ``loss_mask`` ``[B, S]``.

    An anchor is chosen by its first *label*: ``t_{a+1}`` must be supervised. So the token just
    before an answer is an anchor, and the first token of every answer can be learnt.
    """
    supervised = loss_mask.bool()
    valid = torch.zeros_like(supervised)
    valid[:, :-1] = supervised[:, 1:]
    return valid


def sample_anchors(
    loss_mask: Tensor, num_anchors: int, generators: list[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Draw up to ``num_anchors`` distinct anchors a sample, uniformly, in increasing order.

    One generator a sample, so a draw does not depend on which samples share a batch. Returns
    ``anchors [B, N]`` int64 and ``keep [B, N]`` bool, where N is the largest count in the batch
    (at least 1); places beyond a sample's own count hold anchor 0 with ``keep`` false.
    """
    assert len(generators) == loss_mask.shape[0], "one generator a sample"
    drawn = []
    for valid, generator in zip(valid_anchors(loss_mask).cpu(), generators, strict=True):
        candidates = valid.nonzero().flatten()
        order = torch.randperm(len(candidates), generator=generator)[:num_anchors]
        drawn.append(candidates[order].sort().values)
    width = max(1, max(len(chosen) for chosen in drawn))
    anchors = torch.zeros(len(drawn), width, dtype=torch.long)
    keep = torch.zeros(len(drawn), width, dtype=torch.bool)
    for row, chosen in enumerate(drawn):
        anchors[row, : len(chosen)] = chosen
        keep[row, : len(chosen)] = True
    return anchors.to(loss_mask.device), keep.to(loss_mask.device)


def sample_prefixes(
    keep: Tensor, share: float, base: float, block_size: int, generators: list[torch.Generator]
) -> Tensor:
    """How many tokens each block shows, the anchor included: ``[B, N]`` int64 from ``keep [B, N]``.

    With probability ``share`` a length ``l`` in 2 … K-1, of probability proportional to
    ``base ** l`` (D2SD's truncated geometric prior, as in Automodel); otherwise 1, which is what
    a server drafts from. One generator a sample and two numbers a block, drawn after the anchors:
    neither the anchors nor a block's length depend on which samples share a batch.
    """
    lengths = torch.arange(2, block_size)
    edges = (base ** lengths.double()).cumsum(0)
    prefix = torch.ones(keep.shape, dtype=torch.long)
    for row, (count, generator) in enumerate(zip(keep.sum(1).tolist(), generators, strict=True)):
        chosen, drawn = torch.rand(2, count, generator=generator, dtype=torch.float64)
        place = torch.searchsorted(edges, drawn * edges[-1], right=True).clamp(max=len(edges) - 1)
        prefix[row, :count] = torch.where(chosen < share, lengths[place], 1)
    return prefix.to(keep.device)


def block_inputs(anchor_tokens: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """``[t_a, MASK, …, MASK]`` for anchor tokens of any shape ``[...]``: ``[..., K]`` int64."""
    block = anchor_tokens.new_full((*anchor_tokens.shape, block_size), mask_token_id)
    block[..., 0] = anchor_tokens
    return block


def show_prefix(inputs: Tensor, tokens: Tensor, prefix: Tensor) -> Tensor:
    """The block's inputs with its first ``prefix`` rows as true tokens, ``[..., K]``.

    ``inputs [..., K]`` from :func:`block_inputs`, ``tokens [..., K]`` from :func:`gru_inputs` (row j
    holds ``t_{a+j}``), ``prefix [...]`` counts the anchor.
    """
    rows = torch.arange(inputs.shape[-1], device=inputs.device)
    return torch.where(rows < prefix[..., None], tokens, inputs)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of the rows, ``[..., K]``: row 0 sits at the anchor's own position."""
    return anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)


def context_visibility(anchors: Tensor, context_positions: Tensor) -> Tensor:
    """Which context a block may read, ``[B, N, S]`` bool: positions strictly before its anchor.

    ``anchors`` is ``[B, N]``, ``context_positions`` ``[B, S]`` with -1 at padding. The anchor's
    own target feature does not exist yet when a server drafts, so it must stay hidden.
    """
    positions = context_positions[:, None, :]
    return (positions >= 0) & (positions < anchors[:, :, None])


def visibility(anchors: Tensor, context_positions: Tensor, block_size: int) -> Tensor:
    """The whole mask, ``[B, N*K, S + N*K]`` bool: own context, then own block and no other.

    Every row of a block sees all rows of its block, both directions, so no row is ever empty.
    """
    batch, num_anchors = anchors.shape
    context = context_visibility(anchors, context_positions)
    context = context.repeat_interleave(block_size, dim=1)
    owner = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    own_block = (owner[:, None] == owner[None, :]).expand(batch, -1, -1)
    return torch.cat([context, own_block], dim=-1)


def row_labels(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int, shift_label: bool
) -> tuple[Tensor, Tensor]:
    """Label of every row and whether it is supervised: ``[B, N, K]`` int64 and bool.

    Labels beyond the text or outside the loss mask, and a row at offset 0, are unsupervised; their
    label value is then any valid token id.
    """
    length = input_ids.shape[1]
    offsets = row_offsets(block_size, shift_label).to(anchors.device)
    index = anchors.unsqueeze(-1) + offsets
    inside = index < length
    flat = index.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, flat).view_as(index)
    supervised = loss_mask.bool().gather(1, flat).view_as(index)
    return labels, supervised & inside & (offsets >= 1)


def gru_inputs(input_ids: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Tokens the GRU consumes for each block, ``t_a … t_{a+K-1}``: ``[B, N, K]`` int64.

    Positions beyond the text repeat its last token; the rows they reach are unsupervised.
    """
    index = block_positions(anchors, block_size).clamp(max=input_ids.shape[1] - 1)
    return input_ids.gather(1, index.flatten(1)).view_as(index)


def row_states(states: Tensor, shift_label: bool) -> Tensor:
    """The GRU state that each row's correction uses, from the states after each input.

    ``states[..., j, :]`` has consumed ``t_a … t_{a+j}``. A row at offset ``m`` needs the state that
    has consumed ``t_a … t_{a+m-1}``, which is ``states[..., m - 1, :]``. A row at offset 0 is never
    corrected and gets zeros. Shapes ``[..., K, G]`` in and out.
    """
    if shift_label:
        return states
    return torch.cat([torch.zeros_like(states[..., :1, :]), states[..., :-1, :]], dim=-2)
