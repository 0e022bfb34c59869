"""Servers for end-to-end tests: drafts that were really trained, and what they must answer."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from domino_kit.acceptance import histogram
from domino_kit.checkpoint import load_draft
from domino_kit.decoding import generate
from domino_kit.eval.served import ServedAnswer
from domino_kit.replay import KnownAnswer, replay
from domino_kit.serve.plan import ServeOptions, free_port, plan_serve
from domino_kit.serve.server import Server
from domino_kit.target import Target, load_target_model
from domino_kit.train.dataset import Sample
from domino_kit.train.recipe import read_recipe
from domino_kit.train.run import train_run
from domino_kit.train.setup import build_run
from tests.tiny import random_prompts
from tests.tiny_chat import PLAIN, chat_rows, save_target, write_jsonl

START_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target's folder and the folder of a draft for it."""

    target: Path
    draft: Path

    def load(self) -> tuple[Target, Any]:
        """Both in float32 on the CPU."""
        draft, _ = load_draft(self.draft, torch.float32, "cpu")
        model = load_target_model(str(self.target), torch.float32, "cpu", False)
        return Target(model, list(draft.config.target_layer_ids), allow_last_layer=True), draft


def prompts_for(pair: Pair, count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    """Random prompts of bytes for a tiny target."""
    return random_prompts(count, shortest=5, longest=longest, vocab=262, seed=seed)


def trained_pair(
    folder: Path,
    *,
    family: str = "llama",
    tied: bool = True,
    shift_label: bool = True,
    block_size: int = 4,
    layers: int = 1,
    projector: str = "domino",
    steps: int = 300,
    attention: float = 0.03,
    template: str = PLAIN,
) -> Pair:
    """A tiny random target, and a draft trained for a minute's fraction on its own answers."""
    target = save_target(
        folder / "target",
        attention=attention,
        template=template,
        family=family,
        tie_word_embeddings=tied,
    )
    data = write_jsonl(folder / "rows.jsonl", chat_rows(4))
    recipe = read_recipe(
        None,
        [
            f"target.name={target}", f"data.train={data}", f"output.folder={folder / 'run'}",
            f"draft.num_layers={layers}", "draft.target_layer_ids=[0,2]",
            f"draft.block_size={block_size}", f"draft.shift_label={str(shift_label).lower()}",
            f"draft.projector={projector}", "draft.mask_token_id=1", "draft.gru_hidden_dim=24",
            "draft.emb_dim=16", f"train.steps={steps}", "train.num_anchors=24", "train.lr=1e-2",
            "train.batch_size=8",
        ],
    )  # fmt: skip
    run = build_run(recipe)
    prompts = random_prompts(32, shortest=5, longest=24, vocab=262, seed=99)
    answers = generate(run.target, None, prompts, 48, [])
    samples = [
        Sample(place, f"own-{place}", prompt + answer.tokens,
               [0] * len(prompt) + [1] * len(answer.tokens))
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip
    assert train_run(dataclasses.replace(run, samples=samples), ["test"], quiet=True)
    return Pair(target, folder / "run")


@contextmanager
def serving(
    pair: Pair, *extra: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A real server for the pair, with ``extra`` SGLang flags and environment variables."""
    options = ServeOptions(
        str(pair.draft), str(pair.target), port=free_port(), device="cpu", extra=extra
    )
    plan = plan_serve(options, {})
    variables = {**plan.environment, **(environment or {})}
    with Server(plan.command, variables, plan.host, plan.port, log=sys.stderr) as server:
        server.wait_ready(START_SECONDS)
        yield server


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a server must produce: greedy tokens, and the accepted runs of replay."""

    tokens: list[list[int]]
    runs: list[list[int]]

    def only(self, place: int) -> "Expected":
        """What one request must produce."""
        return Expected([self.tokens[place]], [self.runs[place]])


def expected(
    pair: Pair, prompts: list[list[int]], max_new_tokens: int, end_tokens: list[int] | None = None
) -> Expected:
    """Plain greedy answers and, from them, the runs of the training graph."""
    target, draft = pair.load()
    answers = [
        generate(target, None, [prompt], max_new_tokens, end_tokens or [])[0] for prompt in prompts
    ]
    known = [KnownAnswer(p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
    return Expected([answer.tokens for answer in answers], replay(target, draft, known))


def assert_served(answers: list[ServedAnswer], wanted: Expected, num_proposals: int) -> None:
    """Tokens equal, and each request's histogram equal under the rule for a cut last step."""
    for place, answer in enumerate(answers):
        assert answer.tokens == wanted.tokens[place], f"request {place}: tokens"
        runs = wanted.runs[place]
        if answer.accepted_runs is not None:
            assert answer.accepted_runs == runs, f"request {place}: runs"
        found = answer.cut_histogram(num_proposals) or engine_form(answer, runs, num_proposals)
        assert found == histogram(runs, num_proposals), f"request {place}: histogram"


def engine_form(answer: ServedAnswer, runs: list[int], num_proposals: int) -> list[int]:
    """The engine's histogram with its last step cut where replay's is: for merged streams only."""
    counts = list(answer.histogram or [])
    counts += [0] * (num_proposals + 1 - len(counts))
    if answer.surplus:
        counts[runs[-1] + answer.surplus - 1] -= 1
        counts[runs[-1]] += 1
    return counts
