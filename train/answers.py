"""How the target answers in this process, and what an answer is for every engine."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from domino_kit.decoding import Sampling


@dataclass(frozen=True)
class Question:
    """A prompt: the conversation so far, and the token ids that its template makes of it.

    ``seed`` belongs to this one answer, so that a sample does not depend on what was asked before.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    ids: list[int]
    seed: int


@dataclass(frozen=True)
class Answer:
    """An answer as a message; ``tokens`` with the end token, ``None`` where only text came back."""

    message: dict[str, Any]
    finish: str
    count: int
    tokens: list[int] | None = None


Ask = Callable[[Question], Awaitable[Answer]]


class Refused(Exception):
    """The engine refused one question; others may still be answered."""


@dataclass(frozen=True)
class Asking:
    """What is asked for with every question."""

    tokenizer: Any
    end_tokens: list[int]
    sampling: Sampling
    max_new_tokens: int
    thinking: bool | None


def from_tokens(asking: Asking, tokens: Sequence[int]) -> Answer:
    """An answer from its exact tokens.

    The text keeps special tokens, such as think tags: the template writes them again in training.
    What is left of a character that the limit cut is dropped, since no token stands for it.
    """
    body, finish = list(tokens), "length"
    if body and body[-1] in asking.end_tokens:
        body, finish = body[:-1], "stop"
    text = asking.tokenizer.decode(
        body, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if finish == "length":
        text = text.rstrip("\ufffd")
    return Answer({"role": "assistant", "content": text}, finish, len(tokens), list(tokens))


def in_process(model: Any, asking: Asking) -> Ask:
    """Ask a transformers model here, one question at a time.

    One at a time, because padding changes rounding: an answer must not depend on which others
    were still missing when a run was started again.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    sampling = asking.sampling
    # In place of the model's own: its penalties and temperature were not asked for.
    model.generation_config = GenerationConfig()
    settings: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        settings["top_k"] = sampling.top_k
    config = GenerationConfig(
        max_new_tokens=asking.max_new_tokens,
        eos_token_id=asking.end_tokens or None,
        pad_token_id=asking.end_tokens[0] if asking.end_tokens else 0,
        use_cache=True,
        **settings,
    )

    async def ask(question: Question) -> Answer:
        prompt = torch.tensor([question.ids], device=model.device)
        cuda = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            torch.manual_seed(question.seed)
            found = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config
            )
        return from_tokens(asking, found[0, len(question.ids) :].tolist())

    return ask
