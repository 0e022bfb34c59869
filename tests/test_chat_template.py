"""The supervised span: exactly what the target itself would have generated, in every template."""

from typing import Any

import pytest
from tokenizers import processors

from domino_kit.chat_template import encode_row, prompt_ids, split_row
from domino_kit.conversations import Row, parse_row
from domino_kit.train.dataset import build_samples
from tests.tiny_chat import PLAIN, THINKING, tiny_tokenizer

END = [3]


def supervised(
    template: str, messages: list[Any], thinking: bool | None = None, **fields: Any
) -> str:
    """The supervised tokens as text, spans separated by a bar."""
    tokenizer = tiny_tokenizer(template)
    row = Row("data.jsonl:1", "1", messages=messages, **fields)
    ids, mask = encode_row(tokenizer, row, thinking, END)
    spans: list[list[int]] = []
    for index, flag in enumerate(mask):
        if flag and (index == 0 or not mask[index - 1]):
            spans.append([])
        if flag:
            spans[-1].append(ids[index])
    return "|".join(tokenizer.decode(span) for span in spans)


def turn(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


def test_one_turn_with_its_end_token() -> None:
    messages = [turn("user", "hello"), turn("assistant", "good day")]
    assert supervised(PLAIN, messages) == "good day<|im_end|>"


def test_every_assistant_turn_of_a_conversation() -> None:
    messages = [turn("system", "be kind"), turn("user", "a"), turn("assistant", "b"),
                turn("user", "a b"), turn("assistant", "a")]  # fmt: skip
    assert supervised(PLAIN, messages) == "b<|im_end|>|a<|im_end|>"


def test_answer_that_repeats_the_question_is_found_in_its_own_turn() -> None:
    messages = [turn("user", "assistant"), turn("assistant", "user"), turn("user", "user"),
                turn("assistant", "assistant")]  # fmt: skip
    assert supervised(PLAIN, messages) == "user<|im_end|>|assistant<|im_end|>"


def test_cut_answer_has_no_end_token() -> None:
    messages = [turn("user", "hello"), turn("assistant", "good d")]
    assert supervised(PLAIN, messages, cut=True) == "good d"


@pytest.mark.parametrize("thinking", [None, True, False])
def test_inserted_empty_think_block_is_not_supervised(thinking: bool | None) -> None:
    messages = [turn("user", "hello"), turn("assistant", "good day")]
    assert supervised(THINKING, messages, thinking) == "good day<|im_end|>"


@pytest.mark.parametrize(
    "answer",
    [
        turn("assistant", "four", reasoning_content="two and two"),
        turn("assistant", "<think>\ntwo and two\n</think>\n\nfour"),
    ],
)
def test_reasoning_is_supervised_with_the_tags_that_the_model_writes(
    answer: dict[str, Any],
) -> None:
    messages = [turn("user", "2+2"), answer]
    expected = "<think>\ntwo and two\n</think>\n\nfour<|im_end|>"
    assert supervised(THINKING, messages, True) == expected


def test_answer_without_its_reasoning_is_learnt_in_a_row_of_its_own() -> None:
    messages = [turn("user", "2+2"), turn("assistant", "four", reasoning_content="two and two"),
                turn("user", "3+3"), turn("assistant", "six")]  # fmt: skip
    assert supervised(THINKING, messages, True) == "six<|im_end|>"
    row = Row("data.jsonl:1", "7", messages=messages, cut=True)
    alone, rest = split_row(tiny_tokenizer(THINKING), row, True)
    assert (alone.row_id, alone.where, alone.cut) == ("7/1", "data.jsonl:1, answer 1", False)
    expected = "<think>\ntwo and two\n</think>\n\nfour<|im_end|>"
    assert supervised(THINKING, alone.messages, True) == expected
    assert (rest.row_id, rest.cut) == ("7", True)
    assert supervised(THINKING, rest.messages, True) == "six<|im_end|>"
    samples, _ = build_samples(
        [row], tiny_tokenizer(THINKING), thinking=True, end_tokens=END, max_length=500,
        min_supervised=2,
    )  # fmt: skip
    assert [sample.row_id for sample in samples] == ["7/1", "7"]


def test_template_that_shows_all_reasoning_needs_no_other_rows() -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    messages = [turn("user", "a"), turn("assistant", "b", reasoning_content="b?"),
                turn("user", "c"), turn("assistant", "d", reasoning_content="d?")]  # fmt: skip
    row = Row("f:1", "1", messages=messages)
    assert split_row(tiny_tokenizer(template), row, True) == [row]
    assert supervised(template, messages, True) == "b?b<|im_end|>|d?d<|im_end|>"


def test_reasoning_that_repeats_the_answer_ends_nothing_early() -> None:
    answer = turn("assistant", "four", reasoning_content="four is four")
    expected = "<think>\nfour is four\n</think>\n\nfour<|im_end|>"
    assert supervised(THINKING, [turn("user", "2+2"), answer], True) == expected


def test_prompt_that_opens_the_reasoning_itself() -> None:
    template = THINKING.replace(
        "<think>\n\n</think>\n\n{% endif %}{% endif %}", "{% endif %}<think>\n{% endif %}"
    )
    asked = turn("user", "2+2")
    answer = turn("assistant", "two and two\n</think>\n\nfour")
    expected = "two and two\n</think>\n\nfour<|im_end|>"
    assert supervised(template, [asked, answer]) == expected
    cut = turn("assistant", "two and")
    assert supervised(template, [asked, cut], cut=True) == "two and"


def test_template_without_a_header_leaves_the_space_to_the_answer() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    messages = [
        turn("user", "a"),
        turn("assistant", "b"),
        turn("user", "a"),
        turn("assistant", "c"),
    ]
    assert supervised(template, messages) == " b<|im_end|>| c<|im_end|>"


def test_spaces_that_the_tokenizer_leaves_out_of_its_offsets() -> None:
    tokenizer = tiny_tokenizer(PLAIN)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = Row("f:1", "1", messages=[turn("user", "a"), turn("assistant", "b    c")])
    ids, mask = encode_row(tokenizer, row, None, END)
    span = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert tokenizer.decode(span) == "b    c<|im_end|>"


def test_prompt_and_answer_tokens_join_to_the_rendered_conversation() -> None:
    tokenizer = tiny_tokenizer(THINKING)
    messages = [turn("user", "hello"), turn("assistant", "good day")]
    ids, mask = encode_row(tokenizer, Row("f:1", "1", messages=messages), False, END)
    prompt = prompt_ids(tokenizer, messages[:1], False)
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt)] == [0] * len(prompt)
    assert mask[len(prompt)] == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([turn("user", "hello")], "no assistant turn"),
        ([turn("assistant", "hello")], "starts with an assistant turn"),
    ],
)
def test_rows_without_anything_to_learn_are_named(messages: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.jsonl:7.*{words}"):
        encode_row(tiny_tokenizer(), Row("data.jsonl:7", "x", messages=messages), None, END)


def test_template_that_rewrites_an_answer_is_refused() -> None:
    template = PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}")
    with pytest.raises(ValueError, match=r"turn 2.*unchanged"):
        supervised(template, [turn("user", "a"), turn("assistant", "b")])


