"""`domino prepare` with servers: retries, kill -9, other templates, and real SGLang beside hf."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from domino_kit.cli import domino
from domino_kit.decoding import Sampling
from domino_kit.demo import TRAINING_DATA
from domino_kit.serve.plain import plan_plain
from domino_kit.serve.plan import free_port
from domino_kit.serve.server import ServerError
from domino_kit.target import load_tokenizer
from domino_kit.train import answers_served, prepare
from domino_kit.train.answers import Answer, Ask, Asking, Question
from domino_kit.train.prepare import run_prepare
from domino_kit.train.prepare_options import PrepareOptions
from tests.command import DOMINO
from tests.openai_server import answer_to
from tests.tiny_chat import save_target, write_jsonl

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model")


def command(*words: str | Path) -> Result:
    """The command in this process, where a mistake is the result's exception."""
    return CliRunner().invoke(domino, [str(word) for word in words])


@contextmanager
def openai_server(folder: Path, **plan: Any) -> Iterator[str]:
    """A running server of our own kind: its address."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    process = subprocess.Popen([sys.executable, "-m", "tests.openai_server", str(folder)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not (folder / "port").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}/v1"
    finally:
        process.kill()
        process.wait()


def requests(folder: Path) -> list[dict[str, Any]]:
    return read_rows(folder / "requests.jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts(folder: Path, count: int) -> Path:
    records = [{"id": f"p{i}", "prompt": f"say {i}"} for i in range(count)]
    return write_jsonl(folder / "prompts.jsonl", records)


def test_a_server_that_fails_twice_is_asked_again(tmp_path: Path, target: Path) -> None:
    source = prompts(tmp_path, 3)
    with openai_server(tmp_path / "server", statuses=[503, 429]) as url:
        result = command(
            "prepare", "--prompts", source, "--target", target, "--output", tmp_path / "a.jsonl",
            "--url", url, "--concurrency", "1", "--no-thinking", "--max-new-tokens", "16",
        )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    asked = requests(tmp_path / "server")
    assert [each["status"] for each in asked] == [503, 429, 200, 200, 200]
    assert asked[0]["messages"] == asked[1]["messages"] == asked[2]["messages"]
    assert asked[2]["chat_template_kwargs"] == {"enable_thinking": False}
    assert (asked[2]["temperature"], asked[2]["max_tokens"]) == (0.0, 16)
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row["messages"][-1]["content"] for row in rows] == [
        f"answer 1 to say {i}" for i in range(3)
    ]


def test_later_turns_are_asked_after_the_servers_own_answers(tmp_path: Path, target: Path) -> None:
    turns = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    source = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns}])
    with openai_server(tmp_path / "server") as url:
        run_prepare(
            PrepareOptions(output=tmp_path / "a.jsonl", prompts=str(source), target=str(target),
                           url=(url,), max_new_tokens=16, quiet=True)
        )  # fmt: skip
    last = requests(tmp_path / "server")[-1]["messages"]
    assert [turn["content"] for turn in last] == ["a", "answer 1 to a", "b", "answer 3 to b", "c"]
    assert len(read_rows(tmp_path / "a.jsonl")) == 3


def test_several_servers_share_the_work_and_one_that_is_gone_is_no_loss(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_served, "FIRST_WAIT", 0.01)
    gone = f"http://127.0.0.1:{free_port()}"
    source = prompts(tmp_path, 12)
    with openai_server(tmp_path / "one") as one, openai_server(tmp_path / "two") as two:
        run_prepare(
            PrepareOptions(output=tmp_path / "a.jsonl", prompts=str(source), target=str(target),
                           url=(one, gone, two), concurrency=3, max_new_tokens=16, quiet=True)
        )  # fmt: skip
    assert [row["id"] for row in read_rows(tmp_path / "a.jsonl")] == [f"p{i}/1" for i in range(12)]
    assert len(requests(tmp_path / "one")) >= 2
    assert len(requests(tmp_path / "two")) >= 2


def test_a_server_that_stays_broken_ends_the_run_and_what_is_done_is_kept(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_served, "FIRST_WAIT", 0.01)
    source = prompts(tmp_path, 3)
    common = ["prepare", "--prompts", source, "--target", target, "--output",
              tmp_path / "a.jsonl", "--max-new-tokens", "16", "--concurrency", "1"]  # fmt: skip
    with openai_server(tmp_path / "server", statuses=[200, 200, *[503] * 6]) as url:
        result = command(*common, "--url", url)
        assert result.exit_code == 1, result.stderr
        assert result.stderr.strip().splitlines()[-1].startswith("Error: http://127.0.0.1")
        assert "503" in result.stderr and "6 attempts" in result.stderr
        assert len(read_rows(tmp_path / "a.jsonl")) == 2
        again = command(*common, "--url", url)
    assert again.exit_code == 0, again.stderr
    assert [row["id"] for row in read_rows(tmp_path / "a.jsonl")] == ["p0/1", "p1/1", "p2/1"]


def test_a_refused_prompt_is_dropped_and_counted(tmp_path: Path, target: Path) -> None:
    with openai_server(tmp_path / "server", statuses=[200, 400]) as url:
        result = command(
            "prepare", "--prompts", prompts(tmp_path, 3), "--target", target, "--output",
            tmp_path / "a.jsonl", "--url", url, "--concurrency", "1", "--max-new-tokens", "16",
        )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "dropped: 1 engine error" in result.stderr and "400" in result.stderr
    assert [row["id"] for row in read_rows(tmp_path / "a.jsonl")] == ["p0/1", "p2/1"]


def test_a_server_that_wants_a_key_gets_the_one_in_the_environment(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, Any] = {
        "output": tmp_path / "a.jsonl", "prompts": str(prompts(tmp_path, 2)), "target": str(target),
        "max_new_tokens": 16, "quiet": True,
    }  # fmt: skip
    with openai_server(tmp_path / "server", key="secret") as url:
        for wrong in (None, "other"):
            if wrong is not None:
                monkeypatch.setenv("DOMINO_API_KEY", wrong)
            with pytest.raises(ServerError, match=r"answered 401.*check --url and DOMINO_API_KEY"):
                run_prepare(PrepareOptions(**chosen, url=(url,)))
        monkeypatch.setenv("DOMINO_API_KEY", "secret")
        run_prepare(PrepareOptions(**chosen, url=(url,)))
    assert len(read_rows(tmp_path / "a.jsonl")) == 2
    assert [each["status"] for each in requests(tmp_path / "server")][-2:] == [200, 200]
    facts = (tmp_path / "a.jsonl.meta.json").read_text()
    assert "secret" not in facts


def test_a_server_with_another_template_is_found_out(tmp_path: Path, target: Path) -> None:
    with openai_server(tmp_path / "server", wrong_count=True) as url:
        result = command(
            "prepare", "--prompts", prompts(tmp_path, 3), "--target", target, "--output",
            tmp_path / "a.jsonl", "--url", url, "--max-new-tokens", "16",
        )  # fmt: skip
    assert result.exit_code == 1
    assert "the server counts 1 tokens in a prompt" in result.stderr.strip().splitlines()[-1]


def test_kill_9_and_a_second_run_give_the_same_file(tmp_path: Path, target: Path) -> None:
    source = prompts(tmp_path, 24)
    output = tmp_path / "a.jsonl"
    with openai_server(tmp_path / "server", seconds=0.1) as url:
        common = ["prepare", "--prompts", str(source), "--target", str(target), "--url", url,
                  "--max-new-tokens", "16", "--concurrency", "3", "--output"]  # fmt: skip
        process = subprocess.Popen([DOMINO, *common, str(output)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        some = output.read_bytes().count(b"\n")
        assert 5 <= some < 24
        with output.open("ab") as file:
            file.write(b'{"id": "p7/1", "mess')  # as if the kill had come within a line
        result = command(*common, str(output))
        assert result.exit_code == 0, result.stderr
        assert "which is torn" in result.stderr
        assert f"{some} answers are there already" in result.stderr
        whole = command(*common, str(tmp_path / "b.jsonl"))
        assert whole.exit_code == 0, whole.stderr
    assert output.read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = read_rows(output)
    assert [row["id"] for row in rows] == [f"p{i}/1" for i in range(24)]
    assert all(row["messages"][-1]["content"] == answer_to(row["messages"][:-1]) for row in rows)


def test_two_runs_never_write_to_one_file(tmp_path: Path, target: Path) -> None:
    source = prompts(tmp_path, 8)
    with openai_server(tmp_path / "server", seconds=2.0) as url:
        common = ["prepare", "--prompts", str(source), "--target", str(target), "--url", url,
                  "--concurrency", "1", "--output", str(tmp_path / "a.jsonl")]  # fmt: skip
        words = [*common, "--max-new-tokens", "16"]
        process = subprocess.Popen([DOMINO, *words], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "a.jsonl.meta.json").exists():
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            said = command(*words).exception
            assert isinstance(said, ValueError)
            assert "a.jsonl is being written by another domino prepare" in str(said)
        finally:
            process.kill()
            process.wait()


def test_flags_that_do_not_fit_are_refused(tmp_path: Path, target: Path) -> None:
    pytest.importorskip("sglang")
    common = ["prepare", "--prompts", prompts(tmp_path, 1), "--target", target, "--output",
              tmp_path / "a.jsonl", "--engine", "sglang", "--device", "cpu",
              "--max-new-tokens", "8"]  # fmt: skip
    said = command(*common, "--", "--speculative-algorithm", "EAGLE").exception
    assert isinstance(said, ValueError) and "--speculative-algorithm" in str(said)
    said = command(*common, "--", "--port", "1").exception
    assert isinstance(said, ValueError) and "--port" in str(said) and "set by domino" in str(said)
    unknown = command(*common, "--no-such-flag")
    assert unknown.exit_code == 2
    assert "--no-such-flag" in unknown.stderr


def test_a_server_of_our_own_is_seeded_for_samples(tmp_path: Path, target: Path) -> None:
    pytest.importorskip("sglang")
    greedy = plan_plain(str(target), "cpu", "float32", [], {})
    assert "--random-seed" not in greedy.command
    seeded = plan_plain(str(target), "cpu", "float32", [], {}, seed=-1).command
    assert seeded[seeded.index("--random-seed") + 1] == str(2**32 - 1)
    with pytest.raises(ValueError, match=r"--random-seed.*--seed"):
        plan_plain(str(target), "cpu", "float32", ["--random-seed", "1"], {}, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_sample_is_asked_for_with_its_own_seed(target: Path, temperature: float) -> None:
    asked: list[dict[str, Any]] = []

    class Recorder:
        async def post(self, path: str, body: dict[str, Any]) -> Any:
            asked.append(body["sampling_params"])
            return {"output_ids": [3], "meta_info": {"finish_reason": {"type": "stop"}}}

    sampling = Sampling(temperature, 1.0, 0)
    asking = Asking(load_tokenizer(str(target), False), [3], sampling, 8, None)
    ask = answers_served.by_token_ids(cast(answers_served.Servers, Recorder()), asking)
    for seed in (5, 6):
        asyncio.run(cast(Any, ask(Question([], None, [10], seed))))
    seeds = [each.get("sampling_seed") for each in asked]
    assert seeds == ([None, None] if temperature == 0 else [5, 6])


# -- a real server --------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.pretrained
@pytest.mark.slow
def test_the_demo_targets_answers_are_the_same_tokens_by_both_engines(
    tmp_path: Path, demo_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty prompts, and a conversation whose second turn follows the first answer."""
    pytest.importorskip("sglang")
    turns = [{"role": "user", "content": text} for text in ("Who are you?", "Say it in one word.")]
    records = [*read_rows(TRAINING_DATA)[:50], {"id": "turns", "messages": turns}]
    source = write_jsonl(tmp_path / "prompts.jsonl", records)
    tokens: dict[str, dict[tuple[int, ...], list[int] | None]] = {"hf": {}, "sglang": {}}

    def recording(engine: str, make: Any) -> Any:
        """``make`` of ``prepare``, whose answers are noted by prompt."""

        def made(*words: Any) -> Ask:
            ask = make(*words)

            async def noted(question: Question) -> Answer:
                answer: Answer = await ask(question)
                tokens[engine][tuple(question.ids)] = answer.tokens
                return answer

            return noted

        return made

    for engine, name in (("hf", "in_process"), ("sglang", "by_token_ids")):
        monkeypatch.setattr(prepare, name, recording(engine, getattr(prepare, name)))
        run_prepare(
            PrepareOptions(output=tmp_path / f"{engine}.jsonl", prompts=str(source),
                           target=str(demo_target), engine=engine, device="cpu", dtype="float32",
                           max_new_tokens=16, quiet=True)
        )  # fmt: skip
    assert len(tokens["hf"]) == 52
    assert tokens["sglang"] == tokens["hf"]
    assert all(tokens["hf"].values())
    here, served = (
        [(row["id"], row["messages"], row["finish"]) for row in read_rows(tmp_path / name)]
        for name in ("hf.jsonl", "sglang.jsonl")
    )
    assert served == here
