"""Fixtures shared by all tests, and strictness about skipped ones in continuous integration."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

STRICT = ("sglang", "pretrained")


def pytest_configure(config: pytest.Config) -> None:
    """Small models run slower on many threads, and much slower where two processes share them.

    What a test starts inherits the setting, unless it sets its own. It would also inherit that a
    run in the background ignores signals, and a test's Ctrl-C would then not stop it; a handler
    that does nothing is not inherited.
    """
    for kind in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(kind) == signal.SIG_IGN:
            signal.signal(kind, lambda *_: None)
    threads = 1 if hasattr(config, "workerinput") else 2
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS counts here
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: several workers then end at about the same time."""
    length = {"test_check_faults.py": 0, "test_serving_exact.py": 1}
    slow = {item.path for item in items if item.get_closest_marker("sglang")}
    items.sort(key=lambda item: length.get(item.path.name, 2 if item.path in slow else 3))


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo's real chat model, made on first use."""
    from domino_kit.demo_target import ensure_demo_target

    return ensure_demo_target()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """With DOMINO_KIT_STRICT set, a whole module that is skipped is a failure too."""
    report = yield
    if os.environ.get("DOMINO_KIT_STRICT") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, which is not allowed here"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With DOMINO_KIT_STRICT set, a skipped sglang or pretrained test is a failure."""
    report = yield
    marked = any(item.get_closest_marker(name) for name in STRICT)
    if os.environ.get("DOMINO_KIT_STRICT") and marked and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which is not allowed here"
    return report
