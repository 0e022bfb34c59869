"""The plugin as SGLang finds it: when it stays out, what it changes, and what it reports."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from domino_kit import __version__
from domino_kit.checkpoint import save_draft
from domino_kit.serve import plugin
from domino_kit.serve.versions import TESTED_SGLANG, check_version
from tests.tiny import MASK, tiny_draft, tiny_model

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft that has a head, one that has none, and their target."""
    root = tmp_path_factory.mktemp("drafts")
    save_draft(root / "domino", tiny_draft(), None, torch.float32)
    save_draft(root / "dflash", tiny_draft(False, projector="none"), None, torch.float32)
    tiny_model().save_pretrained(root / "target")
    return root


def test_tested_version_is_the_one_that_is_installed() -> None:
    assert check_version(importlib.metadata.version("sglang"), {}) is None


def test_other_version_is_named_with_what_to_do() -> None:
    complaint = check_version("0.4.1", {})
    assert complaint is not None
    for part in (*TESTED_SGLANG, "0.4.1 is installed", "DOMINO_KIT_ANY_SGLANG=1"):
        assert part in complaint


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("0", False), ("", False)])
def test_other_version_is_allowed_when_asked_for(value: str, allowed: bool) -> None:
    assert (check_version("0.4.1", {"DOMINO_KIT_ANY_SGLANG": value}) is None) is allowed


def test_plugin_stays_out_of_another_version(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.1")
    monkeypatch.delenv("DOMINO_KIT_ANY_SGLANG", raising=False)
    monkeypatch.setattr(HookRegistry, "register", lambda *_: pytest.fail("a hook is registered"))
    monkeypatch.setattr(
        resolution_hooks, "register_resolution_hook", lambda _: pytest.fail("a step is wrapped")
    )
    with caplog.at_level(logging.WARNING):
        plugin.activate()
    assert [record.getMessage() for record in caplog.records] == [
        f"{check_version('0.4.1', {})} The plugin stays out."
    ]


@pytest.mark.parametrize("name", [None, "", "cuda", "DOMINO_CPU"])
def test_platform_is_not_active_unless_named(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if name is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", name)
    assert plugin.activate_platform() is None


def test_platform_is_active_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "domino_cpu")
    found = plugin.activate_platform()
    assert found == "domino_kit.serve.cpu_platform:CpuPlatform"
    platform = importlib.metadata.EntryPoint("any", found, "any").load()()
    assert (platform.device_name, platform.is_out_of_tree()) == ("cpu", True)


@pytest.mark.parametrize(
    ("group", "name", "function"),
    [
        ("sglang.srt.plugins", "domino", plugin.activate),
        ("sglang.srt.platforms", "domino_cpu", plugin.activate_platform),
    ],
)
def test_entry_points_are_installed(group: str, name: str, function: Any) -> None:
    # All distributions: an old egg-info in a checkout must not hide the installed one.
    installed = importlib.metadata.distributions(name="domino-kit")
    found = {each for one in installed for each in one.entry_points.select(group=group, name=name)}
    assert {each.load() for each in found} == {function}


def forward_kwargs(dtype: torch.dtype, is_draft: bool, embeds: torch.Tensor | None) -> Any:
    """What SGLang hands to the model, with the plugin's hook behind SGLang's own function."""
    runner = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_dflash=lambda: True),
        dtype=dtype,
        is_draft_worker=is_draft,
        is_generation=True,
        _pp_kwargs=lambda _: {"pp": 1},
    )
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None, replace_positions=None)
    kwargs = ModelRunner._extend_forward_kwargs(runner, batch, None)
    assert plugin.keep_precision(kwargs, runner, batch, None) is None
    return kwargs


def test_float32_draft_gets_its_embeddings_unrounded() -> None:
    embeds = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    found = forward_kwargs(torch.float32, True, embeds)["input_embeds"]
    assert found.dtype == torch.float32 and torch.equal(found, embeds)
    assert not torch.equal(found, embeds.bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "is_draft"),
    [(torch.bfloat16, True), (torch.float32, False), (torch.bfloat16, False)],
)
def test_other_runners_get_what_sglang_gives(dtype: torch.dtype, is_draft: bool) -> None:
    embeds = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    found = forward_kwargs(dtype, is_draft, embeds)["input_embeds"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, embeds.bfloat16())


@pytest.mark.parametrize("is_draft", [True, False])
def test_batch_without_embeddings_gets_none(is_draft: bool) -> None:
    assert forward_kwargs(torch.float32, is_draft, None) == {"pp": 1}


def resolved(**fields: Any) -> tuple[str | None, int]:
    """The algorithm after the plugin's step, and how often SGLang's own step ran."""
    calls: list[Any] = []
    record = ServerArgs(model_path="unused", **fields)
    plugin.resolve_domino_name(record, calls.append)
    assert all(each is record for each in calls)
    return resolving_view(record).speculative_algorithm, len(calls)


@pytest.mark.parametrize("name", ["DOMINO", "domino", "Domino"])
def test_domino_stands_for_dflash(name: str, drafts: Path) -> None:
    folder = str(drafts / "domino")
    found = resolved(speculative_algorithm=name, speculative_draft_model_path=folder)
    assert found == ("DFLASH", 1)


@pytest.mark.parametrize("name", [None, "DFLASH", "EAGLE"])
@pytest.mark.parametrize("draft", [None, "domino", "dflash"])
def test_other_names_are_left_alone(name: str | None, draft: str | None, drafts: Path) -> None:
    folder = None if draft is None else str(drafts / draft)
    found = resolved(speculative_algorithm=name, speculative_draft_model_path=folder)
    assert found == (name, 1)


