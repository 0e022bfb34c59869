"""Where the target's own answers lie in a rendered conversation, in characters.

A template is a program: it inserts think tags, drops earlier reasoning and strips white space. So
no answer is searched for by its text, which may occur elsewhere: reasoning often repeats it. The
conversation is rendered a second time with stand-ins for the answers instead; what lies between two
stand-ins is the template's, and must be the same in both texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from domino_kit.conversations import Row

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""The template's text of messages, with the generation prompt or without."""

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Answers:
    """A rendered row: ``spans`` are what the target generated, as character ranges of ``text``.

    ``incomplete`` are the places among the messages of answers that have no span, because the
    template leaves out their reasoning: they were given after a text that is not shown.
    """

    text: str
    spans: list[tuple[int, int]]
    incomplete: list[int]


@dataclass(frozen=True)
class _Part:
    """A part of the answer at ``place`` that a template shows, and what stands in for it."""

    place: int
    text: str
    stand_in: str
    is_reasoning: bool = False


@dataclass(frozen=True)
class _Placed:
    """A part found in the text, after ``before``, which the template wrote or the user said."""

    part: _Part
    before: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.part.text)


def find_answers(render: Render, row: Row, end_texts: Sequence[str]) -> Answers:
    """Render a row and find every answer to learn, from its first generated character on.

    What the generation prompt or the template supplies, such as an empty think block, stays
    outside. A span ends after its turn's end token where there is one and the answer was not cut.
    Raises ``ValueError`` naming the turn that the template does not show unchanged.
    """
    opening = _generation_prompt(render, row.messages)
    messages, unfinished = row.messages, ""
    if _stopped_in_reasoning(row, opening):
        # No template shows reasoning without an end, so it follows the prompt, as it did.
        messages, unfinished = row.messages[:-1], row.messages[-1]["content"]
    asked = bool(unfinished)
    text = render(messages, asked)
    marked, parts = _with_stand_ins(messages)
    placed = _place(text, render(marked, asked), parts) if parts else []
    shown = {each.part for each in placed}
    incomplete = sorted({part.place for part in parts if part not in shown})
    spans = []
    for place, group in groupby(placed, key=lambda each: each.part.place):
        found, message = list(group), messages[place]
        if place in incomplete:
            continue
        start = found[0].start - _generated_before(found[0].before, opening, message)
        end = found[-1].end
        if asked or not row.cut or place < len(messages) - 1:
            end = _after_end_token(text, end, bool(message.get("tool_calls")), end_texts)
        spans.append((start, end))
    if unfinished:
        spans.append((len(text), len(text) + len(unfinished)))
    return Answers(text + unfinished, spans, incomplete)


def _generation_prompt(render: Render, messages: Messages) -> str:
    """The text that opens an answer when the model is asked to generate."""
    first = next(place for place, each in enumerate(messages) if each["role"] == "assistant")
    if first == 0:
        raise ValueError("the conversation starts with an assistant turn.")
    return render(messages[:first], True).removeprefix(render(messages[:first], False))


def _stopped_in_reasoning(row: Row, opening: str) -> bool:
    """Whether the last answer was cut before its reasoning ended."""
    last = row.messages[-1]
    if not row.cut or not is_learnt(last) or last.get("reasoning_content"):
        return False
    opened = opening.rfind(OPEN) > opening.rfind(CLOSE) or OPEN in last["content"]
    return opened and CLOSE not in last["content"]


def is_learnt(message: dict[str, Any]) -> bool:
    """Whether it is an answer that counts, not one that is context only."""
    return message["role"] == "assistant" and message.get("weight") != 0


# -- stand-ins -----------------------------------------------------------------------------------


def _with_stand_ins(messages: Messages) -> tuple[Messages, list[_Part]]:
    """The messages with a stand-in for every part of the answers to learn, and the parts in order.

    A stand-in keeps what a template may look at: the white space around a part, think tags, and
    whether there is a text at all. An answer that is only a tool call is known by its function.
    """
    word = "standin"
    while any(word in str(message) for message in messages):
        word += "n"
    marked: Messages = []
    parts: list[_Part] = []

    def swap(place: int, text: str, is_reasoning: bool = False) -> str:
        core = text.strip()
        if not core:
            return text
        parts.append(_Part(place, core, f"{word}-{len(parts)}-", is_reasoning))
        return text.replace(core, parts[-1].stand_in, 1)

    for place, message in enumerate(messages):
        if not is_learnt(message):
            marked.append(message)
            continue
        reasoning, content = message.get("reasoning_content"), message["content"]
        changed = dict(message)
        if reasoning:
            changed["reasoning_content"] = swap(place, reasoning, True)
        lead, tag = "", ""
        if not reasoning and CLOSE in content:
            thought, tag, content = content.partition(CLOSE)
            before, opened, thought = thought.rpartition(OPEN)
            lead = before + opened + swap(place, thought, True)
        changed["content"] = lead + tag + swap(place, content)
        if not content.strip() and message.get("tool_calls"):
            first, *others = message["tool_calls"]
            call = first.get("function", first)
            call = {**call, "name": swap(place, str(call.get("name", "")))}
            changed["tool_calls"] = [{**first, "function": call} if "function" in first else call]
            changed["tool_calls"] += others
        marked.append(changed)
    return marked, parts


def _place(text: str, marked: str, parts: Sequence[_Part]) -> list[_Placed]:
    """The parts in ``text``, in order, found through the stand-ins in ``marked``.

    Reasoning that the template leaves out is missing; anything else is an error.
    """
    placed: list[_Placed] = []
    cursor = 0
    for part in parts:
        before, found, after = marked.partition(part.stand_in)
        if not found and part.is_reasoning:
            continue
        for each in parts:  # a template may show the name of a called function again
            before = before.replace(each.stand_in, each.text)
        if not found or not text.startswith(before + part.text, cursor):
            raise ValueError(
                f"the chat template does not show the answer in turn {part.place + 1} unchanged, "
                "so it cannot be supervised; rewrite or drop the row."
            )
        placed.append(_Placed(part, before, cursor + len(before)))
        cursor, marked = placed[-1].end, after
    return placed


# -- the ends of a span --------------------------------------------------------------------------


def _generated_before(before: str, opening: str, message: dict[str, Any]) -> int:
    """How many characters at the end of ``before`` the target wrote ahead of an answer's first part.

    Those are think tags and the markup of a tool call, but not what the prompt ``opening`` holds, nor
    a think block that the template added to an answer without one.
    """
    header = opening.partition(OPEN)[0]
    if not header:  # nothing opens an answer, so it begins with the space that sets it off
        return len(before) - len(before.rstrip(" "))
    turn = before.rfind(header)
    if turn < 0:
        return 0
    supplied = opening if before.startswith(opening, turn) else header
    written = before[turn + len(supplied) :]
    own = message.get("reasoning_content") or CLOSE in message["content"]
    if CLOSE in written and not own:
        written = written.rpartition(CLOSE)[2].lstrip()
    return len(written)


def _after_end_token(text: str, end: int, has_calls: bool, end_texts: Sequence[str]) -> int:
    """After the end token that closes the turn, or ``end`` if none follows the answer."""
    ends = [(text.find(word, end), len(word)) for word in end_texts if word]
    ends = [(place, size) for place, size in ends if place >= 0]
    if not ends:
        return end
    place, size = min(ends)
    return place + size if has_calls or not text[end:place].strip() else end
