"""The probe: what a served step really computed, against the same step computed by ourselves."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("sglang")

from domino_kit import decoding
from domino_kit.paths import decode_steps
from domino_kit.serve.confirm import check_report, read_report
from domino_kit.serve.cpu_rollout import cpu_rollout
from domino_kit.serve.live import FACTS
from domino_kit.serve.plugin import PROBE_VARIABLE
from domino_kit.serve.probe import Probe, follow_rollout, split_rows
from domino_kit.serve.server import ServerError
from domino_kit.serve.traces import read_records, write_record
from domino_kit.trace import STAGES, Record, Step, assemble, compare_stage
from tests.serving import Pair, prompts_for, serving, trained_pair
from tests.tiny import rollout_case

pytestmark = pytest.mark.sglang

MODES = [True, False]
RECORDED = ("base_logits", "gru_states", "corrected_logits")


def close(found: Record, wanted: Record) -> bool:
    return all(
        torch.allclose(found[stage], wanted[stage], rtol=1e-5, atol=1e-5) for stage in RECORDED
    )


@pytest.mark.parametrize("shift_label", MODES)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("block", [2, 3, 8])
def test_recorded_rollout_is_the_unrecorded_one(block: int, batch: int, shift_label: bool) -> None:
    model, target, hidden, anchors, arguments = rollout_case(shift_label, block, batch)
    recording: Record = {}
    found = cpu_rollout(**arguments, candidate_pool_size=0, recording=recording)
    assert found.tolist() == cpu_rollout(**arguments, candidate_pool_size=0).tolist()
    assert found.tolist() == recording["corrected_logits"].argmax(-1).tolist()
    ours: Record = {}
    decoding.rollout(model, target, hidden, anchors, block - 1, record=ours)
    assert close(recording, ours)
    # What SGLang's own rollout does not show is computed from its modules.
    assert close(follow_rollout(found, **arguments), ours)


@pytest.mark.parametrize("block", [2, 8])
def test_recording_shows_the_whole_vocabulary_beside_a_pool(block: int) -> None:
    *_, arguments = rollout_case(True, block, 3)
    recording: Record = {}
    found = cpu_rollout(**arguments, candidate_pool_size=2, recording=recording)
    assert found.tolist() == cpu_rollout(**arguments, candidate_pool_size=2).tolist()
    assert close(recording, follow_rollout(found, **arguments))
    assert recording["corrected_logits"].isfinite().all()


def test_rows_of_a_prefill_and_of_a_verify_pass() -> None:
    assert split_rows(9, None, torch.tensor([4, 5])) == [slice(0, 4), slice(4, 9)]
    assert split_rows(8, torch.tensor([1, 4]), None) == [slice(0, 1), slice(4, 8)]


# -- requests and files --------------------------------------------------------------------------


class Request:
    """What the probe reads of SGLang's request."""

    def __init__(self, **params: Any) -> None:
        self.sampling_params = SimpleNamespace(custom_params=params or None)


def test_only_requests_that_ask_are_traced(tmp_path: Path) -> None:
    probe = Probe(tmp_path / "traces", own_rollout=True)
    assert probe.accept(None, Request()) is None
    assert probe.accept(None, Request(speculate=False)) is None
    assert probe.accept("refused for another reason", Request(trace="a")) is None
    assert not (tmp_path / "traces").exists()
    assert probe.accept(None, Request(trace="a")) is None
    assert (tmp_path / "traces" / "a").is_dir()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b", "ä", 7, "x" * 101, "a\n"])
def test_a_bad_name_is_refused(tmp_path: Path, name: object) -> None:
    said = Probe(tmp_path, own_rollout=True).accept(None, Request(trace=name))
    assert said is not None and repr(name) in said and "letters, digits" in said
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_used_once_and_an_unusable_folder_is_said(tmp_path: Path) -> None:
    probe = Probe(tmp_path, own_rollout=True)
    assert probe.accept(None, Request(trace="a")) is None
    assert "already has a trace 'a'" in str(probe.accept(None, Request(trace="a")))
    (tmp_path / "file").touch()
    said = Probe(tmp_path / "file", own_rollout=True).accept(None, Request(trace="b"))
    assert said is not None and said.startswith("the request cannot be traced")


