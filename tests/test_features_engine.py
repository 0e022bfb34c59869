"""Features out of an SGLang server: what is checked row by row, and a real server against hf."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from domino_kit.manifest import read_manifest
from domino_kit.serve.features import feature_command, feature_server
from domino_kit.serve.plugin import add_last_hidden
from domino_kit.serve.server import Server, ServerError
from domino_kit.train.cached_features import FeatureFacts, facts_of, read_index
from domino_kit.train.dataset import Sample
from domino_kit.train.engine_features import EngineFeatures
from domino_kit.train.feature_source import row_encoder
from domino_kit.train.features import encode_row
from domino_kit.train.loop import train
from domino_kit.train.prepare_features import run_prepare_features
from domino_kit.train.recipe import read_recipe
from domino_kit.train.run import train_run
from domino_kit.train.setup import Run, build_run
from tests.tiny_chat import chat_rows, save_target, write_jsonl

SAMPLE = Sample(0, "row-7", [5, 6, 7], [0, 1, 1])
GOOD: dict[str, Any] = {
    "enable_return_aux_hidden_states": True, "aux_hidden_state_capture": "dflash",
    "return_aux_hidden_state_layer_ids": [0, 2], "disable_radix_cache": True, "dtype": "float32",
    "chunked_prefill_size": -1, "model_path": "somewhere/else",
}  # fmt: skip


def facts(*, hidden: bool = False) -> FeatureFacts:
    return FeatureFacts(
        target="t", config_hash="", embedding_hash="", head_hash="", weights_hash=None,
        layer_ids=(0, 2), hidden_size=2, dtype="float32", hidden=hidden,
    )  # fmt: skip


def asking(answer: Any, status: int = 200, *, hidden: bool = False) -> EngineFeatures:
    """An encoder whose server always gives one answer."""
    encoder = EngineFeatures("http://server/v1", facts(hidden=hidden), torch.device("cpu"))

    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=answer)

    encoder._client = httpx.Client(
        transport=httpx.MockTransport(reply), base_url="http://server"
    )  # fmt: skip
    return encoder


def answer(rows: int = 3, width: int = 4, **meta: Any) -> dict[str, Any]:
    states = torch.arange(rows * width).view(rows, width).float().tolist()
    return {
        "prompt_token_ids": [5, 6, 7],
        "meta_info": {"prompt_tokens": 3, "cached_tokens": 0, "hidden_states": [states], **meta},
    }


def test_a_good_row_is_split_into_features_and_hidden_rows() -> None:
    features, hidden = asking(answer())(SAMPLE)
    assert features.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert hidden.shape == (3, 0)
    features, hidden = asking(answer(width=6), hidden=True)(SAMPLE)
    assert features[1].tolist() == [6, 7, 8, 9] and hidden[1].tolist() == [10, 11]


@pytest.mark.parametrize(
    ("said", "status", "hidden", "words"),
    [
        (answer(rows=2), 200, False, r"shape \[2, 4\]; 3 tokens need \[3, 4\]"),
        (answer(width=2), 200, False, r"shape \[3, 2\]"),
        (answer(), 200, True, r"need \[3, 6\], with last hidden rows: .*DOMINO_KIT_LAST_HIDDEN=1"),
        (answer(prompt_tokens=4), 200, False, "saw 4 tokens, 0 of them from a cache; the row has 3"),
        (answer(cached_tokens=2), 200, False, "2 of them from a cache"),
        ({**answer(), "prompt_token_ids": [5, 9, 7]}, 200, False, "other tokens, first at position 1"),
        (answer(hidden_states=None), 200, False, "no hidden states; .*--return-aux-hidden-state"),
        (answer(hidden_states=[[[1.0, 2.0], [3.0]]]), 200, False, "no matrix"),
        ({"error": "too long"}, 400, False, r"\(3 tokens\): http://server refused it: .*too long"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_names_the_row(
    said: Any, status: int, hidden: bool, words: str
) -> None:
    with pytest.raises(ServerError, match=words) as caught:
        asking(said, status, hidden=hidden)(SAMPLE)
    assert caught.match("row 'row-7'")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"enable_return_aux_hidden_states": False}, "has enable_return_aux_hidden_states False"),
        ({"return_aux_hidden_state_layer_ids": [0, 1]}, r"\[0, 1\], but this run needs \[0, 2\]"),
        ({"disable_radix_cache": False}, "disable_radix_cache False"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16', but this run needs 'float32'"),
        ({"chunked_prefill_size": 8}, r"chunked_prefill_size 8 tokens .* \(9 tokens\)"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(changed: Any, words: str) -> None:
    asking(GOOD).check_server(9)
    with pytest.raises(ValueError, match=words) as caught:
        asking({**GOOD, **changed}).check_server(9)
    assert caught.match("--disable-radix-cache --chunked-prefill-size -1 --dtype float32")


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    encoder = EngineFeatures("http://127.0.0.1:1", facts(), torch.device("cpu"))
    with pytest.raises(ServerError, match=r"features.url http://127.0.0.1:1 does not answer"):
        encoder.check_server(9)
    with pytest.raises(ServerError, match=r"row 'row-7': http://127.0.0.1:1 failed"):
        encoder(SAMPLE)


def test_a_family_without_the_capture_is_refused_before_a_start() -> None:
    with (
        pytest.raises(ValueError, match="family qwen2, whose hidden states"),
        feature_server(
            "t", [0], model_type="qwen2", device="cpu", dtype="float32", longest=9,
            last_hidden=False, trust_remote_code=False, environ={},
        ),
    ):  # fmt: skip
        pytest.fail("it must not start")


def test_the_command_has_room_for_the_longest_row() -> None:
    command = feature_command(
        "t", [1, 3], device="cpu", dtype="float32", longest=100_000, trust_remote_code=True, port=1
    )
    at = command.index("--return-aux-hidden-state-layer-ids")
    assert command[at + 1 : at + 3] == ["1", "3"]
    assert int(command[command.index("--max-total-tokens") + 1]) >= 100_001
    assert command.count("--max-total-tokens") == 1 and "--trust-remote-code" in command


def test_last_hidden_rows_stand_behind_the_captured_layers() -> None:
    captured, hidden = torch.ones(3, 4), torch.full((3, 2), 2.0)
    found = add_last_hidden(lambda *_: captured, None, hidden, None, [captured])
    assert found.tolist() == [[1, 1, 1, 1, 2, 2]] * 3
    assert add_last_hidden(lambda *_: None, None, hidden, None, [captured]) is None
    assert add_last_hidden(lambda *_: hidden, None, hidden, None, None) is hidden


# -- a real server --------------------------------------------------------------------------------


def build(folder: Path, family: str, name: str, *more: str) -> Run:
    target = folder / f"target-{family}"
    if not target.exists():
        save_target(target, family=family)
        write_jsonl(folder / "rows.jsonl", chat_rows(8))
    return build_run(
        read_recipe(
            None,
            [
                f"target.name={target}", f"data.train={folder / 'rows.jsonl'}",
                f"output.folder={folder / name}", "draft.num_layers=2",
                "draft.target_layer_ids=[0,2]", "draft.block_size=4", "draft.mask_token_id=1",
                "draft.gru_hidden_dim=16", "draft.emb_dim=12", "train.steps=6",
                "train.num_anchors=5", "train.lr=1e-3", "train.regress_steps=2",
                "target.device=cpu", "target.dtype=float32", *more,
            ],
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Callable[..., Run], Path]]:
    """A server of features with last hidden rows, and runs on its target."""
    pytest.importorskip("sglang")
    folder = tmp_path_factory.mktemp("served")
    run = build(folder, request.param, "first")
    with feature_server(
        run.recipe.target.name, run.target.layer_ids, model_type=request.param, device="cpu",
        dtype="float32", longest=64, last_hidden=True, trust_remote_code=False,
    ) as url:  # fmt: skip
        yield url, lambda *words: build(folder, request.param, *words), folder


@pytest.mark.sglang
@pytest.mark.slow
def test_served_features_equal_those_of_transformers(served: Any) -> None:
    url, make, _ = served
    run = make("rows", "features.backend=sglang", f"features.url={url}")
    own, largest = encode_row(run.target), 0.0
    with row_encoder(run, needs_hidden=True) as encode:
        for sample in run.samples:
            for found, expected in zip(encode(sample), own(sample), strict=True):
                assert found.shape == expected.shape and found.dtype == torch.float32
                scale = expected.abs().max()
                difference = float((found - expected).abs().max() / scale)
                assert difference < 1e-5  # also false for a value that is not a number
                largest = max(largest, difference)
    print(f"largest relative difference {largest:.1e}")


@pytest.mark.sglang
@pytest.mark.slow
def test_training_from_a_server_and_from_its_files_agrees_with_hf(served: Any) -> None:
    url, make, folder = served
    server = ["features.backend=sglang", f"features.url={url}"]
    runs = {"hf": make("hf"), "engine": make("engine", *server)}
    recipe = [f"{name}={value}" for name, value in {
        "target.name": runs["hf"].recipe.target.name, "data.train": folder / "rows.jsonl",
        "output.folder": folder / "none", "draft.num_layers": 2, "draft.target_layer_ids": [0, 2],
        "draft.mask_token_id": 1, "draft.block_size": 4, "train.steps": 6, "target.device": "cpu",
        "target.dtype": "float32", "train.regress_steps": 2,
    }.items()]  # fmt: skip
    stored = folder / f"stored-{runs['hf'].recipe.target.name.rsplit('-', 1)[-1]}"
    assert run_prepare_features(None, [*recipe, *server], stored, quiet=True) == 0
    assert read_index(stored).source == "sglang"
    assert read_index(stored).facts == facts_of(runs["hf"], hidden=True)
    cached = ["features.backend=cached", f"features.folder={stored}"]
    runs["files"] = make("files", *cached)
    for run in runs.values():
        assert train(run, [], quiet=True) == 6
    states = {name: run.model.state_dict() for name, run in runs.items()}
    largest = 0.0
    for name, value in states["hf"].items():
        assert torch.equal(states["engine"][name], states["files"][name]), name
        difference = float((states["engine"][name] - value).abs().max())
        assert difference < 1e-4, name
        largest = max(largest, difference)
    print(f"largest difference of a parameter {largest:.1e}")


@pytest.mark.sglang
@pytest.mark.slow
def test_a_server_of_other_weights_is_refused(served: Any) -> None:
    url, make, _ = served
    run = make("other", "features.backend=sglang", f"features.url={url}")
    other = facts_of(run, hidden=True).model_copy(update={"weights_hash": "0"})
    with pytest.raises(ValueError, match="whose weights are not those of"):
        EngineFeatures(url, other, torch.device("cpu")).check_server(9)


@pytest.mark.sglang
@pytest.mark.slow
def test_a_run_of_the_target_s_ends_starts_and_stops_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    whole = build(tmp_path, "llama", "whole")
    assert train(whole, [], quiet=True) == 6
    started: list[Server] = []

    class Watched(Server):
        def __enter__(self) -> Server:
            started.append(super().__enter__())
            return started[-1]

    monkeypatch.setattr("domino_kit.serve.features.Server", Watched)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    run = build(tmp_path, "llama", "ends", "target.load=ends", "features.backend=sglang")
    assert not started and run.whole_target is None and run.identity == whole.identity
    assert train_run(run, [], quiet=True)
    (server,) = started
    assert server.ended(within=0)
    for name, value in whole.model.state_dict().items():
        assert float((run.model.state_dict()[name] - value).abs().max()) < 1e-4, name
    manifest = read_manifest(tmp_path / "ends")
    assert manifest is not None and manifest.gate == "passed" and manifest.gate_lacks is not None
