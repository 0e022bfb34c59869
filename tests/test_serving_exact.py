"""A real SGLang server with tiny targets: greedy tokens and accepted runs are those of replay."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from domino_kit.eval.served import ask_all
from tests.serving import assert_served, expected, prompts_for, serving, trained_pair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}

# Both label modes, blocks 4, 8 and 16, one and three layers, both families, tied and untied heads.
SHAPES: list[dict[str, Any]] = [
    {"family": "llama", "tied": True, "shift_label": True, "block_size": 4, "layers": 1},
    {"family": "qwen3", "tied": False, "shift_label": False, "block_size": 8, "layers": 3},
    {"family": "qwen3", "tied": True, "shift_label": True, "block_size": 16, "layers": 1},
    {"family": "llama", "tied": False, "shift_label": False, "block_size": 4, "layers": 3},
    {
        "family": "qwen3",
        "tied": False,
        "shift_label": False,
        "block_size": 8,
        "layers": 1,
        "projector": "none",
    },
]


def _name(shape: dict[str, Any]) -> str:
    return "-".join(str(value) for value in shape.values())


@pytest.mark.parametrize("shape", SHAPES, ids=_name)
def test_served_equals_replay(tmp_path: Path, shape: dict[str, Any]) -> None:
    pair = trained_pair(tmp_path, **shape)
    prompts = prompts_for(pair, 24)
    wanted = expected(pair, prompts, 40)
    runs = [run for each in wanted.runs for run in each]
    assert sum(runs) / len(runs) > 0.3, "the draft accepts too little for a meaningful comparison"
    with serving(pair) as server:
        for concurrency in (1, 8):
            answers, _ = ask_all(server.url, prompts, GREEDY, concurrency)
            assert_served(answers, wanted, shape["block_size"] - 1)


def test_served_equals_replay_with_pages_chunks_and_little_memory(tmp_path: Path) -> None:
    """Pages of 16, prompts prefilled in pieces, and too few slots, so that requests are retracted."""
    pair = trained_pair(tmp_path, block_size=8)
    prompts = prompts_for(pair, 24, longest=60)
    wanted = expected(pair, prompts, 160, [3])
    flags = [
        "--page-size", "16", "--chunked-prefill-size", "16", "--max-total-tokens", "640",
        "--schedule-conservativeness", "0.01",  # let in more requests than there is room for
    ]  # fmt: skip
    # With ignore_eos the scheduler would reserve room for whole answers.
    long = {"temperature": 0, "max_new_tokens": 160}
    with serving(pair, *flags) as server:
        answers, _ = ask_all(server.url, prompts, long, 24)
        assert [answer.tokens for answer in answers] == wanted.tokens
        assert any(answer.prefills > 1 for answer in answers), "nothing was retracted"
        whole = [place for place, answer in enumerate(answers) if answer.prefills == 1]
        assert whole
        for place in whole:
            assert_served([answers[place]], wanted.only(place), 7)
        # Afterwards, one at a time, with everything in the prefix cache.
        again, _ = ask_all(server.url, prompts[:8], long, 1)
        assert_served(again, wanted, 7)
