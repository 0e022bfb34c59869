"""`domino check` as a user runs it: every known fault is named by its stage and its cause."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.command import domino
from tests.faults import (
    FILE_FAULTS,
    SERVED_FAULTS,
    TRAINING_FAULTS,
    FileFault,
    ServedFault,
    TrainingFault,
    copy_pair,
    faulty_checkpoint,
)
from tests.serving import Pair, serving, trained_pair
from tests.tiny_chat import THINKING

FAULT_SITE = Path(__file__).parent / "fault_site"
QUICK = ("--limit", "1", "--max-new-tokens", "16")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that learnt something, of two layers, for a tied Llama with a thinking template."""
    folder = tmp_path_factory.mktemp("good")
    pair = trained_pair(folder, layers=2, template=THINKING)
    return Pair(pair.target, pair.draft / "latest")


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Keeps what was reported and how long it took, for the table in docs/consistency.md."""
    row: dict[str, Any] = {}
    yield row
    file = os.environ.get("DOMINO_KIT_FAULT_TABLE")
    if file and row:
        with Path(file).open("a", encoding="utf-8") as table:
            table.write(json.dumps(row) + "\n")


def check(pair: Pair, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], float]:
    """Exit status, JSON report and seconds of the command."""
    report = tmp_path / "report.json"
    started = time.monotonic()
    result = domino(
        "check", "--draft", pair.draft, "--target", pair.target, "--output", report, *arguments
    )
    seconds = time.monotonic() - started
    assert "Traceback" not in result.stderr
    assert report.exists(), result.stderr
    return result.returncode, json.loads(report.read_text()), seconds


def row(name: str, report: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A row of the table."""
    found = {"stage": report["stage"], "cause": report["cause"], "seconds": seconds}
    return {"fault": name, **found}


def test_a_good_draft_passes(good: Pair, tmp_path: Path) -> None:
    for arguments in (("--static",), QUICK):
        status, report, _ = check(good, tmp_path, *arguments)
        assert status == 0
        assert report["verdict"] == "as trained"
        assert report["contract"]["findings"] == []
    assert {each["path"] for each in report["stages"]} == {"training run", "replay", "decode"}
    assert all(each["agrees"] for each in report["stages"])


@pytest.fixture(scope="module")
def spoilt(
    good: Pair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The reports of all selected faults of files and training, two commands at a time."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params.get("fault") for spec in specs if spec is not None}
    found: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for fault in [fault for fault in FILE_FAULTS if fault in wanted]:
            folder = tmp_path_factory.mktemp("files")
            pair = copy_pair(good, folder)
            arguments = fault.spoil(pair, folder) or ()
            found[fault.name] = pool.submit(check, pair, folder, "--static", *arguments)
        for fault in [fault for fault in TRAINING_FAULTS if fault in wanted]:
            folder = tmp_path_factory.mktemp("training")
            draft = faulty_checkpoint(good, folder, fault)
            found[fault.name] = pool.submit(check, Pair(good.target, draft), folder, *QUICK)
        yield found


@pytest.mark.parametrize("fault", FILE_FAULTS, ids=lambda fault: fault.name)
def test_files(spoilt: dict[str, Future[Any]], fault: FileFault, said: dict[str, Any]) -> None:
    status, report, seconds = spoilt[fault.name].result()
    said |= row(fault.name, report, seconds)
    assert status == 1
    assert (report["stage"], report["cause"]) == ("contract", fault.fact)
    assert fault.words in report["explanation"]


@pytest.mark.parametrize("fault", TRAINING_FAULTS, ids=lambda fault: fault.name)
def test_training(
    spoilt: dict[str, Future[Any]], fault: TrainingFault, said: dict[str, Any]
) -> None:
    status, report, seconds = spoilt[fault.name].result()
    said |= row(fault.name, report, seconds)
    assert status == 1
    assert (report["stage"], report["cause"]) == (fault.stage, fault.cause)
    assert report["explanation"].startswith("training run differs at")


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("switch") / "fault"
    file.write_text("none")
    return file


@pytest.fixture(scope="module")
def url(good: Pair, switch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = {
        "PYTHONPATH": str(FAULT_SITE),
        "DOMINO_TEST_FAULT_FILE": str(switch),
        "DOMINO_KIT_PROBE": str(tmp_path_factory.mktemp("probe")),
    }
    with serving(good, environment=environment) as server:
        yield server.url


@pytest.mark.sglang
@pytest.mark.slow
class TestServed:
    """One server with all faults in its code, of which one at a time is in force."""

    def test_without_a_fault(self, good: Pair, url: str, tmp_path: Path) -> None:
        status, report, _ = check(good, tmp_path, "--engine", "both", "--url", url)
        assert status == 0, report["explanation"]
        paths = {each["path"] for each in report["stages"]}
        assert {"decode", "served", "served again"} <= paths

    @pytest.mark.parametrize("fault", SERVED_FAULTS, ids=lambda fault: fault.name)
    def test_fault(
        self, good: Pair, url: str, switch: Path, tmp_path: Path, fault: ServedFault,
        said: dict[str, Any],
    ) -> None:  # fmt: skip
        switch.write_text(fault.planted)
        try:
            status, report, seconds = check(
                good, tmp_path, "--engine", "sglang", "--url", url, *QUICK
            )
        finally:
            switch.write_text("none")
        said |= row(fault.name, report, seconds)
        assert status == 1
        assert (report["stage"], report["cause"]) == (fault.stage, fault.cause)
        assert report["explanation"].startswith("served")


@pytest.mark.sglang
@pytest.mark.slow
def test_faults_while_loading(
    good: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    """The server compares what it loaded: three faults at once, each of them named."""
    monkeypatch.setenv("PYTHONPATH", str(FAULT_SITE))
    monkeypatch.setenv("DOMINO_TEST_FAULT", "loaded_wrong")
    status, report, seconds = check(good, tmp_path, "--engine", "sglang", *QUICK)
    names = ", ".join(each["name"] for each in report["contract"]["findings"])
    said |= row("rotary table, captured layers and weights wrong after loading", report, seconds)
    said["cause"] = names
    assert status == 1
    assert report["stage"] == "contract"
    found = {each["name"]: each["message"] for each in report["contract"]["findings"]}
    assert found.keys() == {"rope_table", "layer_ids", "draft_weights"}
    assert "quantised" in found["draft_weights"]


@pytest.mark.sglang
def test_a_shorter_block_is_named_before_the_start(
    good: Pair, tmp_path: Path, said: dict[str, Any]
) -> None:
    status, report, seconds = check(
        good, tmp_path, "--engine", "sglang", *QUICK, "--", "--speculative-num-draft-tokens", "2"
    )
    said |= row("draft served with a shorter block", report, seconds)
    assert status == 1
    assert (report["stage"], report["cause"]) == ("contract", "block_size")
