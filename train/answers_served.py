"""How servers answer: SGLang's own interface with token ids, or chat completions of any server."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from domino_kit.serve.server import ServerError
from domino_kit.train.answers import Answer, Ask, Asking, Question, Refused, from_tokens

ATTEMPTS = 6
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
REQUEST_SECONDS = 1800.0
KEY_VARIABLE = "DOMINO_API_KEY"
"""Environment variable with the key of a server that asks for one."""


class Servers:
    """One or several equal servers, asked in turn; a request that fails is tried at the next."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._client, self._urls = client, itertools.cycle(urls)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that a server answers.

        Busy, broken or unreachable servers are tried again, each time after twice the wait. Raises
        ``ServerError`` when that did not help, or will not, and ``Refused`` if this one request is
        at fault.
        """
        said = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)))
            url = next(self._urls)
            try:
                response = await self._client.post(url + path, json=body)
            except httpx.TransportError as error:
                said = f"{url} did not answer: {str(error) or type(error).__name__}"
                continue
            if response.status_code == 200:
                return _json(response, url + path)
            said = f"{url}{path} answered {response.status_code}: {_words(response)}"
            if response.status_code in (400, 413, 422):
                raise Refused(said)
            if response.status_code != 429 and response.status_code < 500:
                raise ServerError(f"{said}; check --url and {KEY_VARIABLE}.")
        raise ServerError(f"{said}; given up after {ATTEMPTS} attempts.")

    async def served_model(self, target: str) -> str:
        """The name under which a server knows the target: its own first one, where it has a list."""
        try:
            response = await self._client.get(next(self._urls) + "/v1/models")
            names = [model["id"] for model in response.raise_for_status().json()["data"]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return target
        return target if target in names or not names else str(names[0])


def _json(response: httpx.Response, where: str) -> Any:
    try:
        return response.json()
    except ValueError:
        raise ServerError(f"{where} answered something that is not JSON.") from None


def _words(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200] or "no reason given"


@asynccontextmanager
async def open_servers(urls: Sequence[str], concurrency: int) -> AsyncIterator[Servers]:
    """The servers for the time of the block."""
    key = os.environ.get(KEY_VARIABLE)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(REQUEST_SECONDS, connect=30.0),
        limits=httpx.Limits(max_connections=concurrency),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    ) as client:
        yield Servers(client, urls)


# -- SGLang's own interface ------------------------------------------------------------------------


def by_token_ids(servers: Servers, asking: Asking) -> Ask:
    """Ask an SGLang server with token ids, so that prompt and answer are exact."""
    sampling = asking.sampling

    async def ask(question: Question) -> Answer:
        settings: dict[str, Any] = {
            "max_new_tokens": asking.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": asking.end_tokens,
        }
        if not sampling.greedy:
            # Obeyed with --enable-deterministic-inference; else the server's own seed counts.
            settings["sampling_seed"] = question.seed
        found = await servers.post(
            "/generate", {"input_ids": question.ids, "sampling_params": settings}
        )
        try:
            tokens = [int(token) for token in found["output_ids"]]
            reason = found["meta_info"]["finish_reason"]
        except (LookupError, TypeError, ValueError):
            raise ServerError("the SGLang server's answer has no output_ids.") from None
        if (reason or {}).get("type") == "abort":
            raise Refused(f"the server ended a request: {reason.get('message')}")
        return from_tokens(asking, tokens)

    return ask


async def check_rendered(servers: Servers, asking: Asking, question: Question) -> None:
    """Raise ``ServerError`` unless the server makes the same token ids of a conversation as we do.

    Otherwise its users would be answered from other prompts than those of the training rows.
    """
    body: dict[str, Any] = {"messages": question.messages, **_template_options(asking)}
    if question.tools is not None:
        body["tools"] = question.tools
    try:
        theirs = (await servers.post("/v1/tokenize", body))["tokens"]
    except Refused as error:
        raise ServerError(f"the server could not render a conversation: {error}") from None
    if theirs != question.ids:
        pairs = zip(theirs, question.ids, strict=False)
        shorter = min(len(theirs), len(question.ids))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        raise ServerError(
            f"the server renders the first prompt as {len(theirs)} tokens and the target's own "
            f"template as {len(question.ids)}, different from token {place} on; leave out flags "
            "that change the chat template."
        )


# -- chat completions ----------------------------------------------------------------------------


def by_chat(servers: Servers, asking: Asking, model: str) -> Ask:
    """Ask any OpenAI-compatible server; it returns text, and renders the prompt itself."""
    sampling = asking.sampling

    async def ask(question: Question) -> Answer:
        body: dict[str, Any] = {
            "model": model,
            "messages": question.messages,
            "max_tokens": asking.max_new_tokens,
            "temperature": sampling.temperature,
            **_template_options(asking),
        }
        if not sampling.greedy:
            body |= {"top_p": sampling.top_p, "seed": question.seed}
            if sampling.top_k:
                body["top_k"] = sampling.top_k
        if question.tools is not None:
            body["tools"] = question.tools
        found = await servers.post("/v1/chat/completions", body)
        answer = _from_completion(found, asking.tokenizer)
        _check_prompt_count(found, question)
        return answer

    return ask


def _template_options(asking: Asking) -> dict[str, Any]:
    if asking.thinking is None:
        return {}
    return {"chat_template_kwargs": {"enable_thinking": asking.thinking}}


def _from_completion(found: Any, tokenizer: Any) -> Answer:
    try:
        choice = found["choices"][0]
        given = choice["message"]
        message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or ""}
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        calls = given.get("tool_calls")
        counted = (found.get("usage") or {}).get("completion_tokens")
    except (LookupError, TypeError, AttributeError):
        raise ServerError(
            "a server's answer is not a chat completion: it has no message."
        ) from None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    text = (reasoning or "") + message["content"]
    count = counted if isinstance(counted, int) else len(tokenizer(text)["input_ids"])
    return Answer(message, finish, count)


def _check_prompt_count(found: Any, question: Question) -> None:
    """A prompt of another length was rendered otherwise than training will render it."""
    counted = (found.get("usage") or {}).get("prompt_tokens")
    if isinstance(counted, int) and counted not in (0, len(question.ids)):
        raise ServerError(
            f"the server counts {counted} tokens in a prompt that the target's own template writes "
            f"as {len(question.ids)}: it runs another model, template or thinking mode, so its "
            "answers would be trained on other prompts; check --target, --thinking and the server."
        )
