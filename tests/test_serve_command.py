"""`domino serve` as a user runs it: its own processes, signals, and a scheduler that dies."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("sglang")

from domino_kit.serve.plan import free_port
from tests.command import DOMINO, domino, refused
from tests.serving import Pair, trained_pair

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("pair"), block_size=4)


def members(group: int) -> list[int]:
    """Living processes of a process group, read from /proc."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, own_group = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:3]
        except (OSError, IndexError):
            continue
        if int(own_group) == group and state != "Z":
            found.append(int(folder.name))
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@contextmanager
def serve(pair: Pair, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str], int]]:
    """A running `domino serve`: the process, its lines up to the curl line, and its port."""
    port = free_port()
    command = [DOMINO, "serve", "--draft", str(pair.draft), "--port", str(port),
               "--check-tokens", "12", *flags]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"},
    )  # fmt: skip
    lines: list[str] = []
    assert process.stderr is not None
    try:
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if line.startswith(("try: curl", "Error:")):
                break
        yield process, lines, port
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        process.stderr.close()


def test_ready_lines_request_and_ctrl_c(pair: Pair) -> None:
    with serve(pair, "--", "--log-level", "warning") as (process, lines, port):
        said = "\n".join(lines)
        assert "Domino head active, block 4, float32" in said
        assert re.search(r"acceptance length \d\.\d\d .* plain decoding \d+\.\d tokens/s", said)
        assert re.search(r"one draft-verify cycle costs \d+\.\d\d plain steps", said)
        assert "refused per request on a CPU" in said
        assert f"ready: http://127.0.0.1:{port}/v1 model {pair.target}" in said
        curl = shlex.split(lines[-1].removeprefix("try: "))
        answer = subprocess.run([*curl, "-s"], capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        group = children(process.pid)[0]
        assert len(members(group)) >= 3
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert members(group) == []


def test_sigterm_while_requests_run(pair: Pair) -> None:
    with serve(pair, "--check-tokens", "0") as (process, lines, port):
        assert not any("acceptance" in line for line in lines)
        group = children(process.pid)[0]
        body = {"input_ids": [40, 41, 42],
                "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}  # fmt: skip
        with (
            httpx.Client(timeout=60) as web,
            web.stream(
                "POST", f"http://127.0.0.1:{port}/generate", json={**body, "stream": True}
            ) as response,
        ):
            next(response.iter_lines())
            process.terminate()
            assert process.wait(60) == 0
        assert members(group) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start(pair: Pair, number: signal.Signals) -> None:
    command = [DOMINO, "serve", "--draft", str(pair.draft), "--port", str(free_port())]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "server_args" in line or "Load weight" in line or "WARNING" in line or "[20" in line:
            break
    group = children(process.pid)[0]
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # a second one must not interrupt the stopping
    rest = process.stderr.read()
    assert process.wait(60) == 0, rest[-2000:]
    assert rest.strip().splitlines()[-1] == "stopped"
    assert members(group) == []


def test_a_killed_scheduler_ends_the_server_and_says_so(pair: Pair) -> None:
    with serve(pair, "--check-tokens", "0") as (process, _, _port):
        group = children(process.pid)[0]
        scheduler = next(pid for pid in members(group) if "sglang::scheduler" in name_of(pid))
        os.kill(scheduler, signal.SIGKILL)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(60) == 1
        last = rest.strip().splitlines()[-1]
        assert last.startswith("Error: the SGLang server ended"), rest[-2000:]
        assert "crash" in last or "exit" in last or "SIGKILL" in last
        assert members(group) == []


def test_a_start_that_fails_says_why(pair: Pair) -> None:
    result = domino("serve", "--draft", pair.draft, "--", "--no-such-flag", "1", timeout=120)
    assert result.returncode == 1
    assert "no-such-flag" in result.stderr.strip().splitlines()[-1]


def test_print_command(pair: Pair) -> None:
    result = domino("serve", "--draft", pair.draft, "--print-command", "--", "--log-level", "info")
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    assert words[0] == "SGLANG_PLATFORM=domino_cpu"
    assert words[-2:] == ["--log-level", "info"]
    assert str(pair.draft) in words


def test_bad_input_is_one_line(pair: Pair, tmp_path: Path) -> None:
    refused(domino("serve", "--draft", tmp_path / "none"), "not a folder")
    refused(
        domino("serve", "--draft", pair.draft, "--", "--speculative-eagle-topk", "4"),
        "--speculative-eagle-topk",
    )
    refused(
        domino("serve", "--draft", pair.draft, "--check-prompts", tmp_path / "none.jsonl"),
        "none.jsonl",
    )
