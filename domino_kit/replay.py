"""Replay: the runs that greedy decoding would produce, from one target pass over a known answer.

The text must be the target's own greedy answer. Its features then equal those that decoding would
see, and every draft can be held against the token that is known to follow: a run ends at its first
wrong proposal, so the head may be fed the known tokens, and nothing after the wrong one is
computed. The accepted run at every step is that of the decode loop, far faster.

For each token of an answer this costs one row of the target without its output head; for each
verify step K rows of the backbone, and as many rows of the output head and of the projector as it
makes tokens, where enough texts are replayed together. With few texts more rows are computed than
are needed, since a product of few rows takes as long: all K-1 of a step, and steps never taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_kit import alignment
from domino_kit.acceptance import chain_walk
from domino_kit.decoding import check_num_proposals, check_pair, rollout
from domino_kit.modeling import DominoDraft, KeyValue
from domino_kit.products import add_product
from domino_kit.target import Target, TargetEnds
from domino_kit.trace import Record

PASS_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens of a target pass, padding included: enough to fill the machine, few enough for its caches."""

CHUNK_ANCHORS = {"cpu": 32, "cuda": 256}
"""Anchors drafted from at once: where reading a weight costs no more than multiplying with it."""

PRODUCT_ROWS = {"cpu": 96, "cuda": 1024}
"""Rows of a product with the vocabulary, where enough are known: fewer wait for its weights."""


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt and the target's own greedy answer to it, as token ids."""

    prompt: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        """The whole text."""
        return self.prompt + self.answer


@torch.no_grad()
def replay(
    target: Target,
    model: DominoDraft,
    texts: list[KnownAnswer],
    *,
    num_proposals: int | None = None,
    use_head: bool = True,
    batch_size: int = 32,
    chunk_anchors: int | None = None,
) -> list[list[int]]:
    """Accepted runs of every text, one number a verify step.

    ``batch_size`` texts are replayed together, of similar length; of each, the draft's keys and
    values of the whole text are kept meanwhile. ``chunk_anchors`` blocks are drafted at once.
    """
    check_pair(model, target)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place].tokens))
    runs: list[list[int]] = [[] for _ in texts]
    for start in range(0, len(texts), batch_size):
        places = order[start : start + batch_size]
        part = [texts[place] for place in places]
        contexts = read_texts(target, model, part)
        found = walk(
            target, model, part, contexts,
            num_proposals=num_proposals, use_head=use_head, chunk_anchors=chunk_anchors,
        )  # fmt: skip
        for place, each in zip(places, found, strict=True):
            runs[place] = each
    return runs


@torch.no_grad()
def read_texts(
    target: Target, model: DominoDraft, texts: list[KnownAnswer]
) -> list[list[KeyValue]]:
    """Every text's keys and values, from target passes over texts of increasing length."""
    found: list[list[KeyValue]] = []
    while len(found) < len(texts):
        rest = texts[len(found) :]
        budget = PASS_TOKENS.get(target.device.type, PASS_TOKENS["cuda"])
        count = 1
        while count < len(rest) and (count + 1) * len(rest[count].tokens) <= budget:
            count += 1
        ids = [torch.tensor(text.tokens) for text in rest[:count]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        features = target.encode(padded.to(target.device), mask.to(target.device)).features
        found += [
            project(model, features[row : row + 1, :length])
            for row, length in enumerate(lengths.tolist())
        ]
    return found


def project(model: DominoDraft, features: Tensor) -> list[KeyValue]:
    """The draft's keys and values of a text from its ``features [1, S, layers*D]``."""
    positions = torch.arange(features.shape[1], device=features.device)[None]
    return model.context_kv(features, positions)


@dataclass
class _Batch:
    """Texts on their way: rows of ``tokens [B, S]`` and of each layer's keys and values belong to
    the texts ``places``; ``anchors [B]`` are where they have got, ``ends [B]`` their last tokens."""

    places: list[int]
    tokens: Tensor
    context: list[KeyValue]
    anchors: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, texts: Sequence[KnownAnswer], contexts: Sequence[list[KeyValue]], device: torch.device
    ) -> "_Batch":
        """All texts that take a step, at their first answer token, padded on the right."""
        places = [place for place, text in enumerate(texts) if len(text.answer) > 1]
        rows = [torch.tensor(texts[place].tokens) for place in places] or [torch.empty(0)]
        width = max(map(len, rows))

        def padded(layer: int, part: int) -> Tensor:
            each = [contexts[place][layer][part] for place in places]
            return torch.cat([F.pad(x, (0, 0, 0, width - x.shape[2])) for x in each])

        layers = range(len(contexts[places[0]])) if places else ()
        return cls(
            places,
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device),
            [(padded(layer, 0), padded(layer, 1)) for layer in layers],
            torch.tensor([len(texts[place].prompt) for place in places], device=device),
            torch.tensor([len(texts[place].tokens) - 1 for place in places], device=device),
        )

    def keep(self, unfinished: Tensor) -> None:
        """Drop texts that are done, ``unfinished [B]`` bool."""
        if bool(unfinished.all()):
            return
        rows = unfinished.nonzero()[:, 0]
        self.places = [self.places[row] for row in rows.tolist()]
        self.tokens, self.anchors, self.ends = (
            each[rows] for each in (self.tokens, self.anchors, self.ends)
        )
        self.context = [(keys[rows], values[rows]) for keys, values in self.context]