def one_step(probe: Probe, requests: list[Request], tp_size: int = 1) -> Any:
    """One plain DFlash step of SGLang's worker, reduced to the functions that the probe watches.

    Three requests at most, blocks of two rows, width 3, 5 tokens.
    """
    count = len(requests)
    lengths = torch.tensor([2, 1, 3])[:count]
    rotary = SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(layer_id=0)))
    cache = torch.arange(20.0).view(10, 1, 2)
    draft = SimpleNamespace(
        is_draft_worker=True,
        model=SimpleNamespace(layers=[rotary]),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(9).view(3, 3)),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda _: cache, get_value_buffer=lambda _: -cache
        ),
    )
    target = SimpleNamespace(
        model=SimpleNamespace(lm_head=torch.nn.Linear(3, 8, bias=False)),
        model_config=SimpleNamespace(vocab_size=5),
    )
    worker = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=tp_size), model_runner=target, _is_domino=False
    )

    def append(features: torch.Tensor, **rows: Any) -> None:
        probe.append(worker, target_hidden=features, **rows)
        probe.project(features[:, :3], draft.model, features)

    def original(worker: Any, batch: Any) -> str:
        total = int(lengths.sum())
        positions = torch.cat([torch.arange(int(length)) for length in lengths])
        append(torch.rand(total, 6), positions=positions, extend_lens=lengths)
        block = SimpleNamespace(
            seq_lens=lengths, req_pool_indices=torch.arange(count),
            input_ids=torch.arange(2 * count), positions=torch.arange(2 * count),
        )  # fmt: skip
        probe.block({"input_embeds": torch.rand(2 * count, 3)}, draft, block)
        probe.hidden(SimpleNamespace(hidden_states=torch.rand(2 * count, 3)), draft.model)
        probe.verify(
            lambda worker, **_: (torch.ones(count, dtype=torch.int32), None),
            worker,
            candidates=torch.arange(2 * count).view(count, 2),
            next_token_logits=torch.rand(2 * count, 5),
        )
        append(
            torch.rand(2 * count, 6),
            positions=torch.arange(2 * count),
            commit_lens=torch.full((count,), 2),
        )
        return "result"

    batch = SimpleNamespace(reqs=requests, seq_lens=lengths)
    return probe.step(original, worker, batch)


def test_traced_and_other_requests_share_a_batch(tmp_path: Path) -> None:
    probe = Probe(tmp_path, own_rollout=True)
    requests = [Request(), Request(trace="b"), Request(trace="c")]
    assert [probe.accept(None, request) for request in requests] == [None] * 3
    assert one_step(probe, requests) == "result"
    assert one_step(probe, requests) == "result"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b", "c"]
    first, second = read_records(tmp_path, "c")
    assert int(first["anchor"]) == 3 and first["positions"].tolist() == [0, 1, 2]
    assert first["features"].shape == (3, 6) and first["context"].shape == (3, 3)
    assert first["context_keys"].shape == (3, 1, 1, 2)
    assert first["context_keys"].flatten().tolist() == [12, 13, 14, 15, 16, 17]
    assert torch.equal(first["context_values"], -first["context_keys"])
    assert first["proposals"].tolist() == [5] and first["base_logits"].shape == (1, 5)
    # What the first step's verify pass added belongs to the second record.
    assert second["positions"].tolist() == [4, 5, 0, 1, 2]
    assert int(second["cached_prefix"]) == 0


@pytest.mark.parametrize("reason", ["files", "tensor parallelism"])
def test_a_probe_that_cannot_go_on_says_so_once_and_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    probe = Probe(tmp_path, own_rollout=True)
    requests = [Request(trace="a"), Request(trace="b")]
    for request in requests:
        assert probe.accept(None, request) is None
    if reason == "files":
        (tmp_path / "a").rmdir()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            found = one_step(probe, requests, tp_size=1 if reason == "files" else 2)
            assert found == "result"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("domino-kit probe stops tracing") and reason[:4] in line.replace(
        "cannot be written", "files"
    )
    assert "has stopped tracing" in str(probe.accept(None, Request(trace="c")))


