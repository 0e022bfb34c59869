"""Prompts made long on purpose, and acceptance by the length of the context."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from domino_kit.chat_template import prompt_ids
from domino_kit.decoding import generate
from domino_kit.eval.positions import numbers, whole_steps
from domino_kit.eval.prompt_set import Prompt
from domino_kit.modeling import DominoDraft
from domino_kit.replay import KnownAnswer, replay
from domino_kit.target import Target

SHORTEST_DEFAULT = 64
LONGEST_DEFAULT = 65536
"""Where the default lengths end: beyond, attention over a whole prompt may not fit in memory."""

NOTES, ASKED = "Some notes:\n\n", "\n\nThe question:\n\n"


def build_long_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], thinking: bool | None, length: int, count: int
) -> list[list[int]]:
    """Token ids of the first ``count`` prompts, each lengthened to just under ``length`` tokens.

    Raises ``ValueError`` if a prompt alone is longer, or there are no other texts.
    """
    return [
        prompt_ids(tokenizer, prompt.messages, thinking)
        for prompt in lengthen(tokenizer, prompts, thinking, length, count)
    ]


def lengthen(
    tokenizer: Any, prompts: Sequence[Prompt], thinking: bool | None, length: int, count: int
) -> list[Prompt]:
    """The first ``count`` prompts with the texts of the others as notes before the question.

    As many words as fit in ``length`` tokens with the chat template; all prompts are used in turn,
    again from the first where they are not enough. Raises as :func:`build_long_prompts`.
    """
    found = []
    for place, prompt in enumerate(prompts[:count]):
        others = [*prompts[place + 1 :], *prompts[:place]]
        # A word is a token at least, so this many are enough.
        words = list(islice(_words(others), length))

        def size(used: int, prompt: Prompt = prompt, words: list[str] = words) -> int:
            messages = _with_notes(prompt, "".join(words[:used]))
            return len(prompt_ids(tokenizer, messages, thinking))

        used = bisect_right(range(len(words) + 1), length, key=size) - 1
        if used < 0:
            raise ValueError(
                f"prompt {prompt.prompt_id} alone has {size(0)} tokens, so it cannot be asked in a "
                f"context of {length}; give longer --lengths, or shorter prompts."
            )
        messages = _with_notes(prompt, "".join(words[:used]))
        found.append(replace(prompt, prompt_id=f"{prompt.prompt_id}@{length}", messages=messages))
    return found


def _words(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Words of the prompts' texts with the white space after each, over and over.

    Text without spaces is cut as well, so that a language without them gives short pieces too.
    """
    texts = ["\n".join(m["content"] for m in prompt.messages) for prompt in prompts]
    pieces = [word for text in texts for word in re.findall(r"\S{1,16}\s*", f"{text.strip()}\n\n")]
    if not pieces:
        raise ValueError(
            "longer contexts are made of the other prompts' texts, and there are none; give "
            "--prompts with more prompts."
        )
    while True:
        yield from pieces


def _with_notes(prompt: Prompt, notes: str) -> list[dict[str, Any]]:
    """The prompt's messages with notes before the text of its last user turn."""
    messages = list(prompt.messages)
    place = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if place is None:
        raise ValueError(f"prompt {prompt.prompt_id} has no user turn to put notes into.")
    if notes:
        text = f"{NOTES}{notes.rstrip()}{ASKED}{messages[place]['content']}"
        messages[place] = {**messages[place], "content": text}
    return messages


