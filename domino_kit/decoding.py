"""Speculative decoding: draft, verify and accept as separate steps, and the reference decoder.

A step starts at the anchor, the last committed token, whose target state does not exist yet. The
draft proposes n tokens; the target verifies anchor and proposals in one pass; the leading correct
proposals are accepted, and the target's own next token (the bonus token) is the next anchor.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from domino_kit import alignment
from domino_kit.acceptance import max_proposals
from domino_kit.kv_cache import DraftCache, SlotCache
from domino_kit.modeling import DominoDraft
from domino_kit.rollout import Head, propose
from domino_kit.target import Target, TargetEnds, TargetPass
from domino_kit.trace import Record, context_record, pick


@dataclass(frozen=True)
class Sampling:
    """How the target samples. ``temperature`` 0 is greedy; ``top_p`` 1 and ``top_k`` 0 are off.

    ``proposals`` says how the draft proposes when the target samples: its best token, or a sample
    from its own distribution under the same settings. Both keep the target's distribution exactly.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    proposals: Literal["greedy", "sampled"] = "greedy"

    def __post_init__(self) -> None:
        if self.proposals not in ("greedy", "sampled"):
            raise ValueError(f"proposals is {self.proposals!r}; known are 'greedy' and 'sampled'.")
        if not self.temperature >= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0; found {self}."
            )

    @property
    def greedy(self) -> bool:
        """Whether the target takes its most likely token."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution sampled from, ``[..., V]`` float32: temperature, top-k, then top-p."""
        scaled = logits.float() / self.temperature
        if self.top_k:
            kth = scaled.topk(min(self.top_k, scaled.shape[-1]), dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        probs = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            drop = torch.zeros_like(beyond).scatter(-1, order, beyond)
            probs = probs.masked_fill(drop, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


@dataclass(frozen=True)
class Proposal:
    """Drafted ``tokens [B, n]``; ``probs [B, n, V]`` if they were sampled, else ``None``."""

    tokens: Tensor
    probs: Tensor | None = None


@dataclass
class Answer:
    """A generated answer: its tokens (end token included) and the accepted run of every step.

    A run counts only drafts that are part of the answer: where ``max_new_tokens`` or an end token
    cuts a step, drafts beyond the cut are not counted.
    """

    tokens: list[int] = field(default_factory=list)
    accepted_runs: list[int] = field(default_factory=list)


def sample(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token from each distribution ``[..., V]``: ``[...]`` int64."""
    flat = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probs.shape[:-1])


def check_num_proposals(model: DominoDraft, num_proposals: int | None) -> int:
    """The number of drafts a step, by default block size - 1 as an engine serves them.

    Block size itself (the authors' loop) is possible with ``shift_label`` only. Raises
    ``ValueError`` otherwise.
    """
    config = model.config
    if num_proposals is None:
        return config.num_proposals
    most = max_proposals(config.block_size, config.shift_label, "authors")
    if not 1 <= num_proposals <= most:
        raise ValueError(
            f"num_proposals is {num_proposals}; this draft (block_size {config.block_size}, "
            f"shift_label {config.shift_label}) allows 1 to {most}."
        )
    return num_proposals


def check_pair(model: DominoDraft, target: TargetEnds) -> None:
    """Raise ``ValueError`` unless the target captures just the layers that the draft reads."""
    if target.layer_ids != list(model.config.target_layer_ids):
        raise ValueError(
            f"the target captures layers {target.layer_ids}, but the draft reads "
            f"{list(model.config.target_layer_ids)}; build Target with the draft's own ids."
        )


def rollout(
    model: DominoDraft,
    target: TargetEnds,
    hidden: Tensor,
    anchor_tokens: Tensor,
    num_proposals: int,
    *,
    use_head: bool = True,
    candidate_pool_size: int = 0,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    record: Record | None = None,
) -> Proposal:
    """Turn block hidden rows ``[M, K, D]`` into proposals (:func:`domino_kit.rollout.propose`).

    The base logits of all rows come from one product. Offset 1 is plain DFlash; every later one
    adds the head's correction from the GRU state over the anchor and all earlier proposals.
    """
    config = model.config
    start = alignment.first_row(config.shift_label)
    rows = hidden[:, start : start + num_proposals]
    base = target.logits(rows)
    head = None
    if use_head and config.has_head:
        head = Head(target.embed, model.prefix_gru, model.embed_proj)
    probs: list[Tensor] = []

    def draw(logits: Tensor) -> Tensor:
        assert sampling is not None
        probs.append(sampling.probabilities(logits))
        return sample(probs[-1], generator)

    sampled = sampling is not None and not sampling.greedy and sampling.proposals == "sampled"
    tokens = propose(
        base, rows, anchor_tokens, head,
        pool_size=candidate_pool_size, choose=draw if sampled else None, record=record,
    )  # fmt: skip
    if record is not None:
        record |= {"hidden": hidden, "base_logits": base, "proposals": tokens}
    return Proposal(tokens, torch.stack(probs, 1) if sampled else None)


def draft(
    model: DominoDraft,
    target: TargetEnds,
    anchor_tokens: Tensor,
    anchors: Tensor,
    cache: DraftCache,
    num_proposals: int,
    *,
    use_head: bool = True,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    record: Record | None = None,
) -> Proposal:
    """Propose tokens after ``anchor_tokens [B]`` at positions ``anchors [B]``.

    ``cache`` holds the context of all positions before the anchors; it is only read.
    """
    config = model.config
    block = alignment.block_inputs(anchor_tokens, config.block_size, config.mask_token_id)
    length = int(anchors.max())
    context_positions = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
    embeds, positions = target.embed(block), alignment.block_positions(anchors, config.block_size)
    context = cache.read(length)
    visible = alignment.visibility(anchors[:, None], context_positions, config.block_size)
    hidden = model.block_hidden(embeds, positions, context, visible)
    if record is not None:
        record |= {"anchor": anchors, "block_ids": block, "block_positions": positions}
        record |= {"block_embeds": embeds, **context_record(context)}
    return rollout(
        model, target, hidden, anchor_tokens, num_proposals,
        use_head=use_head, sampling=sampling, generator=generator, record=record,
    )  # fmt: skip


def verify(
    target: Target, anchor_tokens: Tensor, anchors: Tensor, proposals: Tensor, cache: SlotCache
) -> tuple[Tensor, TargetPass, Tensor]:
    """The target's view of anchor and proposals: logits ``[B, n+1, V]``, the pass, its positions.

    ``logits[:, i]`` predicts the token after the anchor and the first ``i`` proposals.
    """
    tokens = torch.cat([anchor_tokens[:, None], proposals], dim=1)
    positions = alignment.block_positions(anchors, tokens.shape[1])
    outcome = target.step(tokens, positions, cache)
    return target.logits(outcome.hidden), outcome, positions


def accept(
    proposal: Proposal,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """How many leading proposals stand, ``[B]``, and the bonus token after them, ``[B]``.

    Greedy: a proposal stands if it is the target's argmax. Sampled, with target distribution p
    and draft distribution q (all mass on the proposal if it was proposed greedily): it stands
    with probability ``min(1, p / q)``; at the first rejection the bonus token is drawn from
    ``max(p - q, 0)``, normalised; after the last proposal from p. This keeps p exactly
    (Leviathan et al., arXiv:2211.17192, theorem 1).
    """
    tokens = proposal.tokens
    if sampling.greedy:
        best = logits.argmax(-1)
        accepted = (tokens == best[:, :-1]).long().cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None])[:, 0]
    p = sampling.probabilities(logits)
    if proposal.probs is None:
        q = torch.zeros_like(p[:, :-1]).scatter_(2, tokens[:, :, None], 1.0)
    else:
        q = proposal.probs
    p_token = p[:, :-1].gather(2, tokens[:, :, None])[:, :, 0]
    q_token = q.gather(2, tokens[:, :, None])[:, :, 0]
    draw = torch.rand(tokens.shape, device=tokens.device, generator=generator)
    stands = draw * q_token < p_token
    accepted = stands.long().cumprod(1).sum(1)
    rows = torch.arange(len(tokens), device=tokens.device)
    q = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    own = p[rows, accepted]
    residual = (own - q[rows, accepted]).clamp(min=0)
    # Rounding alone can reject where q >= p everywhere; p is then the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, own)
    return accepted, sample(residual, generator)


@dataclass
class _Batch:
    """What the decoder carries from step to step, for the answers still being written."""

    answers: list[Answer]
    anchor_tokens: Tensor
    anchors: Tensor
    cache: SlotCache
    draft_cache: DraftCache | None

    def keep(self, places: list[int]) -> None:
        """Drop finished answers from the batch."""
        if len(places) == len(self.answers):
            return
        rows = torch.tensor(places, dtype=torch.long, device=self.anchors.device)
        self.answers = [self.answers[place] for place in places]
        self.anchor_tokens, self.anchors = self.anchor_tokens[rows], self.anchors[rows]
        self.cache.select(rows)
        if self.draft_cache is not None:
            self.draft_cache.select(rows)


def prefill(
    target: Target, prompts: list[list[int]], capacity: int
) -> tuple[SlotCache, TargetPass, Tensor, Tensor]:
    """Run right-padded prompts: cache, pass, positions ``[B, S]``, next-token logits ``[B, V]``."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    width = int(lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=target.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=target.device)
    positions = torch.arange(width, device=target.device).expand(len(prompts), -1)
    cache = target.new_cache(capacity)
    outcome = target.step(ids, positions, cache)
    rows = torch.arange(len(prompts), device=target.device)
    return cache, outcome, positions, target.logits(outcome.hidden[rows, lengths - 1])


@torch.no_grad()
def generate(
    target: Target,
    model: DominoDraft | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    end_tokens: list[int],
    *,
    num_proposals: int | None = None,
    use_head: bool = True,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    trace: list[Record] | None = None,
) -> list[Answer]:
    """Answer a batch of prompts of any lengths; the reference decoder.

    ``model`` ``None`` decodes plainly, one token a step. Answers end with an end token, which is
    kept, or after ``max_new_tokens``. Greedy answers equal the target's own. ``trace`` takes the
    record of every step of a single prompt. Raises ``ValueError`` for an empty prompt and for
    numbers out of range.
    """
    sampling = sampling or Sampling()
    n = _check_request(target, model, prompts, max_new_tokens, num_proposals)
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens + n
    cache, outcome, positions, logits = prefill(target, prompts, capacity)
    draft_cache = None if model is None else DraftCache(len(model.layers), capacity)
    nothing = Proposal(torch.empty(len(prompts), 0, dtype=torch.long, device=target.device))
    _, first = accept(nothing, logits[:, None], sampling, generator)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    answers = [Answer() for _ in prompts]
    batch = _Batch(list(answers), first, lengths, cache, draft_cache)
    unfinished = [
        place
        for place, token in enumerate(first.tolist())
        if not _commit(answers[place], [token], max_new_tokens, end_tokens)
    ]
    assert trace is None or len(prompts) == 1, "one prompt is traced at a time"
    while unfinished:
        record: Record | None = None if trace is None else {"positions": positions}
        if model is not None and batch.draft_cache is not None:
            context = model.context_kv(outcome.features, positions, record)
            batch.draft_cache.write(context, positions)
        batch.keep(unfinished)
        proposal = Proposal(nothing.tokens[: len(batch.answers)])
        if model is not None and batch.draft_cache is not None:
            proposal = draft(
                model, target, batch.anchor_tokens, batch.anchors, batch.draft_cache, n,
                use_head=use_head, sampling=sampling, generator=generator, record=record,
            )  # fmt: skip
        logits, outcome, positions = verify(
            target, batch.anchor_tokens, batch.anchors, proposal.tokens, batch.cache
        )
        accepted, bonus = accept(proposal, logits, sampling, generator)
        if trace is not None and record is not None:
            record |= {"target_argmax": logits.argmax(-1), "accepted_run": accepted[:, None]}
            trace.append(pick(record, 0))
        batch.anchor_tokens, batch.anchors = bonus, batch.anchors + accepted + 1
        unfinished = _commit_steps(
            batch.answers, proposal.tokens, accepted, bonus, max_new_tokens, end_tokens
        )
    return answers


def _check_request(
    target: Target,
    model: DominoDraft | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    num_proposals: int | None,
) -> int:
    """Refuse what cannot be decoded; returns the number of proposals, 0 without a draft."""
    if not prompts or any(not prompt for prompt in prompts) or max_new_tokens < 1:
        raise ValueError("every prompt needs at least one token, and max_new_tokens at least 1.")
    if model is None:
        return 0
    check_pair(model, target)
    return check_num_proposals(model, num_proposals)


def _commit_steps(
    answers: list[Answer],
    proposals: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    limit: int,
    end_tokens: list[int],
) -> list[int]:
    """Append one step to every answer; returns the places of the unfinished ones."""
    unfinished = []
    for place, answer in enumerate(answers):
        run = int(accepted[place])
        step = [*proposals[place, :run].tolist(), int(bonus[place])]
        before = len(answer.tokens)
        done = _commit(answer, step, limit, end_tokens)
        answer.accepted_runs.append(min(run, len(answer.tokens) - before))
        if not done:
            unfinished.append(place)
    return unfinished


def _commit(answer: Answer, step: list[int], limit: int, end_tokens: list[int]) -> bool:
    """Append tokens up to the first end token or the limit; says whether the answer is complete."""
    kept = step[: limit - len(answer.tokens)]
    ended = next((i for i, token in enumerate(kept) if token in end_tokens), None)
    if ended is not None:
        kept = kept[: ended + 1]
    answer.tokens.extend(kept)
    return ended is not None or len(answer.tokens) >= limit