def test_domino_without_a_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="DOMINO needs --speculative-draft-model-path"):
        resolved(speculative_algorithm="DOMINO")


def test_draft_without_a_head_is_refused(drafts: Path) -> None:
    folder = str(drafts / "dflash")
    with pytest.raises(ValueError, match="dflash has no Domino head"):
        resolved(speculative_algorithm="DOMINO", speculative_draft_model_path=folder)


SERVED = """
import json, sys
import sglang.srt.managers.scheduler, sglang.srt.speculative.dflash_worker_v2 as worker, torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.platforms import current_platform
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from domino_kit.serve import cpu_cache, cpu_rollout

def resolved(**more):
    record = ServerArgs(model_path=sys.argv[1], speculative_draft_model_path=sys.argv[2],
                        speculative_algorithm="DOMINO", device="cpu", **more)
    record.resolve_once()
    names = ("speculative_algorithm", "attention_backend", "max_total_tokens", "sampling_backend",
             "speculative_draft_attention_backend", "disable_overlap_schedule",
             "speculative_num_draft_tokens")
    return [getattr(resolving_view(record), name) for name in names]

embeddings = torch.ones(1)
embeddings.record_stream(None)
hooks = [each for own in HookRegistry._hooks.values() for _, each, _ in own]
print("FOUND", json.dumps({
    "platform": type(current_platform).__name__,
    "plain": resolved(),
    "explicit": resolved(max_total_tokens=500, attention_backend="torch_native"),
    "missing": sorted(set(HookRegistry._hooks) - HookRegistry._patched),
    "replaced": [cpu_rollout.cpu_rollout in hooks, cpu_cache.write_slots in hooks,
                 hasattr(worker.domino_greedy_rollout, "__wrapped__")],
}))
"""


def test_sglang_resolves_a_cpu_server_through_the_plugin(drafts: Path) -> None:
    """Plugin and platform found by their entry points, in a process of their own; no server."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVED, str(drafts / "target"), str(drafts / "domino")],
        env={**os.environ, "SGLANG_PLATFORM": "domino_cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("FOUND ")]
    own = ["pytorch", "domino_cpu", True, 4]
    assert json.loads(line.removeprefix("FOUND ")) == {
        "platform": "CpuPlatform",
        "plain": ["DFLASH", "domino_cpu", 32768, *own],
        "explicit": ["DFLASH", "torch_native", 500, *own],
        "missing": [],
        "replaced": [True, True, True],
    }


def fake_scheduler(
    gru: Any = "a GRU", domino: bool = True, layer_ids: list[int] | None = None
) -> SimpleNamespace:
    model = SimpleNamespace(
        prefix_gru=gru, shift_label=True, draft_config=SimpleNamespace(target_layer_ids=layer_ids)
    )
    worker = SimpleNamespace(
        draft_model=model, _is_domino=domino, block_size=16, _mask_token_id=MASK,
        domino_candidate_pool_size=64, draft_model_runner=SimpleNamespace(dtype=torch.float32),
    )  # fmt: skip
    return SimpleNamespace(
        draft_worker=worker, spec_algorithm=SimpleNamespace(is_dflash=lambda: True)
    )


def test_report_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMINO_KIT_PROBE", "some/folder")
    monkeypatch.setattr(HookRegistry, "_hooks", {"b": [], "a": [], "c": []})
    monkeypatch.setattr(HookRegistry, "_patched", {"b"})
    report = plugin.describe_scheduler(fake_scheduler(layer_ids=[1, 5]))
    assert report.pop("platform")
    assert report.pop("process_group") > 0
    assert report == {
        "version": __version__,
        "hooks_missing": ["a", "c"],
        "probe": str(Path("some/folder").absolute()),
        "contract": None,
        "draft": {
            "head": True, "block_size": 16, "mask_token_id": MASK, "shift_label": True,
            "candidate_pool_size": 64, "target_layer_ids": [1, 5], "plain_requests": False,
            "dtype": "float32", "weights": None,
        },
    }  # fmt: skip
    json.dumps(report)


@pytest.mark.parametrize("fields", [{"gru": None}, {"domino": False}])
def test_report_of_a_draft_whose_head_is_off(fields: dict[str, Any]) -> None:
    draft = plugin.describe_scheduler(fake_scheduler(**fields))["draft"]
    assert draft["head"] is False and draft["target_layer_ids"] == []


def test_report_names_plain_requests_of_our_worker() -> None:
    from domino_kit.serve.cpu_worker import CpuDFlashWorker

    scheduler = fake_scheduler()
    worker = CpuDFlashWorker.__new__(CpuDFlashWorker)
    worker.__dict__.update(vars(scheduler.draft_worker))
    scheduler.draft_worker = worker
    assert plugin.describe_scheduler(scheduler)["draft"]["plain_requests"] is True


def test_report_of_a_server_without_our_kind_of_draft() -> None:
    plain, other = fake_scheduler(), fake_scheduler()
    plain.draft_worker = None
    other.spec_algorithm.is_dflash = lambda: False
    assert plugin.describe_scheduler(plain)["draft"] is None
    assert plugin.describe_scheduler(other)["draft"] is None


def test_report_stands_beside_sglangs_own_state() -> None:
    output = SimpleNamespace(internal_state={"world_size": 1})
    scheduler = fake_scheduler()
    assert plugin.add_report(output, SimpleNamespace(scheduler=scheduler), "request") is None
    assert output.internal_state == {
        "world_size": 1,
        "domino_kit": plugin.describe_scheduler(scheduler),
    }
