"""The contract inside the scheduler: what is live, against the draft's folder."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType

from domino_kit.checkpoint import save_draft
from domino_kit.config import DraftConfig
from domino_kit.contract import FACTS as ALL_FACTS
from domino_kit.contract import Contract
from domino_kit.fingerprint import tensor_fingerprint
from domino_kit.modeling import DominoDraft
from domino_kit.serve.live import FACTS, check_worker, compare, live_report, read_policy
from domino_kit.serve.plugin import ALLOW_VARIABLE, CONTRACT_VARIABLE
from tests.tiny import MASK, manifest_for, tiny_draft, tiny_model

pytestmark = pytest.mark.sglang

VOCAB = 32


def table(config: DraftConfig, base: float | None = None) -> torch.Tensor:
    """A rotary table as SGLang lays it out: ``[positions, cos | sin]``."""
    width, base = config.head_dim, base or config.rope_theta
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float) / width)
    angles = torch.outer(torch.arange(512, dtype=torch.float), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def fused(*parts: nn.Linear) -> nn.Linear:
    weight = torch.cat([part.weight.detach() for part in parts])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


class ServedDraft(nn.Module):
    """A draft with SGLang's fused layers, an MLP padded with zeros, and one shared rotary table."""

    def __init__(self, draft: DominoDraft) -> None:
        super().__init__()
        self.fc, self.hidden_norm, self.norm = draft.fc, draft.hidden_norm, draft.norm
        self.prefix_gru, self.embed_proj = draft.prefix_gru, draft.embed_proj
        self.shift_label = draft.config.shift_label
        self.layers = nn.ModuleList()
        rotary = SimpleNamespace(
            cos_sin_cache=table(draft.config), rotary_dim=draft.config.head_dim, is_neox_style=True
        )
        for own in draft.layers:
            layer, attention, mlp = nn.Module(), nn.Module(), nn.Module()
            source: Any = own.self_attn
            attention.qkv_proj = fused(source.q_proj, source.k_proj, source.v_proj)
            attention.q_size, attention.kv_size = (
                len(source.q_proj.weight),
                len(source.k_proj.weight),
            )
            attention.o_proj, attention.q_norm = source.o_proj, source.q_norm
            attention.k_norm = source.k_norm
            attention.attn = SimpleNamespace(
                attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=-1
            )
            attention.rotary_emb = rotary
            gate, up, down = (
                getattr(own.mlp, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")
            )
            mlp.gate_up_proj, mlp.down_proj = nn.Module(), nn.Module()
            rows, columns = torch.zeros(24, gate.shape[1]), torch.zeros(len(down), 24)
            mlp.gate_up_proj.weight = nn.Parameter(torch.cat([gate, rows, up, rows]))
            mlp.down_proj.weight = nn.Parameter(torch.cat([down, columns], dim=1))
            layer.self_attn, layer.mlp = attention, mlp
            layer.input_layernorm = own.input_layernorm
            layer.post_attention_layernorm = own.post_attention_layernorm
            self.layers.append(layer)


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    """SGLang's worker as far as it is compared, with everything as it should be.

    The target's matrices have 8 rows beyond the vocabulary, as padded ones do.
    """
    draft, target = tiny_draft(), tiny_model(vocab=VOCAB)
    embedding, head = target.get_input_embeddings().weight, target.lm_head.weight
    manifest = manifest_for("target")
    identity = manifest.target.model_copy(
        update={
            "embedding_rows": tensor_fingerprint(embedding),
            "head_rows": tensor_fingerprint(head),
        }
    )
    save_draft(
        tmp_path / "draft", draft, manifest.model_copy(update={"target": identity}), torch.float32
    )
    model = nn.Module()
    model.layers_to_capture = [1, 3]
    model.embedding, model.lm_head = nn.Embedding(1, 1), nn.Linear(1, 1)
    for module, weight in ((model.embedding, embedding), (model.lm_head, head)):
        module.weight = nn.Parameter(torch.cat([weight.detach(), torch.full((8, 32), 9.0)]))
    model.get_input_embeddings = lambda: model.embedding
    sizes = SimpleNamespace(vocab_size=VOCAB)
    return SimpleNamespace(
        server_args=SimpleNamespace(
            speculative_draft_model_path=str(tmp_path / "draft"), tp_size=1
        ),
        draft_model=ServedDraft(draft), _mask_token_id=MASK, block_size=4, _is_domino=True,
        domino_candidate_pool_size=0, draft_window_size=None,
        draft_model_runner=SimpleNamespace(
            dtype=torch.float32, model_config=SimpleNamespace(quantization=None)
        ),
        model_runner=SimpleNamespace(dtype=torch.float32, model_config=sizes, model=model),
    )  # fmt: skip


def folder_of(worker: Any) -> Path:
    return Path(worker.server_args.speculative_draft_model_path)


def test_a_draft_served_as_trained_has_no_findings(worker: Any) -> None:
    contract = compare(worker)
    assert contract.findings == [] and contract.unchecked == []
    assert sorted(contract.checked) == sorted(FACTS)
    assert set(FACTS) <= set(ALL_FACTS), "a fact without a name that --allow takes"


def test_padded_and_rounded_copies_of_the_target_are_the_same_one(worker: Any) -> None:
    model = worker.model_runner.model.bfloat16()
    assert model.embedding.weight.dtype == torch.bfloat16
    assert compare(worker).findings == []


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute of the worker by its dotted path; a number is a layer."""

    def apply(worker: Any) -> None:
        *places, last = path.split(".")
        found = worker
        for place in places:
            found = found[int(place)] if place.isdigit() else getattr(found, place)
        setattr(found, last, value)

    return apply


def edit(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Change a weight of the worker in place."""

    def apply(worker: Any) -> None:
        found = worker
        for place in path.split("."):
            found = found[int(place)] if place.isdigit() else getattr(found, place)
        with torch.no_grad():
            found.copy_(function(found.clone()))

    return apply


LAYER = "draft_model.layers.1.self_attn"
QKV = f"{LAYER}.qkv_proj.weight"
FAULTS: list[tuple[Callable[[Any], None], str, list[str]]] = [
    (change("_mask_token_id", 0), "mask_token_id", ["token 0", f"with {MASK}"]),
    (change("draft_model.shift_label", False), "label_mode", ["shift_label False", "has True"]),
    (change("block_size", 3), "block_size", ["3 rows", "with 4"]),
    (change("_is_domino", False), "head_active", ["active: False", "is: True"]),
    (change("model_runner.model.layers_to_capture", [2, 4]), "layer_ids",
     ["[1, 3]", "off by one"]),
    (change("model_runner.model.layers_to_capture", [2, 1]), "layer_ids", ["[0, 1]", "[0, 2]"]),
    (change("draft_window_size", 64), "attention", ["window of 64", "draft-window-size"]),
    (change(f"{LAYER}.attn.attn_type", AttentionType.DECODER), "attention",
     ["layer 1", "decoder"]),
    (change(f"{LAYER}.attn.sliding_window_size", 7), "attention", ["layer 1", "window 7"]),
    (change(f"{LAYER}.rotary_emb.rotary_dim", 4), "rope_table", ["4 of 8 channels"]),
    (change(f"{LAYER}.rotary_emb.is_neox_style", False), "rope_table", ["neighbouring pairs"]),
    (change(f"{LAYER}.rotary_emb.cos_sin_cache", table(tiny_draft().config, 1e6)), "rope_table",
     ["off by up to", "base 10000"]),
    (edit(QKV, lambda weight: weight.bfloat16().float()), "draft_weights",
     ["3 of", "layers.1.self_attn.q_proj.weight", "rounded or quantised"]),
    (edit(QKV, lambda weight: weight.flip(0)), "draft_weights", ["3 of", "other weights"]),
    (edit("draft_model.norm.weight", lambda weight: weight + 1), "draft_weights",
     ["1 of", "norm.weight", "other weights"]),
    (edit("draft_model.layers.0.mlp.gate_up_proj.weight", lambda weight: weight + 0.01),
     "draft_weights", ["2 of", "gate_proj", "up_proj"]),
    (change("draft_model.embed_proj", None), "draft_weights",
     ["2 of", "embed_proj.0.weight", "missing"]),
    (change("draft_model_runner.model_config.quantization", "fp8"), "draft_quantization",
     ["fp8", "unquant"]),
    (change("draft_model_runner.dtype", torch.bfloat16), "draft_dtype", ["bfloat16", "float32"]),
    (edit("model_runner.model.embedding.weight", lambda weight: weight * 2), "embedding",
     ["input embedding", "served target"]),
    (edit("model_runner.model.lm_head.weight", lambda weight: weight.roll(1, 0)), "head_weights",
     ["output head", "served target"]),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name", "words"), FAULTS, ids=[each[1] for each in FAULTS])
def test_a_difference_is_the_only_error_and_says_what_it_is(
    worker: Any, fault: Callable[[Any], None], name: str, words: list[str]
) -> None:
    fault(worker)
    (finding,) = compare(worker).findings
    assert (finding.name, finding.severity) == (name, "error")
    assert [word for word in words if word not in finding.message] == [], finding.message


def test_a_smaller_pool_and_a_rounded_table_are_warnings(worker: Any) -> None:
    worker.domino_candidate_pool_size = 8
    rotary = worker.draft_model.layers[0].self_attn.rotary_emb
    rotary.cos_sin_cache = rotary.cos_sin_cache.bfloat16()
    found = compare(worker).findings
    assert [(each.name, each.severity) for each in found] == [
        ("candidate_pool", "warning"),
        ("rope_table", "warning"),
    ]
    worker.domino_candidate_pool_size = VOCAB
    assert [each.name for each in compare(worker).findings] == ["rope_table"]


def test_layers_in_another_order_are_told_from_the_right_ones(worker: Any) -> None:
    """SGLang captures in the order in which layers run, whatever the order of the list."""
    path = folder_of(worker) / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["target_layer_ids"] = [2, 0]
    path.write_text(json.dumps(config))
    worker.model_runner.model.layers_to_capture = [3, 1]
    (finding,) = compare(worker).findings
    assert finding.name == "layer_ids" and "another order" in finding.message


def without(contract: Contract) -> set[str]:
    return {line.partition(":")[0] for line in contract.unchecked}


def test_what_cannot_be_compared_is_said(worker: Any) -> None:
    worker.server_args.tp_size = 2
    contract = compare(worker)
    assert contract.findings == []
    assert without(contract) == {"draft_weights", "embedding", "head_weights"}
    worker.server_args.tp_size = 1
    worker.model_runner.model.half()
    assert without(compare(worker)) == {"embedding", "head_weights"}
    del worker.model_runner.model.layers_to_capture
    (folder_of(worker) / "domino_manifest.json").unlink()
    contract = compare(worker)
    assert without(contract) == {"embedding", "head_weights", "layer_ids"}
    assert any("nothing says" in line for line in contract.unchecked)


def test_a_draft_of_another_kind_is_left_alone(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(worker)
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    (finding,) = compare(worker).findings
    assert finding.name == "config" and "architectures" in finding.message
    (folder / "domino_manifest.json").unlink()
    contract = compare(worker)
    assert contract.findings == [] and without(contract) == set(FACTS)
    check_worker(None, worker)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("domino-kit contract: not compared: layer_ids: ")
    worker.server_args.speculative_draft_model_path = "nowhere/to-be-found"
    assert without(compare(worker)) == set(FACTS)


# -- what follows --------------------------------------------------------------------------------


@pytest.fixture
def faulty(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with two errors, and no policy set."""
    for name in (CONTRACT_VARIABLE, ALLOW_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    worker.block_size = 3
    worker.draft_model_runner.dtype = torch.bfloat16
    return worker


def test_an_error_stops_the_server_after_each_is_logged(
    faulty: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"blocks of 3 rows.*--allow block_size"):
        check_worker(None, faulty)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[:2] for line in lines] == [
        ["domino-kit contract", "block_size"],
        ["domino-kit contract", "draft_dtype"],
    ]


def test_allowed_errors_are_warnings(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "draft_dtype")
    with pytest.raises(ValueError, match="block_size"):
        check_worker(None, faulty)
    monkeypatch.setenv(ALLOW_VARIABLE, "draft_dtype, block_size,")
    check_worker(None, faulty)
    report = live_report(faulty)
    assert report is not None and report["mode"] == "stop"
    assert report["allowed"] == ["block_size", "draft_dtype"]
    assert {each["severity"] for each in report["findings"]} == {"warning"}
    json.dumps(report)


def test_a_server_that_only_reports_goes_on(
    faulty: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CONTRACT_VARIABLE, "report")
    with caplog.at_level(logging.WARNING):
        check_worker(None, faulty)
    report = live_report(faulty)
    assert report is not None and report["mode"] == "report" and len(caplog.records) == 2
    assert [each["severity"] for each in report["findings"]] == ["error", "error"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({CONTRACT_VARIABLE: "warn"}, [CONTRACT_VARIABLE, "'warn'", "stop or report"]),
        ({ALLOW_VARIABLE: "block"}, [ALLOW_VARIABLE, "'block'", "block_size"]),
    ],
)
def test_a_policy_that_does_not_exist_is_refused(
    variables: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        read_policy(variables)
    assert [word for word in words if word not in str(error.value)] == []


def test_the_fill_of_a_drafted_block_is_looked_at(worker: Any) -> None:
    assert live_report(worker) is None
    worker.domino_contract = compare(worker)
    for filled, errors in ((None, 0), (MASK, 0), (MASK + 1, 1), (MASK + 1, 1)):
        if filled is not None:
            worker._draft_block_ids_buf = torch.tensor([[7, filled, filled, filled], [0, 5, 6, 7]])
        report = live_report(worker)
        assert report is not None and len(report["findings"]) == errors
    assert report["findings"][0]["name"] == "mask_token_id"
