"""Replay against decoding the same prompts: seconds, the same accepted runs asserted.

Both start from the target's own greedy answers, which replay is given; making them costs plain
decoding once, and is no part of either time. No replay can be faster than the target's passes over
the texts, which are timed alone too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from measure import Row, measure, show, write_rows
from trained import Pair, trained_pair

from domino_kit.acceptance import Acceptance
from domino_kit.config import DraftConfig
from domino_kit.decoding import generate
from domino_kit.modeling import DominoDraft, init_weights
from domino_kit.replay import KnownAnswer, read_texts, replay
from domino_kit.target import Target

Runs = list[list[int]]


def quick_pair(limit: int) -> Pair:
    """A tiny random target and draft with prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 12, "max_position_embeddings": 512,
    }  # fmt: skip
    config = LlamaConfig(num_hidden_layers=3, initializer_range=0.2, eos_token_id=None,
                         bos_token_id=None, **sizes)  # fmt: skip
    model = DominoDraft(
        DraftConfig(
            **sizes, num_hidden_layers=1, rms_norm_eps=1e-6, rope_theta=1e4, block_size=4,
            num_target_layers=3, target_layer_ids=(0, 1), mask_token_id=1, projector_type="domino",
            shift_label=True, gru_hidden_dim=12, emb_dim=10,
        )
    )  # fmt: skip
    init_weights(model, torch.Generator().manual_seed(0))
    prompts = torch.randint(2, 12, (limit, 6)).tolist()
    return Target(LlamaForCausalLM(config), [0, 1]), model.eval(), prompts


def decoded(pair: Pair, tokens: int, at_once: int) -> Runs:
    """Accepted runs of decoding ``at_once`` prompts in a batch."""
    target, model, prompts = pair
    runs = []
    for start in range(0, len(prompts), at_once):
        part = prompts[start : start + at_once]
        runs += [each.accepted_runs for each in generate(target, model, part, tokens, [])]
    return runs


def measured(pair: Pair, tokens: int, batches: list[int], repeats: int) -> list[Row]:
    """Rows of replay and of decoding by batch size; all of them must accept the same runs."""
    target, model, prompts = pair
    answers = [
        answer.tokens
        for start in range(0, len(prompts), 8)
        for answer in generate(target, None, prompts[start : start + 8], tokens, [])
    ]
    texts = [KnownAnswer(p, a) for p, a in zip(prompts, answers, strict=True)]
    found: dict[str, Runs] = {}

    def keeping(name: str, call: Callable[[], Runs]) -> Callable[[], None]:
        def run() -> None:
            found[name] = call()

        return run

    variants = {
        f"decode, {count} at once": keeping(
            f"decode, {count} at once", lambda count=count: decoded(pair, tokens, count)
        )
        for count in batches
    }
    variants["replay"] = keeping("replay", lambda: replay(target, model, texts))
    variants["of it, the target's passes"] = lambda: read_texts(target, model, texts)
    config, text = model.config, target.text_config
    shape = {
        "texts": len(texts), "prompt": max(map(len, prompts)), "answer": tokens,
        "target layers": text.num_hidden_layers, "D": config.hidden_size, "V": target.vocab_size,
        "draft layers": config.num_hidden_layers, "K": config.block_size,
    }  # fmt: skip
    rows = measure(shape, variants, repeats, count_first=True)
    assert all(runs == found["replay"] for runs in found.values()), "the runs are not the same"
    steps = [run for runs in found["replay"] for run in runs]
    accepted = Acceptance.of(steps, config.num_proposals).accept_length
    total = sum(map(len, answers))
    for row in rows:
        row.more = {"ms a token": 1e3 * row.seconds / total, "accept": accepted}
    return rows


@click.command()
@click.option("--draft", default="runs/demo/domino", show_default=True, help="A trained draft.")
@click.option("--prompts", default="eval/prompts/demo_heldout.jsonl", show_default=True)
@click.option("--block", "blocks", type=int, multiple=True,
              help="Another block size than the draft's; may be given several times.")  # fmt: skip
@click.option("--limit", default=24, show_default=True, help="Prompts.")
@click.option("--tokens", default=96, show_default=True, help="Of each answer.")
@click.option("--batches", default="1,8", show_default=True, help="Prompts decoded at once.")
@click.option("--repeats", default=2, show_default=True)
@click.option("--quick", is_flag=True, help="A tiny random pair, to see that it runs.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    draft: str, prompts: str, blocks: tuple[int, ...], limit: int, tokens: int, batches: str,
    repeats: int, quick: bool, output: Path | None,
) -> None:  # fmt: skip
    """Measure and print one table.

    A draft's weights do not depend on its block: another one shows the cost, not what a draft
    trained for it would accept.
    """
    try:
        pair = quick_pair(3) if quick else trained_pair(draft, prompts, limit)
    except ValueError as error:
        raise click.ClickException(f"{error} `make demo` trains {draft!r}.") from None
    counts = [int(each) for each in batches.split(",")]
    model = pair[1]
    rows: list[Row] = []
    for block in blocks or (model.config.block_size,):
        model.config = model.config.model_copy(update={"block_size": block})
        rows += measured(pair, 8 if quick else tokens, counts, 1 if quick else repeats)
    show("accepted runs of the same prompts", rows, baseline=rows[0].variant)
    write_rows(output, rows)


if __name__ == "__main__":
    main()
