"""A block's proposals from its hidden rows: SGLang's rollout and the toolkit's, by batch.

The roofline is the time of the base logits alone, which any rollout needs. How much of the
corrections can be spared depends on the head (`domino_kit/rollout.py`): random weights are the
worst case, where all are computed; `--draft` adds the head and hidden rows of a trained draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from measure import Row, measure, show, write_rows
from torch import Tensor, nn
from trained import trained_pair

from domino_kit.alignment import first_row
from domino_kit.products import product
from domino_kit.replay import block_rows, project
from domino_kit.rollout import Head, input_table, propose

SIZES = {"V": 151_936, "D": 1024, "G": 1024, "E": 256, "K": 16}
QUICK_SIZES = {"V": 211, "D": 24, "G": 12, "E": 10, "K": 4}
BASE_SPREAD, CORRECTION_SPREAD = 3.4, 1.8
"""Standard deviations over the vocabulary, as in the demo's draft."""


@dataclass(frozen=True)
class Case:
    """A head, and hidden rows ``[B, K, D]`` with their anchor tokens ``[B]``."""

    name: str
    embedding: nn.Embedding
    output: Tensor
    gru: nn.GRU
    projector: nn.Sequential
    hidden: Tensor
    anchors: Tensor
    shift_label: bool = True

    def first(self, batch: int) -> "Case":
        """The first ``batch`` requests."""
        return replace(self, hidden=self.hidden[:batch], anchors=self.anchors[:batch])

    @property
    def rows(self) -> Tensor:
        """The rows that propose, ``[B, K-1, D]``."""
        start = first_row(self.shift_label)
        return self.hidden[:, start : start + self.hidden.shape[1] - 1]

    def ours(self, pool: int, table: Tensor | None = None) -> Tensor:
        """The toolkit's proposals ``[B, K-1]``."""
        head = Head(self.embedding, self.gru, self.projector, table=table)
        base = product(self.rows, self.output)
        return propose(base, self.rows, self.anchors, head, pool_size=pool)

    def sglangs(self, rollout: Callable[..., Tensor], pool: int) -> Tensor:
        """SGLang's proposals ``[B, K-1]``."""
        return rollout(
            draft_hidden=self.hidden, bonus_tokens=self.anchors, target_embedding=self.embedding,
            lm_head_weight=self.output, prefix_gru=self.gru, embed_proj=self.projector,
            vocab_size=self.output.shape[0], shift_label=self.shift_label,
            candidate_pool_size=pool, in_cuda_graph=False,
        )  # fmt: skip


def random_case(sizes: dict[str, int], batch: int) -> Case:
    """Random weights of which base logits and corrections have a trained draft's spread."""
    draw = torch.Generator().manual_seed(0)
    vocab, size, state, rank = (sizes[name] for name in "VDGE")

    def normal(*shape: int, scale: float) -> nn.Parameter:
        values = torch.empty(shape).normal_(0, scale, generator=draw)
        return nn.Parameter(values, requires_grad=False)

    output = normal(vocab, size, scale=BASE_SPREAD * size**-0.5)
    gru = nn.GRU(size, state, batch_first=True, bias=False).requires_grad_(False)
    projector = nn.Sequential(
        nn.Linear(size + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab, bias=False)
    ).requires_grad_(False)
    for weight in (gru.weight_ih_l0, gru.weight_hh_l0):
        weight.uniform_(-(state**-0.5), state**-0.5, generator=draw)
    projector[0].weight = normal(rank, size + state, scale=size**-0.5)
    projector[2].weight = normal(vocab, rank, scale=CORRECTION_SPREAD / 0.6 * rank**-0.5)
    return Case(
        "random", nn.Embedding(vocab, size, _weight=output), output, gru, projector,
        normal(batch, sizes["K"], size, scale=1.0),
        torch.randint(vocab, (batch,), generator=draw),
    )  # fmt: skip


@torch.no_grad()
def trained_case(folder: str, source: str, batch: int) -> Case:
    """A trained draft's head, and its blocks after the last tokens of prompts."""
    target, model, prompts = trained_pair(folder, source, batch)
    hidden, anchors = [], []
    for place in range(batch):
        ids = prompts[place % len(prompts)]
        tokens = torch.tensor([ids])
        features = target.encode(tokens, torch.ones_like(tokens)).features
        last = torch.tensor([[len(ids) - 1 - place // len(prompts)]])
        hidden.append(block_rows(target, model, project(model, features), tokens, last)[0])
        anchors.append(tokens[0, last[0]])
    return Case(
        "trained", target.embedding, target.head.weight, model.prefix_gru, model.embed_proj,
        torch.cat(hidden), torch.cat(anchors), model.config.shift_label,
    )  # fmt: skip


def sglang_rollout() -> Callable[..., Tensor] | None:
    """SGLang's function, if it is installed."""
    try:
        from sglang.srt.speculative.domino_utils import domino_greedy_rollout
    except ImportError:
        return None
    return domino_greedy_rollout


@torch.no_grad()
def measured(case: Case, pool: int, repeats: int, table: Tensor | None) -> list[Row]:
    """Rows of one batch; all variants must propose the same tokens."""
    variants: dict[str, Callable[[], Any]] = {
        "base logits": lambda: product(case.rows, case.output)
    }
    upstream = sglang_rollout()
    if upstream is not None:
        variants["sglang"] = lambda: case.sglangs(upstream, pool)
    variants["ours"] = lambda: case.ours(pool)
    if table is not None:
        variants["ours, table"] = lambda: case.ours(pool, table)
    proposals = [call().tolist() for name, call in variants.items() if name != "base logits"]
    assert all(each == proposals[0] for each in proposals), "the proposals are not the same"
    vocab, size = case.output.shape
    shape = {
        "weights": case.name, "B": case.hidden.shape[0], "K": case.hidden.shape[1], "V": vocab,
        "D": size, "G": case.gru.hidden_size, "E": case.projector[2].in_features, "pool": pool,
    }  # fmt: skip
    base, *rows = measure(shape, variants, repeats)
    return [replace(row, roofline_seconds=base.seconds) for row in rows]


@click.command()
@click.option("--batches", default="1,2,4,8,16,32", show_default=True)
@click.option("--pools", default="0", show_default=True, help="Candidate pools; 0 is exact.")
@click.option("--draft", help="A trained draft to measure too, such as runs/demo/domino.")
@click.option("--prompts", default="eval/prompts/demo_heldout.jsonl", show_default=True,
              help="For --draft.")  # fmt: skip
@click.option("--table", is_flag=True, help="Also with the GRU's inputs precomputed (V * 3G).")
@click.option("--repeats", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that it runs.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    batches: str, pools: str, draft: str | None, prompts: str, table: bool, repeats: int,
    quick: bool, output: Path | None,
) -> None:  # fmt: skip
    """Measure and print one table."""
    sizes, repeats = (QUICK_SIZES, 1) if quick else (SIZES, repeats)
    counts = [int(each) for each in batches.split(",")]
    cases = [random_case(sizes, max(counts))]
    if draft is not None:
        cases.append(trained_case(draft, prompts, max(counts)))
    rows: list[Row] = []
    for case in cases:
        known = input_table(case.embedding.weight, case.gru) if table else None
        for pool in map(int, pools.split(",")):
            for count in counts:
                rows += measured(case.first(count), pool, repeats, known)
    show("a block's proposals from its hidden rows", rows, baseline="sglang")
    write_rows(output, rows)


if __name__ == "__main__":
    main()