def test_records_are_read_in_order_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"holds no step.*{PROBE_VARIABLE}="):
        read_records(tmp_path, "a")
    with pytest.raises(ValueError, match="letters, digits"):
        read_records(tmp_path, "../a")
    (tmp_path / "a").mkdir()
    for number in (2, 0, 1):
        write_record(tmp_path / "a", number, {"anchor": torch.tensor(number)})
    (tmp_path / "a" / ".00003.new").touch()
    assert [int(record["anchor"]) for record in read_records(tmp_path, "a")] == [0, 1, 2]
    (tmp_path / "a" / "00001.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="unreadable record"):
        read_records(tmp_path, "a")
    (tmp_path / "a" / "00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 00001\.safetensors"):
        read_records(tmp_path, "a")


# -- a real server -------------------------------------------------------------------------------

TOKENS = 24


def ask(url: str, prompt: list[int], **params: Any) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": {**sampling, "custom_params": params}}
    return httpx.post(f"{url}/generate", json=body, timeout=120)


def answer_to(url: str, prompt: list[int], **params: Any) -> list[int]:
    response = ask(url, prompt, **params)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["output_ids"]
    return tokens


def assert_same_steps(pair: Pair, prompt: list[int], served: list[Step]) -> None:
    """All stages of all steps are those of our own target and draft in plain PyTorch."""
    target, draft = pair.load()
    _, wanted = decode_steps(target, draft, served[0].prompt, prompt, TOKENS, [])
    assert [step.key for step in served] == [step.key for step in wanted]
    for ours, theirs in zip(served, wanted, strict=True):
        assert list(ours.values) == list(STAGES)
        for stage in STAGES:
            found = compare_stage(stage, ours, theirs, 1e-4, draft.config.hidden_size)
            assert found.agrees, (ours.key, found)


@pytest.mark.slow
def test_served_stages_are_our_own(tmp_path: Path) -> None:
    """One request alone, several at once, and one whose prefix lies in the cache."""
    pair = trained_pair(tmp_path, layers=2, tied=False, steps=120)
    other = trained_pair(tmp_path / "other", layers=2, tied=False, steps=1)
    folder = tmp_path / "traces"
    texts = sorted(prompts_for(pair, 4, longest=60), key=len, reverse=True)  # beyond a chunk first

    def steps(name: str, prompt: list[int], answer: list[int]) -> list[Step]:
        return assemble(name, prompt + answer, read_records(folder, name))

    flags = ["--chunked-prefill-size", "16"]
    with serving(pair, *flags, environment={PROBE_VARIABLE: str(folder)}) as server:
        report = read_report(server.url)
        config = pair.load()[1].config
        check_report(report, pair.draft / "latest", config)
        with pytest.raises(ServerError, match="other weights than"):
            check_report(report, other.draft / "latest", config)
        assert report["probe"] == str(folder)
        assert report["contract"] == {
            "mode": "stop", "findings": [], "checked": list(report["contract"]["checked"]),
            "unchecked": [], "allowed": [],
        }  # fmt: skip
        assert sorted(report["contract"]["checked"]) == sorted(FACTS)

        alone = answer_to(server.url, texts[0], trace="alone")
        names: list[dict[str, Any]] = [{"trace": "one"}, {}, {"trace": "three"}]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda t, n: answer_to(server.url, t, **n), texts[1:], names))
        longer = texts[0] + alone + texts[1][:3]
        shared = answer_to(server.url, longer, trace="shared")
        for name in ("alone", "a/b"):
            assert ask(server.url, texts[0], trace=name).status_code == 400

    assert sorted(each.name for each in folder.iterdir()) == ["alone", "one", "shared", "three"]
    assert_same_steps(pair, texts[0], steps("alone", texts[0], alone))
    assert_same_steps(pair, texts[1], steps("one", texts[1], together[0]))
    assert_same_steps(pair, texts[3], steps("three", texts[3], together[2]))
    found = steps("shared", longer, shared)
    assert_same_steps(pair, longer, found)
    cached = int(read_records(folder, "shared")[0]["cached_prefix"])
    assert cached >= len(texts[0])
    assert int(found[0].values["features"].isnan().any(1).sum()) == cached
    assert sum(int(step.values["accepted_run"]) for step in found) > 0
