"""From a conversation to token ids and the mask of what the target itself would generate."""

from typing import Any

from domino_kit.conversations import Row


def render(
    tokenizer: Any, messages: list[dict[str, Any]], thinking: bool | None, **extra: Any
) -> str:
    """The chat template applied once to the whole conversation, as text.

    Raises ``ValueError`` if the tokenizer has no template or the template refuses the messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template; use rows with input_ids and loss_mask, "
            "or a chat model."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, **_options(thinking), **extra
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from None


def _options(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking}


def _tools(row: Row) -> dict[str, Any]:
    return {} if row.tools is None else {"tools": row.tools}


def prompt_ids(
    tokenizer: Any, messages: list[dict[str, Any]], thinking: bool | None, **extra: Any
) -> list[int]:
    """Token ids of a prompt with the generation prompt, exactly what a server feeds the target.

    ``extra`` goes to the template, such as ``tools``.
    """
    text = render(tokenizer, messages, thinking, add_generation_prompt=True, **extra)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_row(
    tokenizer: Any, row: Row, thinking: bool | None, end_tokens: list[int]
) -> tuple[list[int], list[int]]:
    """Token ids of a row and its loss mask (1 where the target itself would have generated).

    Supervised is every assistant turn, unless its weight is 0, from its first generated character
    through its end token; what the template itself supplies (headers, empty think tags) is not.
    Raises ``ValueError`` naming the row if a turn cannot be found in the rendered text or nothing
    is supervised.
    """
    if row.input_ids is not None:
        assert row.loss_mask is not None
        _check_ids(tokenizer, row)
        return row.input_ids, _not_empty(row, row.loss_mask)
    if not any(message["role"] == "assistant" for message in row.messages):
        raise ValueError(f"{row.where} has no assistant turn, so there is nothing to learn.")
    extra = _tools(row)
    try:
        text = render(tokenizer, row.messages, thinking, **extra)
        opening = _generation_prompt(tokenizer, row, thinking, extra)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    spans = assistant_spans(text, row, opening, [tokenizer.decode([i]) for i in end_tokens])
    mask = [
        int(any(start <= left and right <= end and left < right for start, end in spans))
        for left, right in encoded["offset_mapping"]
    ]
    return ids, _not_empty(row, mask)


def check_template_tokens(tokenizer: Any, row: Row, thinking: bool | None) -> None:
    """Rendering to text and then to tokens must equal the template's own tokenised output.

    Raises ``ValueError`` with the first differing position.
    """
    if row.input_ids is not None:
        return
    tools = _tools(row)
    text = render(tokenizer, row.messages, thinking, **tools)
    own = tokenizer.apply_chat_template(
        row.messages, return_dict=True, **tools, **_options(thinking)
    )
    ours = tokenizer(text, add_special_tokens=False)["input_ids"]
    theirs = list(own["input_ids"])
    if ours != theirs:
        pairs = zip(ours, theirs, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        raise ValueError(
            f"{row.where}: the chat template's text and its token ids differ from token {place} "
            "on; the tokenizer is inconsistent."
        )


def _check_ids(tokenizer: Any, row: Row) -> None:
    assert row.input_ids is not None
    if max(row.input_ids) >= len(tokenizer):
        raise ValueError(
            f"{row.where}: input id {max(row.input_ids)} is beyond the tokenizer's "
            f"{len(tokenizer)} tokens; the row was made with another tokenizer."
        )


def _not_empty(row: Row, mask: list[int]) -> list[int]:
    if not any(mask):
        raise ValueError(f"{row.where} (id {row.row_id}) has no supervised token at all.")
    return mask


def _generation_prompt(
    tokenizer: Any, row: Row, thinking: bool | None, extra: dict[str, Any]
) -> str:
    """The text that opens an answer when the model is asked to generate."""
    first_answer = next(i for i, m in enumerate(row.messages) if m["role"] == "assistant")
    if first_answer == 0:
        raise ValueError("the conversation starts with an assistant turn.")
    asked = row.messages[:first_answer]
    plain = render(tokenizer, asked, thinking, **extra)
    opened = render(tokenizer, asked, thinking, add_generation_prompt=True, **extra)
    return opened.removeprefix(plain)


def assistant_spans(
    text: str, row: Row, opening: str, end_texts: list[str]
) -> list[tuple[int, int]]:
    """Character spans of what the target generated, found turn by turn in the rendered text.

    A span starts at the answer's text, or, if the rendered turn shows the message's reasoning,
    right after the generation prompt ``opening`` (the model then wrote the think tags itself,
    unless the prompt supplied them). It ends after the turn's end token where there is one and
    the answer was not cut.
    """
    spans = []
    cursor = 0
    header = opening.partition("<think>")[0]
    for number, message in enumerate(row.messages, start=1):
        reasoning, content = _split_reasoning(message)
        anchor_text = content.strip() or _tool_call_text(message)
        turn = text.find(header, cursor) if message["role"] == "assistant" else -1
        found = text.find(anchor_text, turn + len(header) if turn >= 0 else cursor)
        if found < 0:
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue  # a template may drop or rewrite what is not supervised
            raise ValueError(
                f"{row.where}, turn {number}: the chat template does not show this answer "
                "unchanged, so it cannot be supervised; rewrite or drop the row."
            )
        end = found + len(anchor_text)
        if message["role"] == "assistant":
            start = _span_start(text, cursor, found, reasoning, opening)
            if not (row.cut and number == len(row.messages)):
                end = _span_end(text, end, bool(message.get("tool_calls")), end_texts)
            if message.get("weight") != 0:
                spans.append((start, end))
        cursor = end
    return spans


def _split_reasoning(message: dict[str, Any]) -> tuple[str, str]:
    """Reasoning and answer, whether reasoning has its own field or sits in think tags."""
    content = message["content"]
    if message.get("reasoning_content"):
        return message["reasoning_content"].strip(), content
    if message["role"] == "assistant" and "</think>" in content:
        reasoning, _, answer = content.rpartition("</think>")
        return reasoning.rpartition("<think>")[2].strip(), answer
    return "", content


def _tool_call_text(message: dict[str, Any]) -> str:
    """For an answer that is only a tool call: the called function's name, as every template shows."""
    calls = message.get("tool_calls") or []
    return str(calls[0].get("function", calls[0]).get("name", "")) if calls else ""


def _span_start(text: str, cursor: int, found: int, reasoning: str, opening: str) -> int:
    before = text[cursor:found]
    if reasoning and reasoning in before:
        opened = before.rfind(opening, 0, before.find(reasoning) + 1)
        return cursor + (opened + len(opening) if opened >= 0 else before.find(reasoning))
    opened = before.rfind(opening)
    # A tool-call answer starts with markup before the function's name; only think tags, which the
    # template supplies for an answer without reasoning, stay outside.
    if opened >= 0 and "<think>" not in before[opened + len(opening) :]:
        return cursor + opened + len(opening)
    return found


def _span_end(text: str, end: int, has_calls: bool, end_texts: list[str]) -> int:
    """After the end token that closes the turn, or at the answer's end if none follows."""
    ends = [(text.find(word, end), len(word)) for word in end_texts if word]
    ends = [(place, size) for place, size in ends if place >= 0]
    if not ends:
        return end
    place, size = min(ends)
    between = text[end:place]
    return place + size if has_calls or not between.strip() else end
