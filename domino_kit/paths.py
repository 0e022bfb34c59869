"""The stage traces of the paths that draft by themselves: decode and replay."""

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_kit.acceptance import leading_run
from domino_kit.decoding import Answer, generate
from domino_kit.modeling import DominoDraft
from domino_kit.replay import propose_at
from domino_kit.target import Target, TargetEnds
from domino_kit.trace import Record, Step, assemble, context_record, pick


def decode_steps(
    target: Target,
    model: DominoDraft,
    name: str,
    prompt: list[int],
    max_new_tokens: int,
    end_tokens: list[int],
) -> tuple[Answer, list[Step]]:
    """Decode one prompt greedily with every step traced; ``name`` is the prompt's."""
    records: list[Record] = []
    (answer,) = generate(target, model, [prompt], max_new_tokens, end_tokens, trace=records)
    return answer, assemble(name, [*prompt, *answer.tokens], records)


@torch.no_grad()
def replay_steps(
    target: Target,
    model: DominoDraft,
    name: str,
    prompt: list[int],
    answer: list[int],
    anchors: Sequence[int],
) -> list[Step]:
    """Replay's steps at chosen ``anchors`` (positions, increasing) of a known greedy answer."""
    text = [*prompt, *answer]
    tokens = torch.tensor([text], device=target.device)
    features = target.encode(tokens, torch.ones_like(tokens)).features
    return feature_steps(target, model, name, text, features, anchors)


@torch.no_grad()
def feature_steps(
    target: TargetEnds,
    model: DominoDraft,
    name: str,
    text: list[int],
    features: Tensor,
    anchors: Sequence[int],
) -> list[Step]:
    """:func:`replay_steps` of a text whose ``features [1, S, layers*D]`` are known."""
    tokens = torch.tensor(text, device=target.device)
    positions = torch.arange(len(text), device=target.device)[None]
    whole: Record = {}
    context = model.context_kv(features, positions, whole)
    whole |= context_record(context)
    blocks: Record = {}
    places = torch.tensor(list(anchors), device=target.device)
    propose_at(target, model, context, tokens, places, model.config.num_proposals, record=blocks)
    steps = []
    for row, anchor in enumerate(anchors):
        values = {"text": tokens[: anchor + 1].cpu()}
        values |= {stage: each[0, :anchor] for stage, each in whole.items()}
        values |= pick(blocks, row)
        rest = text[anchor + 1 :]
        run = leading_run(values["proposals"].tolist(), rest)
        if run < len(rest) or run == model.config.num_proposals:  # else the answer's end cuts it
            values["accepted_run"] = torch.tensor([run])
        steps.append(Step(name, values))
    return steps