@torch.no_grad()
def walk(
    target: TargetEnds,
    model: DominoDraft,
    texts: Sequence[KnownAnswer],
    contexts: Sequence[list[KeyValue]],
    *,
    num_proposals: int | None = None,
    use_head: bool = True,
    chunk_anchors: int | None = None,
) -> list[list[int]]:
    """Accepted runs of texts whose projected contexts (:func:`project`) are known.

    All texts advance together. Each pass drafts from a window of every text's next anchors, one
    anchor with many texts; the walk then jumps by run + 1 within the window and beyond it.
    """
    n = check_num_proposals(model, num_proposals)
    budget = chunk_anchors or CHUNK_ANCHORS.get(target.device.type, CHUNK_ANCHORS["cuda"])
    runs: list[list[int]] = [[] for _ in texts]
    batch = _Batch.of(texts, contexts, target.device)
    while batch.places:
        window = max(1, budget // len(batch.places))
        anchors = batch.anchors[:, None] + torch.arange(window, device=target.device)
        anchors = torch.minimum(anchors, batch.ends[:, None] - 1)
        hidden = block_rows(target, model, batch.context, batch.tokens, anchors)
        found = known_runs(target, model, hidden, batch.tokens, anchors, batch.ends, n, use_head)
        jumps = []
        left = (batch.ends - batch.anchors).tolist()
        for place, possible, rest in zip(batch.places, found.tolist(), left, strict=True):
            taken = chain_walk(possible[:rest])
            runs[place] += taken
            jumps.append(sum(taken) + len(taken))
        batch.anchors = batch.anchors + torch.tensor(jumps, device=target.device)
        batch.keep(batch.anchors < batch.ends)
    return runs


def known_runs(
    target: TargetEnds,
    model: DominoDraft,
    hidden: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    ends: Tensor,
    num_proposals: int,
    use_head: bool,
) -> Tensor:
    """How many leading proposals are the known tokens, ``[B, N]`` for ``anchors [B, N]``.

    ``hidden [B, N, K, D]`` are the blocks' rows, ``tokens [B, S]`` the texts, ``ends [B]`` their
    last positions: proposals beyond never count. Some offsets at a time, so that products have
    rows enough; blocks that were wrong once are left out.
    """
    n = num_proposals
    start = alignment.first_row(model.config.shift_label)
    rows = hidden[:, :, start : start + n].flatten(0, 1)
    offsets = torch.arange(n + 1, device=tokens.device)
    index = torch.minimum(anchors[:, :, None] + offsets, ends[:, None, None])
    truth = tokens.gather(1, index.flatten(1)).view(-1, n + 1)
    known = (ends[:, None] - anchors).flatten().clamp(max=n)
    runs, alive = torch.zeros_like(known), torch.arange(len(known), device=tokens.device)
    most = PRODUCT_ROWS.get(tokens.device.type, PRODUCT_ROWS["cuda"])
    state, done = None, 0
    while len(alive):
        span = min(n - done, max(1, most // len(alive)))
        part = slice(done, done + span)
        embeds = target.embed(truth[alive, part]) if use_head and model.config.has_head else None
        best, state = _best_tokens(target, model, rows[alive, part], embeds, state, done)
        right = best == truth[alive, done + 1 : done + span + 1]
        runs[alive] += right.cumprod(1).sum(1)
        done += span
        going = (runs[alive] == done) & (known[alive] > done)
        alive, state = alive[going], None if state is None else state[going]
    return torch.minimum(runs, known).view_as(anchors)


def _best_tokens(
    target: TargetEnds,
    model: DominoDraft,
    rows: Tensor,
    embeds: Tensor | None,
    state: Tensor | None,
    done: int,
) -> tuple[Tensor, Tensor | None]:
    """Proposals ``[A, T]`` of hidden ``rows [A, T, D]`` at the offsets after ``done``.

    ``embeds [A, T, D]`` are the known tokens before them, ``None`` for the base logits alone;
    ``state [A, G]`` is the head's so far, returned as it is after them.
    """
    logits = target.logits(rows).flatten(0, 1)
    if embeds is not None:
        states = model.head_states(embeds, state)
        state = states[:, -1]
        plain = max(0, model.config.pure_draft_prefix_len - done)
        low_rank = model.head_hidden(rows, states)
        low_rank[:, :plain] = 0  # what leaves these offsets uncorrected
        logits = add_product(logits, low_rank.flatten(0, 1), model.vocab_projection)
    return logits.argmax(-1).view(rows.shape[:2]), state


def block_rows(
    target: TargetEnds,
    model: DominoDraft,
    context: Sequence[KeyValue],
    tokens: Tensor,
    anchors: Tensor,
    record: Record | None = None,
) -> Tensor:
    """Hidden rows ``[B, N, K, D]`` of the blocks at ``anchors [B, N]`` of texts ``tokens [B, S]``.

    ``context`` holds each layer's keys and values of the whole texts, ``[B, kv_heads, S, head_dim]``.
    A ``record`` takes the blocks of a single text.
    """
    config, block_size = model.config, model.config.block_size
    block = alignment.block_inputs(tokens.gather(1, anchors), block_size, config.mask_token_id)
    embeds, positions = target.embed(block), alignment.block_positions(anchors, block_size)
    seen = int(anchors.max())
    context_positions = torch.arange(seen, device=anchors.device).expand(len(anchors), -1)
    hidden = model.block_hidden(
        embeds.flatten(1, 2),
        positions.flatten(1),
        [(keys[:, :, :seen], values[:, :, :seen]) for keys, values in context],
        alignment.visibility(anchors, context_positions, block_size),
    )
    if record is not None:
        record |= {"block_ids": block[0], "block_positions": positions[0]}
        record |= {"block_embeds": embeds[0]}
    return hidden.view(*anchors.shape, block_size, -1)


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
    """Free-running proposals ``[N, n]`` after the ``anchors [N]`` of one text ``tokens [S]``."""
    hidden = block_rows(target, model, context, tokens[None], anchors[None], record)[0]
    return rollout(
        model, target, hidden, tokens[anchors], num_proposals, use_head=use_head, record=record
    ).tokens