def test_tokenizer_without_template_is_named() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode_row(tiny_tokenizer(None), Row("f:1", "1", messages=[turn("user", "a"),
                   turn("assistant", "b")]), None, END)  # fmt: skip


def test_all_zero_mask_names_the_row() -> None:
    row = Row("f:3", "x", input_ids=[10, 11], loss_mask=[0, 0])
    with pytest.raises(ValueError, match=r"f:3 \(id x\) has no supervised token"):
        encode_row(tiny_tokenizer(), row, None, END)


def test_ids_of_another_tokenizer_are_refused() -> None:
    row = Row("f:3", "x", input_ids=[10, 9999], loss_mask=[0, 1])
    with pytest.raises(ValueError, match="9999"):
        encode_row(tiny_tokenizer(), row, None, END)


def test_all_layouts_of_one_dialogue_give_the_same_row() -> None:
    expected = encode_row(
        tiny_tokenizer(),
        Row("f", "1", messages=[turn("user", "a"), turn("assistant", "b")]),
        None,
        END,
    )
    records: list[dict[str, Any]] = [
        {"messages": [turn("user", "a"), turn("assistant", "b")]},
        {"conversations": [turn("user", "a"), turn("assistant", "b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"prompt": [turn("user", "a")], "completion": [turn("assistant", "b")]},
        {"messages": [turn("user", [{"type": "text", "text": "a"}]), turn("assistant", "b")]},
        {"input_ids": expected[0], "loss_mask": expected[1]},
    ]
    for record in records:
        assert encode_row(tiny_tokenizer(), parse_row(record, "f:1"), None, END) == expected


@pytest.mark.pretrained
def test_real_chat_model_supervises_answer_and_end_token(demo_target: Any) -> None:
    from domino_kit.target import load_tokenizer

    tokenizer = load_tokenizer(str(demo_target), False)
    row = Row(
        "f:1", "1", messages=[turn("user", "Hi there"), turn("assistant", "Hello! How are you?")]
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids, mask = encode_row(tokenizer, row, None, [end])
    span = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert tokenizer.decode(span) == "Hello! How are you?<|im_end|>"
