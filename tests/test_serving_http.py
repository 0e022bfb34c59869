"""One real server, many clients: the OpenAI interface, sampling, refusals, aborts, memory."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("sglang")
import openai
from scipy.stats import chisquare

from domino_kit.chat_template import prompt_ids
from domino_kit.decoding import Sampling, generate
from domino_kit.draft_contract import weights_identity
from domino_kit.eval.served import ask_all
from domino_kit.serve.confirm import measure_gain, read_report
from domino_kit.target import load_tokenizer
from tests.serving import (
    Expected,
    Pair,
    assert_served,
    expected,
    prompts_for,
    serving,
    trained_pair,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
MESSAGES: list[Any] = [{"role": "user", "content": "say 3"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("pair"), block_size=4)


@pytest.fixture(scope="module")
def url(pair: Pair) -> Iterator[str]:
    with serving(pair) as server:
        yield server.url


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    return prompts_for(pair, 12, seed=5)


@pytest.fixture(scope="module")
def wanted(pair: Pair, prompts: list[list[int]]) -> Expected:
    return expected(pair, prompts, 40)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def chat_answer(pair: Pair, max_tokens: int) -> str:
    """The text of the target's own greedy answer to MESSAGES."""
    tokenizer = load_tokenizer(str(pair.target), False)
    target, _ = pair.load()
    ids = prompt_ids(tokenizer, MESSAGES, None)
    tokens = generate(target, None, [ids], max_tokens, [3])[0].tokens
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_report_of_the_plugin(url: str, pair: Pair) -> None:
    report = read_report(url)
    assert report["platform"] == "cpu"
    assert report["process_group"] > 1
    assert report["hooks_missing"] == []
    assert report["draft"] == {
        "head": True, "block_size": 4, "mask_token_id": 1, "shift_label": True,
        "candidate_pool_size": 0, "target_layer_ids": [0, 2], "plain_requests": True,
        "dtype": "float32", "weights": weights_identity(pair.draft),
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 30])
def test_chat_completion(pair: Pair, client: openai.OpenAI, max_tokens: int) -> None:
    """Also where max_tokens falls inside a block."""
    answer = client.chat.completions.create(
        model=model_name(client), messages=MESSAGES, max_tokens=max_tokens, temperature=0
    )
    assert answer.choices[0].message.content == chat_answer(pair, max_tokens)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= max_tokens


def test_streamed_chat_completion(pair: Pair, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=model_name(client), messages=MESSAGES, max_tokens=30, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == chat_answer(pair, 30)


def test_text_completion_and_stop_string(
    pair: Pair, client: openai.OpenAI, prompts: list[list[int]], wanted: Expected
) -> None:
    tokenizer = load_tokenizer(str(pair.target), False)
    whole = tokenizer.decode(wanted.tokens[0])
    answer = client.completions.create(
        model=model_name(client), prompt=prompts[0], max_tokens=40, temperature=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    assert answer.choices[0].text == whole
    stop = whole[4:7]
    cut = client.completions.create(
        model=model_name(client), prompt=prompts[0], max_tokens=40, temperature=0, stop=[stop],
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )  # fmt: skip
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probabilities_are_the_targets(
    pair: Pair, url: str, prompts: list[list[int]], wanted: Expected
) -> None:
    body = {
        "input_ids": prompts[1], "sampling_params": GREEDY, "return_logprob": True,
        "top_logprobs_num": 2,
    }  # fmt: skip
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    target, _ = pair.load()
    ids = torch.tensor([prompts[1] + wanted.tokens[1]])
    with torch.no_grad():
        hidden = target.encode(ids, torch.ones_like(ids)).hidden
        logs = target.logits(hidden)[0].log_softmax(-1)[len(prompts[1]) - 1 : -1]
    found = meta["output_token_logprobs"]
    assert [each[1] for each in found] == wanted.tokens[1]
    for place, (logprob, token, _) in enumerate(found):
        assert logprob == pytest.approx(float(logs[place, token]), abs=1e-4)
    for place, best in enumerate(meta["output_top_logprobs"]):
        assert [each[1] for each in best] == logs[place].topk(2).indices.tolist()


def test_a_shared_prefix_is_reused_exactly(url: str, prompts: list[list[int]], pair: Pair) -> None:
    """Prompts that continue an earlier one with its answer are found in the prefix cache."""
    longer = [prompts[0] + [40, 41, 42, place] for place in range(50, 58)]
    ask_all(url, [prompts[0] + [40, 41, 42]], GREEDY, 1)
    body = {"input_ids": longer[0], "sampling_params": GREEDY}
    meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
    assert meta["cached_tokens"] >= len(prompts[0])
    answers, _ = ask_all(url, longer, GREEDY, 8)
    assert_served(answers, expected(pair, longer, 40), 3)


def test_requests_without_the_draft(url: str, prompts: list[list[int]], wanted: Expected) -> None:
    plain = {**GREEDY, "custom_params": {"speculate": False}}
    answers, _ = ask_all(url, prompts, plain, 4)
    assert [answer.tokens for answer in answers] == wanted.tokens
    assert all(answer.pieces == [1] * 40 for answer in answers if len(answer.pieces) == 40)
    # Their prefixes serve later requests with the draft.
    drafted, _ = ask_all(url, prompts, GREEDY, 4)
    assert_served(drafted, wanted, 3)
    gain = measure_gain(url, prompts[:2], 20, plain=True, exact=True)
    assert gain is not None
    assert measure_gain(url, prompts[:2], 1, plain=True, exact=True) is None
    assert 1.0 <= gain.accept_length <= 4.0
    assert gain.cycle_cost is not None


def test_plain_requests_beside_drafted_ones(
    url: str, prompts: list[list[int]], wanted: Expected
) -> None:
    """A batch of both is drafted for all; answers do not depend on it."""

    async def both() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as web:
            plain = {**GREEDY, "custom_params": {"speculate": False}}
            bodies = [
                {"input_ids": ids, "sampling_params": plain if place % 2 else GREEDY}
                for place, ids in enumerate(prompts)
            ]
            return await asyncio.gather(*(web.post("/generate", json=body) for body in bodies))

    assert [each.json()["output_ids"] for each in asyncio.run(both())] == wanted.tokens


def test_log_probabilities_without_the_draft(url: str, prompts: list[list[int]]) -> None:
    found = []
    for more in ({}, {"custom_params": {"speculate": False}}):
        body = {"input_ids": prompts[2], "sampling_params": {**GREEDY, **more},
                "return_logprob": True}  # fmt: skip
        meta = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]
        found.append(meta["output_token_logprobs"])
    assert [each[1] for each in found[0]] == [each[1] for each in found[1]]
    assert [each[0] for each in found[0]] == pytest.approx([each[0] for each in found[1]], abs=1e-4)


SAMPLED = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 3, "ignore_eos": True}
DRAWS = 20_000


