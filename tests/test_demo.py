"""The demo as a user runs it: a real chat model, real training, three numbers that must hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_kit.chat_template import prompt_ids
from domino_kit.checkpoint import load_draft
from domino_kit.decoding import generate
from domino_kit.eval.prompt_set import read_prompts
from domino_kit.eval.report import disagreements
from domino_kit.eval.served import ask_all
from domino_kit.target import Target, end_token_ids, load_target_model, load_tokenizer
from tests.command import domino
from tests.serving import Pair, assert_served, expected, serving

pytestmark = [pytest.mark.slow, pytest.mark.pretrained, pytest.mark.sglang]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One full run of the demo."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    result = domino("demo", "--output", folder, timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "replay, decode and served accept the same run at every step" in " ".join(
        result.stdout.split()
    )
    assert "a chat completion, streamed through the openai client" in result.stdout
    assert "the same draft, three ways" in result.stdout
    return folder


@pytest.fixture(scope="module")
def report(demo: Path) -> dict[str, Any]:
    return json.loads((demo / "report.json").read_text())


def test_replay_and_decode_agree_at_every_step(report: dict[str, Any]) -> None:
    assert disagreements(report) == []
    assert report["lossless"] == {"checked": True, "different": []}
    assert len(report["runs"]) == 7
    assert len(report["runs"][0]["prompts"]) >= 20


def test_the_causal_head_earns_its_place(report: dict[str, Any]) -> None:
    lengths = {(run["head"], run["mode"]): run["accept_length"] for run in report["runs"]}
    for mode in ("replay", "decode"):
        assert lengths["domino", mode] > lengths["off", mode]
        assert lengths["domino", mode] > lengths["none", mode]
        assert lengths["domino", mode] > 2.0


def test_served_is_what_was_measured_offline(report: dict[str, Any]) -> None:
    """24 prompts of 96 tokens through the real engine, eight at a time."""
    own = {run["mode"]: run for run in report["runs"] if run["head"] == "domino"}
    assert set(own) == {"replay", "decode", "served"}
    assert own["served"]["uncounted_requests"] == 0
    for place, prompt in enumerate(own["served"]["prompts"]):
        assert prompt["histogram"] == own["replay"]["prompts"][place]["histogram"]
    assert report["engine"]["draft"]["head"] is True
    assert report["engine"]["draft"]["candidate_pool_size"] == 0
    assert report["engine"]["hooks_missing"] == []
    assert report["sweep"]["levels"][0]["concurrency"] == 8
    assert report["sweep"]["levels"][0]["ratio"] > 0


def test_served_alone_with_pages_chunks_and_a_warm_cache(demo: Path, demo_target: Path) -> None:
    """One at a time, in pieces of 16; then eight at a time, with every prompt in the cache."""
    pair = Pair(demo_target, demo / "domino")
    tokenizer = load_tokenizer(str(demo_target), False)
    source = str(Path(__file__).parent.parent / "eval/prompts/demo_heldout.jsonl")
    prompts = [prompt_ids(tokenizer, prompt.messages, None) for prompt in read_prompts(source, 24)]
    wanted = expected(pair, prompts, 96, [2])
    greedy = {"temperature": 0, "max_new_tokens": 96}
    flags = ("--page-size", "16", "--chunked-prefill-size", "16", "--log-level", "warning")
    with serving(pair, *flags) as server:
        for concurrency in (1, 8):
            answers, _ = ask_all(server.url, prompts, greedy, concurrency)
            assert_served(answers, wanted, 5)


def test_every_stage_is_as_trained(demo: Path, tmp_path: Path) -> None:
    """Training graph, replay, decode and a real server, in float32."""
    output = tmp_path / "check.json"
    result = domino(
        "check", "--draft", demo / "domino", "--engine", "both", "--output", output, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    print(result.stdout)
    found = json.loads(output.read_text())
    assert found["verdict"] == "as trained"
    paths = {each["path"] for each in found["stages"]}
    assert paths == {"training run", "replay", "decode", "served", "served again"}
    limits = {"features": 1e-5, "corrected_logits": 1e-4, "proposals": 0.0, "accepted_run": 0.0}
    for stage, limit in limits.items():
        differences = [each["relative"] for each in found["stages"] if each["stage"] == stage]
        assert len(differences) >= 4, stage
        assert max(differences) <= limit, (stage, differences)


def test_drafts_are_compared_at_equal_proposals_and_data(
    demo: Path, report: dict[str, Any]
) -> None:
    assert {run["num_proposals"] for run in report["runs"]} == {5}
    manifests = [load_draft(demo / name, torch.float32, "cpu")[1] for name in ("domino", "dflash")]
    domino_manifest, dflash_manifest = manifests
    assert domino_manifest is not None
    assert dflash_manifest is not None
    assert domino_manifest.data == dflash_manifest.data
    for key in ("steps_done", "steps_planned"):
        assert domino_manifest.training[key] == dflash_manifest.training[key]
    assert domino_manifest.recipe["train"] == dflash_manifest.recipe["train"]


def test_answers_are_those_of_transformers(
    demo: Path, demo_target: Path, report: dict[str, Any]
) -> None:
    """20 prompts, 128 tokens: the reference decoder with the trained draft, and its oracle."""
    model = load_target_model(str(demo_target), torch.float32, "cpu", False)
    tokenizer = load_tokenizer(str(demo_target), False)
    prompts = read_prompts(
        str(Path(__file__).parent.parent / "eval/prompts/demo_heldout.jsonl"), 20
    )
    ids = [prompt_ids(tokenizer, prompt.messages, None) for prompt in prompts]
    draft, _ = load_draft(demo / "domino", torch.float32, "cpu")
    target = Target(model, list(draft.config.target_layer_ids))
    ends = end_token_ids(model, tokenizer)
    ours = [
        answer.tokens
        for start in range(0, 20, 10)
        for answer in generate(target, draft, ids[start : start + 10], 128, ends)
    ]
    width = max(map(len, ids))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    theirs = model.generate(
        padded, attention_mask=mask, max_new_tokens=128, do_sample=False, pad_token_id=0
    )
    for row, mine in zip(theirs[:, width:].tolist(), ours, strict=True):
        assert mine == row[: len(mine)]
        assert len(mine) == 128 or mine[-1] in ends


def test_everything_lies_in_the_demo_folder(demo: Path) -> None:
    assert {p.name for p in demo.iterdir()} == {"domino", "dflash", "report.json", "report.png"}


def test_a_second_run_refuses_the_same_folder(demo: Path) -> None:
    result = domino("demo", "--output", demo)
    assert result.returncode == 2
    assert "already exists" in result.stderr