def choose_questions(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    thinking: bool | None,
    lengths: Sequence[int],
    count: int,
    longest: int,
) -> tuple[list[int], list[Prompt], int]:
    """The lengths to measure, all prompts with the questions first, and how many are questions.

    The same questions are asked at every length: the first ``count`` that fit in the shortest one.
    ``longest`` is what the positions of target and draft allow. Without ``lengths``: powers of two
    from one that ``count`` prompts fit in, and ``longest`` (at most :data:`LONGEST_DEFAULT`).

    Raises ``ValueError`` if no prompt fits, or a length is beyond ``longest``.
    """
    sizes = [len(prompt_ids(tokenizer, prompt.messages, thinking)) for prompt in prompts]
    wanted = sorted(set(lengths))
    if not wanted:
        natural = sorted(sizes)[min(count, len(sizes)) - 1]
        wanted = default_lengths(natural, min(longest, LONGEST_DEFAULT))
    elif wanted[-1] > longest:
        raise ValueError(
            f"--lengths {wanted[-1]} is too long: after the tokens to generate and a block, the "
            f"positions of target and draft leave room for prompts of {longest} tokens; lower it, "
            "or --max-new-tokens."
        )
    fits = [size <= wanted[0] for size in sizes]
    if not any(fits):
        raise ValueError(
            f"no prompt fits in a context of {wanted[0]} tokens, the shortest has {min(sizes)}; "
            "give longer --lengths, or shorter prompts."
        )
    questions = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit][:count]
    rest = [prompt for prompt in prompts if all(prompt is not question for question in questions)]
    return wanted, [*questions, *rest], len(questions)


def default_lengths(natural: int, longest: int) -> list[int]:
    """Powers of two, at least 64, that ``natural`` tokens fit in, below ``longest``; then that."""
    first = max(SHORTEST_DEFAULT, 1 << (natural - 1).bit_length())
    powers = [first << place for place in range(64) if first << place < longest]
    return [*powers, longest]


def longest_prompt(context: int, max_new_tokens: int, block_size: int) -> int:
    """Tokens of the longest prompt whose answer and last block stay within ``context`` positions.

    Raises ``ValueError`` if there is no room for a prompt at all.
    """
    longest = context - max_new_tokens - block_size
    if longest < 1:
        raise ValueError(
            f"target and draft have {context} positions, and --max-new-tokens {max_new_tokens} "
            f"with a block of {block_size} leaves no room for a prompt; lower --max-new-tokens."
        )
    return longest


def length_rows(
    lengths: Sequence[int],
    prompts: Sequence[tuple[int, Sequence[int] | None]],
    num_proposals: int,
) -> list[dict[str, Any]]:
    """One row a length, from prompt lengths and runs of equally many prompts for each in order.

    A row holds the wanted ``length``, how many ``prompts`` have known runs, the mean
    ``prompt_tokens``, :func:`.positions.numbers` of the whole steps, and the ``ratio`` of its
    accept length to the first row's.
    """
    count = len(prompts) // len(lengths)
    rows: list[dict[str, Any]] = []
    for place, length in enumerate(lengths):
        part = prompts[place * count : (place + 1) * count]
        known = [(size, runs) for size, runs in part if runs is not None]
        steps = [run for size, runs in known for _, run in whole_steps(size, runs, num_proposals)]
        row = {
            "length": length,
            "prompts": len(known),
            "prompt_tokens": sum(size for size, _ in part) / len(part),
            **numbers(steps, num_proposals),
        }
        first = (rows or [row])[0]["accept_length"]
        known_both = first is not None and row["accept_length"] is not None
        rows.append({**row, "ratio": row["accept_length"] / first if known_both else None})
    return rows


def sweep_lengths(
    target: Target,
    model: DominoDraft,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    thinking: bool | None,
    lengths: Sequence[int],
    count: int,
    max_new_tokens: int,
    end_tokens: list[int],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Replay the target's greedy answers to ``count`` questions at every length; see
    :func:`length_rows`, and :func:`choose_questions` for what is chosen and raised.
    """
    context = min(
        model.config.max_position_embeddings,
        int(target.text_config.max_position_embeddings),
    )
    longest = longest_prompt(context, max_new_tokens, model.config.block_size)
    lengths, prompts, count = choose_questions(
        tokenizer, prompts, thinking, lengths, count, longest
    )
    measured: list[tuple[int, Sequence[int] | None]] = []
    for length in lengths:
        for ids in build_long_prompts(tokenizer, prompts, thinking, length, count):
            say(f"{length} tokens: answer {len(measured) + 1} of {count * len(lengths)}")
            answer = generate(target, None, [ids], max_new_tokens, end_tokens)[0]
            runs = replay(target, model, [KnownAnswer(ids, answer.tokens)], batch_size=1)[0]
            measured.append((len(ids), runs))
    return length_rows(lengths, measured, model.config.num_proposals)
