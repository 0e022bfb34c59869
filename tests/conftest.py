"""Fixtures shared by all tests, and strictness about skipped ones in continuous integration."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

STRICT = ("sglang", "pretrained")


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> Iterator[None]:
    """Small models run slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


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