def test_sampled_requests_keep_the_targets_distribution(pair: Pair, url: str) -> None:
    """The joint distribution of three tokens over 20,000 draws, against the target's own."""
    # Where the draft is right after the first token, so that drafts are really accepted.
    several = prompts_for(pair, 60, seed=11)
    runs = expected(pair, several, 4).runs
    prompt = next(ids for ids, run in zip(several, runs, strict=True) if run[0] >= 2)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for _ in range(DRAWS // 500):
        body = {"input_ids": [prompt] * 500, "sampling_params": SAMPLED}
        for answer in httpx.post(f"{url}/generate", json=body, timeout=600).json():
            counts[tuple(answer["output_ids"])] += 1
            accepted += answer["meta_info"].get("spec_num_correct_drafts", 0)
    assert accepted > DRAWS // 100, "hardly a draft was accepted, so this would test nothing"
    target, _ = pair.load()
    chances = _joint(target, prompt, Sampling(temperature=0.7, top_k=5))
    assert set(counts) <= set(chances)
    assert _p_value(counts, chances) > 1e-4


def _joint(target: Any, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of three tokens."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, chance in chances.items():
            ids = torch.tensor([prompt + list(tokens)])
            with torch.no_grad():
                logits = target.logits(target.encode(ids, torch.ones_like(ids)).hidden[:, -1])
            probs = sampling.probabilities(logits)[0]
            for token in probs.nonzero()[:, 0].tolist():
                grown[(*tokens, token)] = chance * float(probs[token])
        chances = grown
    return chances


def _p_value(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Chi-square, with all rare continuations as one."""
    total = sum(counts.values())
    common = [tokens for tokens, chance in chances.items() if chance * total >= 20]
    found = [counts[tokens] for tokens in common]
    wanted = [chances[tokens] * total for tokens in common]
    found.append(total - sum(found))
    wanted.append(total - sum(wanted))
    if wanted[-1] < 5:
        found[-2:] = [sum(found[-2:])]
        wanted[-2:] = [sum(wanted[-2:])]
    return float(chisquare(found, wanted).pvalue)


def test_a_greedy_request_beside_sampled_ones_stays_greedy(
    url: str, prompts: list[list[int]], wanted: Expected
) -> None:
    async def both() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as web:
            hot = {**GREEDY, "temperature": 1.0, "top_p": 0.9, "min_p": 0.01}
            bodies = [
                {"input_ids": ids, "sampling_params": GREEDY if place % 2 else hot}
                for place, ids in enumerate(prompts)
            ]
            return await asyncio.gather(*(web.post("/generate", json=body) for body in bodies))

    for place, response in enumerate(asyncio.run(both())):
        if place % 2:
            assert response.json()["output_ids"] == wanted.tokens[place]


@pytest.mark.parametrize(
    "asked",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2},
     {"min_new_tokens": 5}],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_what_cannot_be_exact_is_refused(url: str, prompts: list[list[int]], asked: Any) -> None:
    body = {"input_ids": prompts[0], "sampling_params": {**GREEDY, **asked}}
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert next(iter(asked)) in response.text


def test_logit_bias_is_exact(url: str, client: openai.OpenAI, prompts: list[list[int]]) -> None:
    answer = client.completions.create(
        model=model_name(client), prompt=prompts[0], max_tokens=12, temperature=0,
        logit_bias={"77": 1000}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    tokens = answer.choices[0].text
    assert len(set(tokens)) == 1, tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": "no list", "model": "x"}),
        ("/v1/chat/completions", {"model": "x"}),
        ("/v1/completions", {"model": "x", "prompt": "a", "max_tokens": -5}),
        ("/generate", {"sampling_params": {}}),
        ("/generate", {"input_ids": [5, 6], "sampling_params": {"temperature": -1}}),
        ("/generate", {"input_ids": [5] * 5000, "sampling_params": {"max_new_tokens": 4}}),
    ],
)
def test_malformed_requests_are_refused_and_the_server_lives(
    url: str, path: str, body: dict[str, Any], prompts: list[list[int]], wanted: Expected
) -> None:
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert 400 <= response.status_code < 500, response.text
    answers, _ = ask_all(url, prompts[:1], GREEDY, 1)
    assert answers[0].tokens == wanted.tokens[0]


def test_constrained_requests_are_exact_or_refused(client: openai.OpenAI) -> None:
    """A regular expression holds for every token although a block is verified at once."""
    import re

    for _ in range(3):
        answer = client.completions.create(
            model=model_name(client), prompt="say 3", max_tokens=24, temperature=0,
            extra_body={"regex": "(ab|cd){3}[0-9]{2}"},
        )  # fmt: skip
        assert re.fullmatch("(ab|cd){3}[0-9]{2}", answer.choices[0].text)


def free_tokens(url: str) -> int:
    """Slots of the KV pool in use once the prefix cache is empty, as a negative number."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    loads = httpx.get(f"{url}/v1/loads", timeout=60).json()["loads"]
    return -int(loads[0]["num_used_tokens"])


def test_64_requests_with_a_third_aborted(
    pair: Pair, url: str, prompts: list[list[int]], wanted: Expected
) -> None:
    """Nothing hangs, all slots come back, and a later greedy request is exact."""
    before = free_tokens(url)
    many = prompts_for(pair, 64, seed=21, longest=100)

    async def one(web: httpx.AsyncClient, place: int) -> int:
        length = 8 + 5 * (place % 13)
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": many[place], "sampling_params": sampling, "stream": True}
        tokens = 0
        async with web.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                tokens += line.startswith("data: {")
                if place % 3 == 0 and tokens >= 2:
                    return -1  # leaving the stream aborts the request
        return tokens

    async def everyone() -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as web:
            return await asyncio.wait_for(
                asyncio.gather(*(one(web, place) for place in range(64))), timeout=300
            )

    done = asyncio.run(everyone())
    assert sum(tokens == -1 for tokens in done) >= 20
    assert all(tokens > 0 for place, tokens in enumerate(done) if place % 3)
    for _ in range(60):
        if free_tokens(url) == before:
            break
        asyncio.run(asyncio.sleep(0.5))
    assert free_tokens(url) == before
    answers, _ = ask_all(url, prompts, GREEDY, 8)
    assert_served(answers, wanted, 3)


def test_aborting_others_half_way_changes_nothing(
    url: str, prompts: list[list[int]], wanted: Expected
) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as web:
            bodies = [
                {"input_ids": ids, "sampling_params": GREEDY, "rid": f"own-{place}"}
                for place, ids in enumerate(prompts)
            ]
            tasks = [asyncio.create_task(web.post("/generate", json=body)) for body in bodies]
            await asyncio.sleep(0.15)
            for place in range(0, len(prompts), 2):
                await web.post("/abort_request", json={"rid": f"own-{place}"})
            return [(await task).json()["output_ids"] for task in tasks[1::2]]

    assert asyncio.run(run()) == wanted.tokens[1::2]
