"""What `domino serve` makes of a running server's report and of a measured gain."""

from pathlib import Path
from typing import Any

import pytest
import torch

from domino_kit.checkpoint import save_draft
from domino_kit.draft_contract import weights_identity
from domino_kit.serve.confirm import Gain, check_report, contract_notes
from domino_kit.serve.run import describe_gain
from domino_kit.serve.server import ServerError
from tests.tiny import MASK, tiny_config, tiny_draft

DRAFT = Path("some/draft")


def report(**draft: Any) -> dict[str, Any]:
    """What the plugin says of a server that runs ``tiny_config()``."""
    facts = {
        "head": True, "block_size": 4, "mask_token_id": MASK, "shift_label": True,
        "candidate_pool_size": 0, "target_layer_ids": [0, 2], "plain_requests": True,
        "dtype": "float32", **draft,
    }  # fmt: skip
    return {"platform": "cpu", "hooks_missing": [], "process_group": 5, "draft": facts}


def test_the_right_draft_passes() -> None:
    check_report(report(), DRAFT, tiny_config(), block_size=4, dtype="float32")


def test_a_plain_dflash_draft_passes_without_a_head() -> None:
    config = tiny_config(False, projector="none")
    check_report(report(head=False, shift_label=False), DRAFT, config, block_size=4)
    with pytest.raises(ServerError, match="head True"):
        check_report(report(shift_label=False), DRAFT, config)


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"head": False}, "the Domino head is not active"),
        ({"block_size": 16}, "block_size 16"),
        ({"mask_token_id": 0}, "mask_token_id 0"),
        ({"shift_label": False}, "shift_label False"),
        ({"target_layer_ids": [1, 3]}, r"target_layer_ids \[1, 3\]"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16'"),
    ],
)
def test_another_fact_is_named(fact: dict[str, Any], words: str) -> None:
    with pytest.raises(ServerError, match=words):
        check_report(report(**fact), DRAFT, tiny_config(), block_size=4, dtype="float32")


def test_a_missing_draft_and_missing_hooks_are_named() -> None:
    with pytest.raises(ServerError, match="without a draft"):
        check_report({**report(), "draft": None}, DRAFT, tiny_config())
    with pytest.raises(ServerError, match=r"some\.function"):
        check_report({**report(), "hooks_missing": ["some.function"]}, DRAFT, tiny_config())


def with_contract(mode: str, *severities: str, **draft: Any) -> dict[str, Any]:
    """A report with a finding of each severity about the label mode."""
    findings = [
        {"name": "label_mode", "severity": each, "message": "rows are read otherwise."}
        for each in severities
    ]
    allowed = ["label_mode"] if severities == ("warning",) else []
    contract = {
        "mode": mode, "findings": findings, "checked": ["label_mode"], "unchecked": [],
        "allowed": allowed,
    }  # fmt: skip
    return {**report(**draft), "contract": contract}


def test_an_error_of_the_contract_is_the_reason() -> None:
    with pytest.raises(ServerError, match=r"label_mode: rows are read otherwise\."):
        check_report(with_contract("stop", "error", shift_label=False), DRAFT, tiny_config())
    check_report(with_contract("stop"), DRAFT, tiny_config())


@pytest.mark.parametrize(("mode", "severity"), [("stop", "warning"), ("report", "error")])
def test_an_accepted_difference_is_only_said(mode: str, severity: str) -> None:
    found = with_contract(mode, severity, shift_label=False)
    check_report(found, DRAFT, tiny_config())
    assert contract_notes(found) == ["label_mode: rows are read otherwise."]
    with pytest.raises(ServerError, match="block_size 4"):
        check_report(found, DRAFT, tiny_config(), block_size=8)


def test_a_server_without_a_contract_has_nothing_to_say() -> None:
    assert contract_notes(report()) == contract_notes({**report(), "contract": None}) == []
    check_report({**report(), "contract": None}, DRAFT, tiny_config())


def test_another_checkpoint_with_the_same_config_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    folders = [tmp_path / name for name in "ab"]
    for seed, folder in enumerate(folders):
        save_draft(folder, tiny_draft(seed=seed), None, torch.float32)
    found = report(weights=weights_identity(folders[0]))
    check_report(found, folders[0], config)
    with pytest.raises(ServerError, match=r"other weights than .*b has"):
        check_report(found, folders[1], config)
    accepted = {"mode": "stop", "findings": [], "allowed": ["draft_weights"]}
    check_report({**found, "contract": accepted}, folders[1], config)


def test_the_cycle_cost_is_the_break_even_acceptance() -> None:
    # 2.5 tokens a cycle at 50 tokens/s are 50 ms; a plain step of 40 ms is 25 tokens/s.
    gain = Gain(2.5, 50.0, 25.0)
    assert gain.cycle_cost == pytest.approx(1.25)
    assert Gain(1.25, 25.0, 25.0).cycle_cost == pytest.approx(1.25)
    assert Gain(2.5, 50.0, None).cycle_cost is None


def test_a_gain_below_the_break_even_is_a_warning() -> None:
    assert not any("warning" in line for line in describe_gain(Gain(2.5, 50.0, 25.0)))
    slow = describe_gain(Gain(1.5, 20.0, 25.0))
    assert "0.80 times as fast" in slow[0]
    assert "1.88 plain steps" in slow[1]
    assert slow[-1].startswith("warning: acceptance 1.50 is below the break-even of 1.88")


def test_what_could_not_be_measured_is_said() -> None:
    assert "not measured" in describe_gain(None)[0]
    assert describe_gain(Gain(2.0, 30.0, None)) == [
        "acceptance length 2.00 (bonus token counted), 30.0 tokens/s one request at a time"
    ]
    assert any("rounding" in line for line in describe_gain(Gain(2.5, 50.0, 25.0, False)))
