"""From a conversation to token ids and the mask of what the target itself would generate."""

from dataclasses import replace
from typing import Any

from domino_kit.answer_spans import CLOSE, Answers, Messages, find_answers, is_learnt
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

    Supervised is every assistant turn, unless its weight is 0 or the template leaves its reasoning
    out (see :func:`split_row`), from its first generated character through its end token; what the
    template itself supplies (headers, empty think tags) is not. Raises ``ValueError`` naming the row
    if a turn is not shown unchanged or nothing is supervised.
    """
    if row.input_ids is not None:
        assert row.loss_mask is not None
        _check_ids(tokenizer, row)
        return row.input_ids, _not_empty(row, row.loss_mask)
    found = _answers(tokenizer, row, thinking, [tokenizer.decode([i]) for i in end_tokens])
    encoded = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
    # Some tokenizers leave spaces out of the offsets, so that a token of spaces is empty and lies
    # at its own end.
    mask = [
        int(any(start <= left and start < right <= end for start, end in found.spans))
        for left, right in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], _not_empty(row, mask)


def split_row(tokenizer: Any, row: Row, thinking: bool | None) -> list[Row]:
    """The row, with a row of its own for each answer whose reasoning the template leaves out of it.

    Templates of reasoning models show the reasoning of the last answer only. An answer was given
    after its reasoning, so it is learnt where that is shown: at the end of a conversation that ends
    with it. Elsewhere it is context, of weight 0.
    """
    earlier = [message for message in row.messages[:-1] if is_learnt(message)]
    if not any(m.get("reasoning_content") or CLOSE in m["content"] for m in earlier):
        return [row]
    alone = _answers(tokenizer, row, thinking, []).incomplete
    rows = [_only(row, place) for place in alone]
    left = [_context(each, place in alone) for place, each in enumerate(row.messages)]
    if any(map(is_learnt, left)):
        rows.append(replace(row, messages=left))
    return rows


def _only(row: Row, place: int) -> Row:
    """The conversation up to the answer at ``place``, which alone is learnt."""
    number = sum(message["role"] == "assistant" for message in row.messages[: place + 1])
    messages = [*(_context(each) for each in row.messages[:place]), row.messages[place]]
    return replace(
        row, row_id=f"{row.row_id}/{number}", where=f"{row.where}, answer {number}",
        messages=messages, cut=row.cut and place == len(row.messages) - 1,
    )  # fmt: skip


def _context(message: dict[str, Any], chosen: bool = True) -> dict[str, Any]:
    """The message with weight 0, if it is an answer."""
    return {**message, "weight": 0} if chosen and message["role"] == "assistant" else message


def _answers(tokenizer: Any, row: Row, thinking: bool | None, end_texts: list[str]) -> Answers:
    """The rendered row and where its answers lie; errors name the row."""
    if not any(message["role"] == "assistant" for message in row.messages):
        raise ValueError(f"{row.where} has no assistant turn, so there is nothing to learn.")

    def shown(messages: Messages, asked: bool) -> str:
        return render(tokenizer, messages, thinking, add_generation_prompt=asked, **_tools(row))

    try:
        return find_answers(shown, row, end_texts)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None


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
